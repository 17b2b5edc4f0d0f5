"""The prefetching thread: order, positions, errors, and stopping."""

import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from facts import assert_names, raises_naming
from input_helpers import assert_same, take
from praxis import base_input

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import synthetic
from spmd_trainer.inputs.prefetch import Prefetcher


def make_input(**kwargs):
    return synthetic.SyntheticLmInput(**{"seq_len": 3, "vocab_size": 50, "batch_size": 2, "name": "corpus", **kwargs})


class CountingInput(base_input.BaseInput):
    """Batches 0, 1, 2, ... without a position; `fail_at` raises `error`."""

    fail_at: int = -1
    error: type[Exception] = ValueError
    count: int = 0

    def get_next(self):
        if self.count == self.fail_at:
            raise self.error("out of luck")
        self.count += 1
        return self.count - 1


def identity(batch):
    return batch


def test_batches_come_in_order_with_the_position_after_each():
    expected, states = [], []
    source = make_input(is_training=True)
    for _ in range(20):
        expected.append(source.get_next())
        states.append(source.get_state())
    with Prefetcher(make_input(is_training=True), identity) as prefetched:
        items = [next(prefetched) for _ in range(20)]
    assert_same([item.batch for item in items], expected)
    assert [item.state for item in items] == states


def test_the_position_is_that_of_what_was_taken_not_of_what_is_ready():
    source = make_input(is_training=True)
    start = source.get_state()
    with Prefetcher(source, identity, depth=4) as prefetched:
        assert prefetched.state == start
        _, state = next(prefetched)
        _, state = next(prefetched)
        assert prefetched.state == state
        expected = [next(prefetched).batch for _ in range(3)]
    source.set_state(state)
    assert_same(take(source, 3), expected)


def test_put_sees_whole_batches_in_the_thread_and_no_more_than_depth_wait():
    seen, full = [], threading.Event()

    def put(batch):
        seen.append((batch, threading.current_thread()))
        if len(seen) == 3:
            full.set()
        return -batch

    with Prefetcher(CountingInput(batch_size=1, name="n"), put, depth=3) as prefetched:
        assert full.wait(10)
        time.sleep(0.05)
        assert [batch for batch, _ in seen] == [0, 1, 2]
        assert threading.main_thread() not in {thread for _, thread in seen}
        assert [next(prefetched).batch for _ in range(5)] == [0, -1, -2, -3, -4]


def test_a_finite_input_ends():
    with Prefetcher(make_input(num_examples=5), identity) as prefetched:
        assert sum(batch.eval_sample_weights.sum() for batch, _ in prefetched) == 5
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(prefetched)


def test_tensorflows_end_is_an_end():
    import tensorflow as tf

    class Ending(CountingInput):
        def get_next(self):
            if self.count == 2:
                raise tf.errors.OutOfRangeError(None, None, "no more")
            return super().get_next()

    with Prefetcher(Ending(batch_size=1), identity) as prefetched:
        assert [batch for batch, _ in prefetched] == [0, 1]


def test_an_input_without_a_position_has_none():
    with Prefetcher(CountingInput(batch_size=1), identity) as prefetched:
        assert prefetched.state is None
        assert next(prefetched) == (0, None)


@pytest.mark.parametrize(
    ("error", "raised"), [(UserError, UserError), (ValueError, ValueError), (KeyError, RuntimeError)]
)
def test_an_error_of_the_input_comes_after_the_batches_before_it(error, raised):
    source = CountingInput(batch_size=1, name="corpus", fail_at=3, error=error)
    with Prefetcher(source, identity, depth=5) as prefetched:
        assert [next(prefetched).batch for _ in range(3)] == [0, 1, 2]
        for _ in range(2):
            with raises_naming(raised, "input 'corpus'", "failed at batch 3", "out of luck") as info:
                next(prefetched)
            assert info.type is raised
            assert isinstance(info.value.__cause__, error)


@pytest.mark.parametrize("error", [UserError, ValueError])
def test_an_error_that_names_the_input_comes_as_it_is(error):
    message = "input 'corpus' has a broken line 3"

    def put(batch):
        raise error(message)

    with Prefetcher(make_input(is_training=True), put) as prefetched:
        for ask in (prefetched.peek, prefetched.__next__):
            with pytest.raises(error) as info:
                ask()
            assert str(info.value) == message


def test_peek_shows_the_next_batch_and_hands_out_nothing():
    source = CountingInput(batch_size=1, name="n", fail_at=2, error=StopIteration)
    with Prefetcher(source, identity) as prefetched:
        for batch in (0, 1):
            assert [prefetched.peek().batch for _ in range(2)] == [batch, batch]
            assert next(prefetched).batch == batch
        assert prefetched.peek() is None
    positioned = make_input(is_training=True)
    start = positioned.get_state()
    with Prefetcher(positioned, identity) as prefetched:
        assert prefetched.peek().state != start
        assert prefetched.state == start
    with pytest.raises(RuntimeError, match="'corpus' is closed"):
        prefetched.peek()


def test_an_error_of_put_names_the_input():
    def put(batch):
        raise MemoryError

    with (
        Prefetcher(make_input(is_training=True), put) as prefetched,
        raises_naming(RuntimeError, "input 'corpus'", "failed at batch 0", "MemoryError"),
    ):
        next(prefetched)


def test_close_ends_the_thread_whatever_it_does():
    before = threading.active_count()
    waiting_for_room = Prefetcher(make_input(is_training=True), identity, depth=1)
    next(waiting_for_room)
    in_put, go = threading.Event(), threading.Event()

    def slow_put(batch):
        in_put.set()
        go.wait(10)
        return batch

    in_the_middle = Prefetcher(make_input(is_training=True), slow_put)
    assert in_put.wait(10)
    threading.Timer(0.05, go.set).start()
    for prefetched in (waiting_for_room, in_the_middle):
        prefetched.close()
        prefetched.close()
        with pytest.raises(RuntimeError, match="'corpus' is closed"):
            next(prefetched)
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


class Blocked(CountingInput):
    """Waits for data that never comes."""

    def get_next(self):
        BLOCKED.set()
        NEVER.wait()


BLOCKED, NEVER = threading.Event(), threading.Event()


def test_close_leaves_an_input_that_blocks_behind_and_says_where_it_is(caplog):
    prefetched = Prefetcher(Blocked(batch_size=1, name="corpus"), identity)
    assert BLOCKED.wait(10)
    closer = threading.Thread(target=prefetched.close, args=(0.05,))
    closer.start()
    closer.join(30)
    assert not closer.is_alive()
    prefetched.close()
    (message,) = [line for line in caplog.messages if "corpus" in line]
    assert_names(message, "input 'corpus'", "0.05 s", "in wait")
    NEVER.set()


A_PROCESS_WHOSE_INPUT_BLOCKS = """
import threading
from spmd_trainer.inputs import prefetch

class Blocked:
    name = "corpus"
    def get_next_padded(self):
        threading.Event().wait()
    def get_state(self):
        return b""

with prefetch.Prefetcher(Blocked(), lambda batch: batch) as prefetched:
    prefetched.close(0.05)
print("closed")
"""


def test_a_process_whose_input_blocks_can_end():
    done = subprocess.run(
        [sys.executable, "-c", A_PROCESS_WHOSE_INPUT_BLOCKS], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout.strip()) == (0, "closed"), done.stderr


def test_a_consumer_that_waits_hears_of_close():
    held = threading.Event()
    prefetched = Prefetcher(make_input(is_training=True), lambda batch: held.wait(10))
    outcome = []

    def consume():
        try:
            next(prefetched)
        except RuntimeError as error:
            outcome.append(str(error))

    consumer = threading.Thread(target=consume)
    consumer.start()
    closer = threading.Thread(target=prefetched.close)
    closer.start()
    consumer.join(10)
    held.set()
    closer.join(10)
    assert outcome
    assert "closed" in outcome[0]


def test_leaving_by_an_error_closes():
    prefetched = Prefetcher(make_input(is_training=True), identity)
    with pytest.raises(KeyError), prefetched:
        raise KeyError
    with pytest.raises(RuntimeError, match="closed"):
        next(prefetched)


def test_depth_is_checked():
    with pytest.raises(ValueError, match=r"input 'corpus': depth=0; keep 1 batch"):
        Prefetcher(make_input(), identity, depth=0)


def test_device_arrays_are_what_put_makes():
    import jax

    with Prefetcher(make_input(is_training=True), jax.device_put) as prefetched:
        batch, _ = next(prefetched)
    assert isinstance(batch.ids, jax.Array)
    np.testing.assert_array_equal(batch.ids, make_input(is_training=True).get_next().ids)
