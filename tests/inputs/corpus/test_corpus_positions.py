"""Positions of a corpus input: one global sequence whatever the number of processes, the batch size and the stops."""

import gc
import itertools
import json
import signal
import threading
import time

import numpy as np
import pytest
from facts import raises_naming
from hypothesis import given, settings
from hypothesis import strategies as st
from input_helpers import assert_same, drain, stack_processes, take
from memory_documents import MemoryDocuments, documents, in_chunks, make, mixture, texts

from spmd_trainer.errors import UserError
from spmd_trainer.inputs.corpus import row_plan
from spmd_trainer.inputs.corpus.documents import Documents

CHUNKED = in_chunks(texts(200, longest=60), 90, 30)
KINDS = {
    "global": lambda: documents(CHUNKED),
    "window": lambda: documents(CHUNKED, by_number=False, sized=False, shuffle=11),
    "in order": lambda: documents(CHUNKED, by_number=False, sized=False, shuffle=None),
    "mixture": lambda: mixture(
        a=(documents(CHUNKED), 3),
        b=(documents(texts(31, letter=b"b"), shuffle=4, by_number=False), 1),
        c=(documents([b"c"]), 0.1),
    ),
    "changing mixture": lambda: mixture(
        a=(documents(CHUNKED), {0: 3, 900: 0, 2000: 1}),
        b=(documents(texts(31, letter=b"b"), shuffle=4, by_number=False), {0: 0, 900: 1}),
        c=(documents([b"c"]), 0.1),
    ),
}
# Read to the end by `make test`.
SHORT = [("mixture", "best_fit"), ("window", "split")]


def stopped(kind, packing, stops, **fields):
    """The global rows of a run that stops and goes on: (processes, batch size, batches) of each part. With its last position."""
    found, state = [], None
    for processes, batch_size, count in stops:
        shares = []
        states = set()
        for index in range(processes):
            share = make(
                KINDS[kind](),
                packing=packing,
                batch_size=batch_size,
                num_infeed_hosts=processes,
                infeed_host_index=index,
                **fields,
            )
            if state is not None:
                share.set_state(state)
            shares.append(take(share, count))
            states.add(share.get_state())
        (state,) = states  # every process has the same position
        found += stack_processes(*shares)
    return {name: np.concatenate([batch[name] for batch in found]) for name in found[0]} if found else {}, state


@pytest.mark.parametrize("packing", row_plan.PACKINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_3_then_2_then_5_processes_see_the_same_rows_as_1(kind, packing):
    whole, _ = stopped(kind, packing, [(1, 4, 40)])
    parts, _ = stopped(kind, packing, [(3, 2, 7), (2, 3, 5), (5, 1, 9), (1, 43, 1)])
    assert_same([parts], [whole])


@settings(deadline=None, max_examples=25)
@given(
    kind=st.sampled_from(list(KINDS)),
    packing=st.sampled_from(row_plan.PACKINGS),
    stops=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=5),
    window_rows=st.integers(1, 9),
)
def test_stops_at_any_batch_on_any_processes_change_nothing(kind, packing, stops, window_rows):
    parts, _ = stopped(kind, packing, stops, window_rows=window_rows)
    if parts:
        whole, _ = stopped(kind, packing, [(1, len(parts["ids"]), 1)], window_rows=window_rows)
        assert_same([parts], [whole])


@pytest.mark.parametrize(
    ("kind", "packing"),
    [
        pytest.param(kind, packing, marks=() if (kind, packing) in SHORT else pytest.mark.full)
        for kind in KINDS
        for packing in row_plan.PACKINGS
    ],
)
def test_a_finite_input_goes_on_from_every_batch_to_its_end(kind, packing):
    expected = drain(make(KINDS[kind](), packing=packing, is_training=False, batch_size=5))
    source = make(KINDS[kind](), packing=packing, is_training=False, batch_size=5)
    other = make(KINDS[kind](), packing=packing, is_training=False, batch_size=5)
    for taken in range(0, len(expected) + 1, 3):
        other.set_state(source.get_state())
        assert_same(drain(other), expected[taken:])
        assert_same(take(source, min(3, len(expected) - taken)), expected[taken : taken + 3])


@pytest.mark.parametrize("processes", [2, 3])
def test_a_finite_input_ends_in_the_same_batch_on_every_process(processes):
    whole = drain(make(KINDS["mixture"](), is_training=False, batch_size=2 * processes))
    shares = [
        drain(make(KINDS["mixture"](), is_training=False, num_infeed_hosts=processes, infeed_host_index=index))
        for index in range(processes)
    ]
    assert len({len(share) for share in shares}) == 1
    assert_same(stack_processes(*shares), whole)


def test_a_slow_and_a_fast_process_have_the_same_positions():
    fast, slow = (make(KINDS["mixture"](), num_infeed_hosts=2, infeed_host_index=index) for index in (0, 1))
    states = [(fast.get_next(), fast.get_state())[1] for _ in range(30)]
    assert [(slow.get_next(), slow.get_state())[1] for _ in range(30)] == states


def test_reset_begins_again_and_reading_ahead_is_not_in_the_position():
    source = make(KINDS["mixture"]())
    before = source.get_state()
    expected = take(source, 9)
    assert source.get_state() != before
    source.reset()
    assert source.get_state() == before
    assert_same(take(source, 9), expected)


def test_a_position_needs_less_than_200_bytes_for_each_source():
    sources = {f"source{i}": (documents(texts(40)), 1.0) for i in range(35)}
    source = make(mixture(**sources))
    take(source, 30)
    state = json.loads(source.get_state())
    assert len(json.dumps(state["position"])) < 200 * 35


def test_a_peeked_batch_is_not_in_the_position():
    source, other = make(KINDS["global"]()), make(KINDS["global"]())
    take(source, 3)
    peeked = source.peek_padded()
    other.set_state(source.get_state())
    assert_same([source.get_next_padded()], [peeked])
    assert_same([other.get_next()], [peeked])


CHANGES = {
    "documents": (lambda: documents(CHUNKED[:1]), {}, "the files have changed: 3 chunks of .*, now 1 chunks"),
    "packing": (KINDS["global"], {"packing": "pad"}, "packing was best_fit and is pad"),
    "seq_len": (KINDS["global"], {"seq_len": 17}, "seq_len was 16 and is 17"),
    "seed": (KINDS["global"], {"input_random_seed": 4}, "seed was 3 and is 4"),
    "shuffle": (lambda: documents(CHUNKED, shuffle=8), {}, "shuffle was global and is 8"),
    "tokenizer": (
        KINDS["global"],
        {"eos_id": 300},
        r"the tokenizer was ByteTokenizer \(eos_id 256\) and is .*eos_id 300",
    ),
    "sources": (
        lambda: mixture(document=(documents(CHUNKED), 1)),
        {},
        "no longer has 'documents'; did you mean document",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_since_a_position_was_saved_is_named(change):
    source, fields, message = CHANGES[change]
    saved = make(KINDS["global"]())
    take(saved, 2)
    with pytest.raises(UserError, match=message):
        make(source(), **fields).set_state(saved.get_state())


def test_a_changed_source_of_a_mixture_is_named():
    def of(chunks, weight=1):
        return make(mixture(a=(documents(CHUNKED), 1), b=(documents(chunks), weight)))

    state = of([texts(9)]).get_state()
    with pytest.raises(UserError, match="the files of 'b' have changed"):
        of([texts(8)]).set_state(state)
    with pytest.raises(UserError, match=r"share was 0.5 and is 0.25 of 'a'.*share was 0.5 and is 0.75 of 'b'"):
        of([texts(9)], 3).set_state(state)


def test_the_order_of_sources_is_part_of_a_position():
    web, books = (documents(texts(9)), 2), (documents(CHUNKED), 1)
    saved = make(mixture(web=web, books=books))
    take(saved, 2)
    make(mixture(web=web, books=books)).set_state(saved.get_state())
    with raises_naming(UserError, "sources", "order", "web, books"):
        make(mixture(books=books, web=web)).set_state(saved.get_state())


@pytest.mark.parametrize("state", [b"", b"[]", b"{}", b'{"data": 1, "position": 2}', b"\xff"])
def test_what_is_not_a_position_is_refused(state):
    with raises_naming(UserError, "saved position", repr(state)):
        make(KINDS["global"]()).set_state(state)


class Blocking(MemoryDocuments):
    """Blocks at record 20 until it is released."""

    reached, released = threading.Event(), threading.Event()

    def read_chunk(self, chunk, start):
        for number, record in enumerate(super().read_chunk(chunk, start), start):
            if number == 20:
                self.reached.set()
                self.released.wait()
            yield record


def test_an_interrupt_ends_the_wait_for_a_source_and_loses_no_row():
    some = texts(60)
    expected = drain(make(documents(some), is_training=False))
    source = make(Documents(Blocking([some]), shuffle=None), is_training=False)

    def interrupt():
        Blocking.reached.wait()
        time.sleep(0.1)  # until the main thread has taken the rows before that record
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    found = []
    with pytest.raises(KeyboardInterrupt):
        found.extend(iter(source.get_next, None))
    Blocking.released.set()
    assert_same(found + drain(source), expected)


@pytest.mark.parametrize("nth", [1, 2])
def test_an_interrupt_while_a_thread_starts_loses_no_row_and_reads_no_source_twice_at_once(nth, monkeypatch):
    some = texts(60)
    expected = drain(make(documents(some), is_training=False))
    readers, started = [], itertools.count(1)

    class Slow(MemoryDocuments):
        def read_chunk(self, chunk, start):
            for record in super().read_chunk(chunk, start):
                readers.append(threading.current_thread())
                time.sleep(0.001)
                yield record

    start = threading.Thread.start

    def interrupted(thread):
        start(thread)
        if thread.name.startswith("windows-") and next(started) == nth:
            raise KeyboardInterrupt

    source = make(Documents(Slow([some]), shuffle=None), is_training=False)
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        source.get_next()
    assert_same(drain(source), expected)
    turns = [thread for thread, _ in itertools.groupby(readers)]
    assert len(turns) == len(set(turns))


def test_threads_end_with_their_inputs():
    earlier = set(threading.enumerate())  # an earlier test's inputs may wait for the garbage collector
    source = make(KINDS["mixture"]())
    take(source, 2)
    del source
    gc.collect()
    for thread in set(threading.enumerate()) - earlier:
        thread.join(10)
        assert not thread.is_alive()
