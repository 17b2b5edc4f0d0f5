"""Rows of a corpus input: every token once, in segments that are whole, whatever the shuffle and the packing."""

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from input_helpers import drain, stack_processes, take
from memory_documents import EOS, documents, in_chunks, make, segments, texts

from spmd_trainer.inputs.corpus import row_plan

SHUFFLES = ["global", 7, None]


def epoch(source, **fields):
    """All batches of one epoch."""
    return drain(make(source, is_training=False, **fields))


def pieces(some, seq_len=16):
    """The segments that texts become, sorted."""
    whole = [text + b"\n" for text in some if text]
    return sorted(text[start : start + seq_len] for text in whole for start in range(0, len(text), seq_len))


def test_the_rows_of_a_small_corpus():
    (batch,) = epoch(documents([b"hello", b"", b"a", b"xyz"]), seq_len=8)
    h, e, l, o, a, x, y, z = b"heloaxyz"  # noqa: E741
    np.testing.assert_array_equal(batch.ids, [[EOS, h, e, l, l, o, EOS, a], [EOS, x, y, z, 0, 0, 0, 0]])
    np.testing.assert_array_equal(batch.labels, [[h, e, l, l, o, EOS, a, EOS], [x, y, z, EOS, 0, 0, 0, 0]])
    np.testing.assert_array_equal(batch.segment_ids, [[1] * 6 + [2] * 2, [1] * 4 + [0] * 4])
    np.testing.assert_array_equal(batch.segment_pos, [[0, 1, 2, 3, 4, 5, 0, 1], [0, 1, 2, 3, 0, 0, 0, 0]])
    np.testing.assert_array_equal(batch.weights, batch.segment_ids > 0)
    np.testing.assert_array_equal(batch.paddings, batch.segment_ids == 0)
    np.testing.assert_array_equal(batch.eval_sample_weights, [1, 1])


@pytest.mark.parametrize("packing", ["best_fit", "pad"])
@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("batch_size", [1, 5, 64])
def test_an_epoch_has_every_piece_of_every_document_once(packing, shuffle, batch_size):
    some = [*texts(150), b"", b"a" * 16, b"b" * 15, b"c" * 500]
    source = documents(in_chunks(some, 40, 0, 60), shuffle=shuffle)
    batches = epoch(source, packing=packing, batch_size=batch_size, shuffle=shuffle is not None)
    assert sorted(segments(batches)) == pieces(some)


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_an_epoch_of_the_stream_has_every_token_of_every_document_once(shuffle):
    some = [*texts(150), b"", b"a" * 16, b"c" * 500]
    source = documents(in_chunks(some, 40, 0, 60), shuffle=shuffle)
    batches = epoch(source, packing="split", batch_size=5, shuffle=shuffle is not None)
    whole = b"".join(text + b"\n" for text in some if text)
    assert sorted(b"".join(segments(batches))) == sorted(whole)
    assert sum(int(batch.eval_sample_weights.sum()) for batch in batches) == -(-len(whole) // 16)


@settings(deadline=None, max_examples=30)
@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=60).filter(any),
    batch_size=st.integers(1, 7),
    window_rows=st.integers(1, 5),
    packing=st.sampled_from(row_plan.PACKINGS),
)
def test_every_token_of_any_documents_comes_once(lengths, batch_size, window_rows, packing):
    some = [bytes([97 + i % 26]) * length for i, length in enumerate(lengths)]
    batches = epoch(documents(some), batch_size=batch_size, window_rows=window_rows, packing=packing, seq_len=8)
    found = collections.Counter(b"".join(segments(batches)))
    assert found == collections.Counter(b"".join(text + b"\n" for text in some if text))
    assert all(batch.ids.shape == (batch_size, 8) for batch in batches)


@pytest.mark.parametrize("processes", [1, 3])
def test_split_cuts_the_documents_every_t_tokens_across_windows(processes):
    some = [*texts(80), b"d" * 300, *texts(10)]
    stream = b"".join(text + b"\n" for text in some)
    shares = [
        epoch(documents(some), packing="split", num_infeed_hosts=processes, infeed_host_index=index)
        for index in range(processes)
    ]
    batches = stack_processes(*shares)
    labels = np.concatenate([batch["labels"][batch["weights"] > 0] for batch in batches])
    ids = np.concatenate([batch["ids"][batch["weights"] > 0] for batch in batches])
    assert np.where(labels == EOS, 10, labels).astype(np.uint8).tobytes() == stream
    np.testing.assert_array_equal(ids, np.append(EOS, labels[:-1]))
    full = np.concatenate([batch["segment_ids"] for batch in batches]).sum(1)
    assert full[: len(stream) // 16].tolist() == [16] * (len(stream) // 16)
    assert full[len(stream) // 16 :].tolist()[0] == len(stream) % 16


@pytest.mark.parametrize("packing", row_plan.PACKINGS)
def test_each_id_is_the_token_before_its_label(packing):
    for batch in take(make(documents(texts(100)), packing=packing), 12):
        inside = (batch.segment_ids[:, 1:] == batch.segment_ids[:, :-1]) & (batch.segment_ids[:, 1:] > 0)
        np.testing.assert_array_equal(batch.ids[:, 1:][inside], batch.labels[:, :-1][inside])
        np.testing.assert_array_equal(batch.segment_pos[:, 1:][inside], batch.segment_pos[:, :-1][inside] + 1)
        starts = (batch.segment_pos == 0) & (batch.segment_ids > 0)
        if packing != "split":
            # Documents begin with a digit; pieces from inside of one, with a letter.
            np.testing.assert_array_equal(batch.ids[starts] == EOS, np.isin(batch.labels[starts], list(b"0123456789")))
        np.testing.assert_array_equal(batch.labels[batch.segment_ids == 0], 0)


def test_only_the_last_batch_has_rows_of_weight_0_and_then_the_input_ends():
    source = make(documents(texts(100)), is_training=False, batch_size=7)
    batches = drain(source)
    rows_given = np.concatenate([batch.eval_sample_weights for batch in batches])
    assert rows_given[:-7].all()
    assert (np.diff(rows_given) <= 0).all()
    for _ in range(2):
        with pytest.raises(StopIteration):
            source.get_next()
    source.reset()
    assert len(drain(source)) == len(batches)


def test_rows_are_shuffled_within_a_window_and_in_order_without_shuffle():
    some = [b"%04d" % i + b"x" * 10 for i in range(64)]
    firsts = {}
    for shuffle in (False, True):
        batches = take(make(documents(some, shuffle=None), shuffle=shuffle, packing="pad"), 32)
        firsts[shuffle] = [int(text[:4]) for text in segments(batches)]
    assert firsts[False] == list(range(64))
    assert firsts[True] != firsts[False]
    for start in range(0, 64, 8):
        assert sorted(firsts[True][start : start + 8]) == list(range(start, start + 8))


@settings(deadline=None, max_examples=60)
@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=60))
def test_best_fit_decreasing_overlaps_nothing_and_keeps_the_order(sizes):
    plan = row_plan.pack(sizes, 12, row_plan.BEST_FIT)
    taken = np.zeros((plan.num_rows, 12), int)
    for size, row, column in zip(sizes, plan.rows, plan.columns, strict=True):
        assert column + size <= 12
        taken[row, column : column + size] += 1
    assert taken.max() == 1
    firsts = [np.flatnonzero(plan.rows == row)[0] for row in range(plan.num_rows)]
    assert firsts == sorted(firsts)
    for row in range(plan.num_rows):  # without gaps, in the order of the pieces
        here = plan.rows == row
        sizes_here = np.array(sizes)[here]
        np.testing.assert_array_equal(plan.columns[here], np.cumsum(sizes_here) - sizes_here)
        np.testing.assert_array_equal(plan.segments[here], np.arange(1, here.sum() + 1))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sets(st.integers(1, 11)), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_best_fit_decreasing_needs_few_rows_more_than_the_best_packing(cuts, shuffler):
    """The best packing is known: the pieces are full rows of 12, cut and shuffled."""
    rows = [np.diff([0, *sorted(row), 12]).tolist() for row in cuts]
    sizes = [size for row in rows for size in row]
    shuffler.shuffle(sizes)
    # The heuristic's bound (Johnson et al. 1974, "Worst-case performance bounds for simple one-dimensional packing algorithms"),
    # with a constant of 1 in place of 4.
    assert row_plan.pack(sizes, 12, row_plan.BEST_FIT).num_rows <= 11 / 9 * len(rows) + 1


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_training_input_with_epochs_gives_each_document_so_often_and_ends(epochs):
    some = texts(60)
    source = make(documents(some, epochs=epochs), batch_size=4)
    assert not source.endless
    assert sorted(segments(drain(source))) == pieces(some * epochs)


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_an_endless_input_gives_each_document_once_per_epoch(shuffle):
    some = texts(60, longest=10)
    # Windows of 10 documents, one in a row: an epoch is 6 windows.
    source = make(documents(some, shuffle=shuffle), packing="pad", window_rows=10, batch_size=5)
    epochs = [segments(take(source, 12)) for _ in range(3)]
    assert source.endless
    assert source.num_batches is None
    assert all(sorted(found) == pieces(some) for found in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_start_token_comes_before_every_document(tmp_path):
    class WithBeginning:
        vocab_size, eos_id, bos_id, bytes_per_token = 258, EOS, 257, 1

        def encode(self, text, path="", *, cut=False):
            return np.frombuffer(text, np.uint8)

        def decode(self, ids, lengths):
            return ["" for _ in ids]

        def fingerprint(self):
            return {"kind": "with beginning"}

    (packed,) = epoch(documents([b"ab", b"c"]), tokenizer=WithBeginning(), start="bos", seq_len=6, batch_size=1)
    assert packed.ids.tolist() == [[257, *b"ab", 257, *b"c", 0]]
    (cut,) = epoch(
        documents([b"ab", b"c"]), tokenizer=WithBeginning(), start="bos", seq_len=8, batch_size=1, packing="split"
    )
    assert cut.labels.tolist() == [[257, *b"ab", EOS, 257, *b"c", EOS, 0]]
    assert cut.ids.tolist() == [[EOS, 257, *b"ab", EOS, 257, *b"c", 0]]
