"""Packed documents: which tokens are in which segment, and that no token is lost."""

import itertools
import pathlib

import numpy as np
import pytest
from facts import raises_naming
from hypothesis import given, settings
from hypothesis import strategies as st
from input_helpers import assert_same, drain, stack_processes, take, write_files
from praxis import base_hyperparams, pax_fiddle

from spmd_trainer.inputs import text
from spmd_trainer.inputs.corpus import row_plan

EOS = 256


def make(files, **kwargs):
    defaults = {"seq_len": 8, "batch_size": 2, "separator": "\n"}
    return base_hyperparams.instantiate(pax_fiddle.Config(text.PackedTextInput, files=files, **{**defaults, **kwargs}))


@pytest.fixture
def files(tmp_path):
    lines = [bytes([97 + i % 26]) * (i * 7 % 19) for i in range(60)]
    return write_files(tmp_path, b"\n".join(lines[:40]), b"\n\n", b"\n".join(lines[40:]))


def segments(batches):
    """(ids, labels, positions) of every segment, as lists."""
    for batch in batches:
        for ids, labels, numbers, positions in zip(
            batch.ids, batch.labels, batch.segment_ids, batch.segment_pos, strict=True
        ):
            for number in range(1, numbers.max() + 1):
                here = numbers == number
                yield ids[here].tolist(), labels[here].tolist(), positions[here].tolist()


def test_the_rows_of_a_small_file(tmp_path):
    (batch,) = drain(make(write_files(tmp_path, b"hello\n\na\nxyz")))
    h, e, l, o, a, x, y, z = b"heloaxyz"  # noqa: E741
    np.testing.assert_array_equal(batch.ids, [[EOS, h, e, l, l, o, EOS, a], [EOS, x, y, z, 0, 0, 0, 0]])
    np.testing.assert_array_equal(batch.labels, [[h, e, l, l, o, EOS, a, EOS], [x, y, z, EOS, 0, 0, 0, 0]])
    np.testing.assert_array_equal(batch.segment_ids, [[1] * 6 + [2] * 2, [1] * 4 + [0] * 4])
    np.testing.assert_array_equal(batch.segment_pos, [[0, 1, 2, 3, 4, 5, 0, 1], [0, 1, 2, 3, 0, 0, 0, 0]])
    np.testing.assert_array_equal(batch.weights, batch.segment_ids > 0)
    np.testing.assert_array_equal(batch.paddings, batch.segment_ids == 0)
    np.testing.assert_array_equal(batch.eval_sample_weights, [1, 1])


def test_a_long_document_is_cut_and_each_piece_knows_the_token_before_it(tmp_path):
    (batch,) = drain(make(write_files(tmp_path, b"abcdefghij"), separator=None))
    np.testing.assert_array_equal(batch.ids, [[EOS, *b"abcdefg"], [*b"hij", 0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(batch.labels, [[*b"abcdefgh"], [*b"ij", EOS, 0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(batch.segment_pos, [[*range(8)], [0, 1, 2, 0, 0, 0, 0, 0]])


@settings(deadline=None, max_examples=60)
@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=60))
def test_best_fit_overlaps_nothing_and_wastes_little(sizes):
    rows = np.array(row_plan.best_fit(sizes, 12))
    columns, numbers = row_plan.places(rows, np.array(sizes))
    count = rows.max() + 1
    taken = np.zeros((count, 12), int)
    for size, row, column in zip(sizes, rows, columns, strict=True):
        assert column + size <= 12
        taken[row, column : column + size] += 1
    assert taken.max() == 1
    for row in range(count):  # numbered from 1, left to right, without gaps
        here = rows == row
        np.testing.assert_array_equal(numbers[here][np.argsort(columns[here])], np.arange(1, here.sum() + 1))
    # No two rows could have shared one: at most one row is half empty.
    assert sum(2 * total <= 12 for total in taken.sum(1)) <= 1


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_evaluation_counts_every_token_once(files, batch_size):
    source = make(files, batch_size=batch_size, seq_len=24)
    batches = drain(source)
    content = b"\n".join(pathlib.Path(path).read_bytes() for path in files)
    documents = sorted([*line, EOS] for line in content.split(b"\n") if line)
    found = list(segments(batches))
    assert sorted(labels for _, labels, _ in found) == documents
    for ids, labels, positions in found:
        assert ids == [EOS, *labels[:-1]]
        assert positions == list(range(len(labels)))
    assert sum(batch.weights.sum() for batch in batches) == sum(map(len, documents))
    num_rows = sum(batch.eval_sample_weights.sum() for batch in batches)
    assert num_rows * 24 < 1.2 * sum(map(len, documents))


def test_an_epoch_of_training_gives_every_document_once(files):
    documents = sorted(labels for _, labels, _ in segments(drain(make(files, seq_len=24))))
    source = make(files, seq_len=24, batch_size=1, is_training=True, window_rows=4)
    given = [labels for _, labels, _ in segments(take(source, 60))]
    counts = [given.count(labels) for labels in documents]
    assert max(counts) - min(counts) <= 1 + max(documents.count(labels) for labels in documents)
    assert min(counts) >= 1
    assert given[: len(documents)] != documents


def test_a_saved_position_continues_with_the_same_batches(files):
    source = make(files, is_training=True)
    take(source, 5)
    resumed = make(files, is_training=True)
    resumed.set_state(source.get_state())
    shares = [make(files, batch_size=1, is_training=True, num_infeed_hosts=2, infeed_host_index=i) for i in (0, 1)]
    for share in shares:
        share.set_state(source.get_state())
    expected = take(source, 9)
    assert_same(take(resumed, 9), expected)
    assert_same(stack_processes(*(take(share, 9) for share in shares)), expected)
    with pytest.raises(ValueError, match=r"separator was '?\n'? and is None"):
        make(files, is_training=True, separator=None).set_state(source.get_state())


def test_batches_are_what_input_specs_says(files):
    source = make(files)
    specs = source.input_specs()
    for batch in itertools.chain(drain(source)):
        assert {name: (x.shape, x.dtype) for name, x in batch.items()} == {
            name: (spec.shape, spec.dtype) for name, spec in specs.items()
        }


def test_bad_settings_say_what_to_do(files, tmp_path):
    with raises_naming(ValueError, "'input': separator=''", "documents", "None"):
        make(files, separator="")
    with pytest.raises(ValueError, match="seq_len=0; set it to"):
        make(files, seq_len=0)
    with raises_naming(ValueError, "no document with text"):
        make(write_files(tmp_path, b"\n\n")).get_next()
