"""Byte-level text windows: content, order and resuming."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from facts import raises_naming
from input_helpers import assert_same, drain, stack_processes, take, write_files
from praxis import base_hyperparams, pax_fiddle

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import text

EOS = 256


def make(files, **kwargs):
    defaults = {"seq_len": 4, "batch_size": 2, "is_training": False}
    return base_hyperparams.instantiate(pax_fiddle.Config(text.TextInput, files=files, **{**defaults, **kwargs}))


@pytest.fixture
def files(tmp_path):
    rng = np.random.RandomState(0)
    return write_files(tmp_path, *(rng.bytes(size) for size in (301, 1, 0, 77, 123)))


def counted_tokens(batches):
    """Returns the labels with weight 1, in order."""
    return np.concatenate([batch.labels[batch.weights > 0] for batch in batches])


def test_the_windows_of_a_small_file(tmp_path):
    batch, last = drain(make(write_files(tmp_path, b"hello", b"abc")))
    h, e, l, o = b"helo"  # noqa: E741
    a, b, c = b"abc"
    np.testing.assert_array_equal(batch.ids, [[EOS, h, e, l], [l, o, EOS, a]])
    np.testing.assert_array_equal(batch.labels, [[h, e, l, l], [o, EOS, a, b]])
    np.testing.assert_array_equal(batch.weights, np.ones((2, 4)))
    np.testing.assert_array_equal(batch.paddings, np.zeros((2, 4)))
    np.testing.assert_array_equal(batch.segment_ids, np.ones((2, 4)))
    np.testing.assert_array_equal(batch.segment_pos, [[0, 1, 2, 3]] * 2)
    np.testing.assert_array_equal(batch.eval_sample_weights, [1, 1])
    # The stream's last two tokens, and a row that fills up the batch.
    np.testing.assert_array_equal(last.ids, [[b, c, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(last.labels, [[c, EOS, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(last.weights, [[1, 1, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(last.paddings, [[0, 0, 1, 1], [1, 1, 1, 1]])
    np.testing.assert_array_equal(last.segment_ids, [[1, 1, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(last.segment_pos, [[0, 1, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(last.eval_sample_weights, [1, 0])


def test_batches_are_what_input_specs_says(files):
    for is_training in (True, False):
        source = make(files, is_training=is_training, batch_padding_size=0)
        specs = source.input_specs()
        for batch in take(source, 6):
            assert {name: (x.shape, x.dtype) for name, x in batch.items()} == {
                name: (spec.shape, spec.dtype) for name, spec in specs.items()
            }


@pytest.mark.parametrize("batch_size", [1, 3, 7, 64])
def test_evaluation_counts_every_token_once(files, batch_size):
    source = make(files, batch_size=batch_size, seq_len=5)
    content = b"".join(pathlib.Path(path).read_bytes() for path in files)
    batches = drain(source)
    tokens = counted_tokens(batches)
    assert len(batches) == source.num_batches
    assert len(tokens) == source.num_tokens == len(content) + len(files)
    assert sum(batch.eval_sample_weights.sum() for batch in batches) == source.num_windows
    assert bytes(tokens[tokens != EOS].tolist()) == content


def test_evaluation_ends_until_it_is_reset(files):
    source = make(files)
    first = drain(source)
    with pytest.raises(StopIteration):
        source.get_next()
    source.reset()
    assert_same(drain(source), first)


def test_batch_n_is_the_same_read_in_order_or_by_itself(files):
    for kwargs in ({"is_training": True, "batch_size": 5}, {"batch_size": 3, "seq_len": 7}):
        source = make(files, **kwargs)
        positions = range(source.num_batches or 70)
        assert_same(take(source, len(positions)), [source.batch_at(position) for position in positions])


def test_an_epoch_of_training_gives_every_window_once(files):
    evaluated = np.concatenate([batch.labels for batch in drain(make(files, batch_size=1))])
    source = make(files, batch_size=1, is_training=True)
    epochs = [np.concatenate([b.labels for b in take(source, len(evaluated))]) for _ in range(2)]
    for epoch in epochs:
        assert not np.array_equal(epoch, evaluated)
        np.testing.assert_array_equal(np.sort(epoch, axis=0), np.sort(evaluated, axis=0))
    assert not np.array_equal(epochs[0], epochs[1])


def test_order_of_training_depends_on_the_seed_alone(files):
    first = take(make(files, is_training=True, input_random_seed=3), 6)
    assert_same(take(make(files, is_training=True, input_random_seed=3), 6), first)
    other = take(make(files, is_training=True, input_random_seed=4), 6)
    assert any(not np.array_equal(a.labels, b.labels) for a, b in zip(first, other, strict=True))


def test_without_shuffling_training_follows_the_files(files):
    source = make(files, is_training=True, shuffle=False, batch_size=1)
    evaluated = drain(make(files, batch_size=1))
    assert_same(take(source, 2 * len(evaluated)), [*evaluated, *evaluated])


@pytest.mark.parametrize("consumed", [0, 1, 5, 40])
def test_a_saved_position_continues_with_the_same_batches(files, consumed):
    source = make(files, is_training=True)
    take(source, consumed)
    state = source.get_state()
    expected = take(source, 7)
    resumed = make(files, is_training=True)
    take(resumed, 2)
    resumed.set_state(state)
    assert resumed.get_state() == state
    assert_same(take(resumed, 7), expected)


def test_a_saved_position_in_an_evaluation_continues_to_its_end(files):
    source = make(files)
    take(source, 3)
    state = source.get_state()
    resumed = make(files)
    resumed.set_state(state)
    assert_same(drain(resumed), drain(source))
    resumed.set_state(source.get_state())
    assert drain(resumed) == []


def test_peeking_loses_no_batch_and_no_position(files):
    source = make(files, is_training=True)
    expected = take(make(files, is_training=True), 2)
    state = source.get_state()
    source.peek_padded()
    assert source.get_state() == state
    assert_same([source.get_next_padded(), source.get_next_padded()], expected)


@pytest.mark.parametrize("is_training", [True, False])
def test_two_processes_share_the_global_batches_of_one(files, is_training):
    alone = make(files, batch_size=6, is_training=is_training)
    shares = [
        make(files, batch_size=3, is_training=is_training, num_infeed_hosts=2, infeed_host_index=i) for i in (0, 1)
    ]
    count = alone.num_batches or 30
    assert [share.num_batches for share in shares] == [alone.num_batches] * 2
    assert_same(stack_processes(*(take(share, count) for share in shares)), take(alone, count))


def test_a_position_is_the_same_for_any_number_of_processes(files):
    alone = make(files, batch_size=6, is_training=True)
    take(alone, 5)
    state = alone.get_state()
    shares = [make(files, batch_size=2, is_training=True, num_infeed_hosts=3, infeed_host_index=i) for i in range(3)]
    for share in shares:
        share.set_state(state)
        assert share.get_state() == state
    assert_same(stack_processes(*(take(share, 4) for share in shares)), take(alone, 4))


@pytest.mark.parametrize("batch_size", [1, 4, 5, 7])
def test_a_position_carries_over_to_any_batch_size(files, batch_size):
    source = make(files, batch_size=6, is_training=True)
    take(source, 2)
    other = make(files, batch_size=batch_size, is_training=True)
    other.set_state(source.get_state())
    rows = np.concatenate([batch.labels for batch in take(other, 12)])
    expected = np.concatenate([batch.labels for batch in take(source, 14)])[: len(rows)]
    np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize("batch_size", [2, 5, 7])
def test_an_evaluation_goes_on_to_its_end_with_another_batch_size(files, batch_size):
    source = make(files, batch_size=3)
    first = take(source, 1)
    other = make(files, batch_size=batch_size)
    other.set_state(source.get_state())
    rest = list(iter(lambda: next_or_none(other), None))
    seen = np.concatenate([batch.labels[batch.eval_sample_weights > 0] for batch in [*first, *rest]])
    source.reset()
    whole = np.concatenate([b.labels[b.eval_sample_weights > 0] for b in iter(lambda: next_or_none(source), None)])
    np.testing.assert_array_equal(seen, whole)


def next_or_none(source):
    try:
        return source.get_next()
    except StopIteration:
        return None


def make_state(files, consumed, **kwargs):
    source = make(files, is_training=True, **kwargs)
    take(source, consumed)
    return source.get_state()


@pytest.mark.parametrize("changed", [{"seq_len": 8}, {"input_random_seed": 1}, {"shuffle": False}, {"eos_id": 300}])
def test_a_position_of_other_batches_is_refused(files, changed):
    other = make(files, is_training=True, **changed)
    name = {"input_random_seed": "seed"}.get(*changed, *changed)
    with pytest.raises(ValueError, match=rf"other batches: .*{name} was .* and is .*enable_input_checkpointing=False"):
        other.set_state(make_state(files, 1))


def without_sizes(state):
    """Returns a position as saved by versions that did not store sizes."""
    saved = json.loads(state)
    del saved["sizes"]
    return json.dumps(saved, sort_keys=True).encode()


def test_a_position_in_other_files_is_refused_with_how_many_there_were(files):
    state, size = make_state(files, 1), sum(os.path.getsize(path) for path in files)
    rest = size - os.path.getsize(files[-1])
    before, now = f"{len(files)} files of {size:,} bytes", f"{len(files) - 1} files of {rest:,} bytes"
    fewer = make(files[:-1], is_training=True)
    with raises_naming(ValueError, "other batches", "files have changed", before, f"now {now}"):
        fewer.set_state(state)
    with raises_naming(ValueError, "other batches", "files have changed", f"now {now}") as raised:
        fewer.set_state(without_sizes(state))
    assert before not in str(raised.value)
    with raises_naming(ValueError, "files have changed", f"still {before}", "another order"):
        make(files[::-1], is_training=True).set_state(state)


def test_a_position_saved_without_the_files_sizes_is_accepted(files):
    source = make(files, is_training=True)
    take(source, 3)
    resumed = make(files, is_training=True)
    resumed.set_state(without_sizes(source.get_state()))
    assert_same(take(resumed, 2), take(source, 2))


@pytest.mark.parametrize("state", [b"", b"\xff", b"{}", b"[1, 2]", b'{"position": "x"}'])
def test_what_is_no_position_is_refused(files, state):
    with raises_naming(ValueError, "saved position", repr(state)):
        make(files, is_training=True).set_state(state)


def test_max_windows_spreads_over_the_files(files):
    everything = np.concatenate([batch.labels for batch in drain(make(files, batch_size=1))])
    source = make(files, max_windows=9, batch_size=2)
    batches = drain(source)
    labels = np.concatenate([batch.labels for batch in batches])[:9]
    np.testing.assert_array_equal(labels, everything[np.arange(9) * len(everything) // 9])
    assert len(counted_tokens(batches)) == source.num_tokens == 36
    assert sum(batch.eval_sample_weights.sum() for batch in batches) == 9
    assert make(files, max_windows=10_000).num_windows == len(everything)


def test_padding_a_batch_adds_rows_that_count_for_nothing(files):
    source = make(files, batch_size=3, batch_padding_size=5)
    batch = source.get_next_padded()
    assert batch.ids.shape == (8, 4)
    np.testing.assert_array_equal(batch.eval_sample_weights, [1, 1, 1, 0, 0, 0, 0, 0])
    assert not batch.weights[3:].any()
    assert batch.paddings[3:].all()


def test_ids_become_text(files):
    source = make(files)
    ids = np.array([[EOS, *b"caf\xc3\xa9", EOS], [*b"a\xffb", 0, 0, 0, 0]])
    assert source.ids_to_strings(ids, np.array([7, 3])) == ["café", "a\ufffdb"]
    assert source.ids_to_strings(ids, [3, 0]) == ["ca", ""]


def test_files_may_come_from_a_function_or_be_one_path(files):
    expected = drain(make(files[:1]))
    assert_same(drain(make(files[0])), expected)
    assert_same(drain(make(lambda: files[:1])), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": []}, "`files` has no paths"),
        ({"files": None}, "`files` has no paths"),
        ({"files": lambda: ()}, r"returned no paths"),
        ({"files": ["/no/such/file.txt"]}, r"/no/such/file.txt can't .*No such file"),
        ({"seq_len": 0}, "seq_len=0; set it to"),
        ({"batch_size": 0}, "batch_size=0; set it to"),
        ({"max_windows": 0}, "max_windows=0; set it to"),
        ({"eos_id": -1}, "eos_id=-1; set it to"),
        ({"input_random_seed": -1}, "input_random_seed=-1; set it to"),
        ({"infeed_host_index": 2, "num_infeed_hosts": 2}, "infeed_host_index=2 with num_infeed_hosts=2; set them"),
        ({"is_training": True, "reset_for_eval": True}, "reset_for_eval is .* never ends"),
    ],
)
def test_bad_settings_say_what_to_do(files, change, message):
    with pytest.raises(ValueError, match=rf"TextInput 'corpus': .*{message}"):
        make(**{"files": files, "name": "corpus", **change})


def test_files_without_text_are_refused(tmp_path):
    with pytest.raises(ValueError, match="all 2 files are empty"):
        make(write_files(tmp_path, b"", b""))


def test_a_file_that_changes_under_a_run_is_refused(tmp_path):
    files = write_files(tmp_path, b"hello", b"world")
    source = make(files)
    (tmp_path / "1.txt").write_bytes(b"worlds")
    for _ in range(2):  # an input that has failed does not pretend to have ended
        with raises_naming(ValueError, files[1], "5 bytes", "has changed"):
            source.get_next()


@pytest.mark.full
def test_text_is_read_without_tensorflow():
    code = """
import sys
from spmd_trainer.inputs import stdlib_text, text
source = text.TextInput(files=stdlib_text.stdlib_heldout_files, seq_len=64, batch_size=64, is_training=True)
for _ in range(10):
    source.get_next()
assert "tensorflow" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


@pytest.mark.parametrize("field", ["seq_len", "max_windows"])
def test_a_size_that_int32_does_not_hold_is_refused(files, field):
    with raises_naming(UserError, f"{field}=10000000000000000000000000000000", "2,147,483,647", "int32"):
        make(files, **{field: 10**31})
