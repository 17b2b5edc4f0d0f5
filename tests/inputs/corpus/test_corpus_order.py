"""The order of a source's documents: every one once in each epoch, shuffled anew, from any position."""

import numpy as np
import pytest
from facts import raises_naming
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_documents import MemoryDocuments, in_chunks

from spmd_trainer.errors import UserError
from spmd_trainer.inputs.corpus import order

TEXTS = [b"%d" % i for i in range(50)]
SHUFFLES = ["global", "auto", 7, 50, None]


def make(shuffle, *, sizes=(20, 0, 13), position=None, epochs=2, texts=TEXTS, **kwargs):
    source = MemoryDocuments(in_chunks(texts, *sizes))
    return order.DocumentStream(
        source, shuffle=shuffle, seed=5, epochs=epochs, position=position or order.Position(), **kwargs
    )


def drain(stream, count=9):
    found = []
    while some := stream.take(count):
        found += some
    return found


def contents(taken):
    return [one.record.content for one in taken]


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_each_epoch_has_every_document_once_in_an_order_of_its_own(shuffle):
    found = contents(drain(make(shuffle)))
    first, second = found[:50], found[50:]
    assert sorted(first) == sorted(second) == sorted(TEXTS)
    assert (first == TEXTS) == (first == second) == (shuffle is None)


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_a_stream_goes_on_from_any_position(shuffle):
    everything = drain(make(shuffle))
    for index, (record, after, (chunk, number)) in enumerate(everything):
        assert contents(make(shuffle, position=after).take(5)) == contents(everything[index + 1 : index + 6])
        assert TEXTS[(0, 20, 20, 33)[chunk] + number] == record.content


@settings(deadline=None, max_examples=40)
@given(counts=st.lists(st.integers(1, 30), min_size=1, max_size=8), shuffle=st.sampled_from(SHUFFLES))
def test_how_many_are_taken_at_a_time_makes_no_difference(counts, shuffle):
    stream = make(shuffle)
    taken = [one for count in counts for one in stream.take(count)]
    assert taken == drain(make(shuffle), 1)[: len(taken)]


def test_a_window_shuffles_within_a_chunk_and_no_further():
    numbers = [int(text) for text in contents(drain(make(7, epochs=1)))]
    chunks = {0: 20, 20: 13, 33: 17}  # the first document of a chunk: its size
    start, order_of_chunks = 0, []
    while start < 50:
        first = max(low for low in chunks if low <= numbers[start])
        here = numbers[start : start + chunks[first]]
        for block in range(0, len(here), 7):
            window = here[block : block + 7]
            assert sorted(window) == list(range(first + block, first + block + len(window)))
        order_of_chunks.append(first)
        start += len(here)
    assert sorted(order_of_chunks) == sorted(chunks)


def test_a_window_of_auto_ends_with_the_document_that_fills_its_bytes():
    found = contents(
        drain(make("auto", epochs=1, sizes=(0,), texts=[b"0" * 9, *TEXTS[:9], b"1" * 9], auto_window_bytes=9))
    )
    assert found[0] == b"0" * 9
    assert sorted(found[1:10]) == sorted(TEXTS[:9])
    assert found[10] == b"1" * 9


@pytest.mark.parametrize("shuffle", ["global", 7, None])
@pytest.mark.parametrize("epochs", [1, None])
def test_no_document_at_all_is_an_error_and_not_a_hang(shuffle, epochs):
    with pytest.raises(UserError, match="hold no document"):
        make(shuffle, texts=[], sizes=(0, 0), epochs=epochs).take(1)


def test_documents_before_an_error_are_given_first():
    class Failing(MemoryDocuments):
        def read_chunk(self, chunk, start):
            yield from super().read_chunk(chunk, start)
            raise UserError("the disk is gone")

    stream = order.DocumentStream(Failing([TEXTS[:3]]), shuffle=None, seed=0, epochs=1)
    assert contents(stream.take(5)) == TEXTS[:3]
    for _ in range(2):
        with raises_naming(UserError, "disk is gone"):
            stream.take(5)


@pytest.mark.parametrize("size", [1, 2, 5, 60_000, 70_000])
def test_a_permutation_has_every_number_once(size):
    entries = order.permutation(size, 3, 1)(np.arange(size))
    assert sorted(entries) == list(range(size))
    assert size < 3 or not np.array_equal(entries, order.permutation(size, 3, 2)(np.arange(size)))


def test_small_permutations_are_uniform():
    found = [tuple(order.permutation(3, seed)(np.arange(3))) for seed in range(2400)]
    counts = np.unique(found, axis=0, return_counts=True)[1]
    assert len(counts) == 6
    # Chi-square with 5 degrees of freedom is above 20.5 once in a thousand.
    assert ((counts - 400) ** 2 / 400).sum() < 20.5


@pytest.mark.parametrize("shuffle", ["globl", 0, -1, True, 2.5])
def test_an_unknown_shuffle_is_an_error(shuffle):
    with pytest.raises(UserError, match="shuffle="):
        order.resolve_shuffle(MemoryDocuments([TEXTS]), shuffle)


def test_global_needs_documents_by_number():
    source = MemoryDocuments([TEXTS], by_number=False)
    with pytest.raises(UserError, match="in order only"):
        order.resolve_shuffle(source, "global")
    assert order.resolve_shuffle(source, "auto") == "auto"
    assert order.resolve_shuffle(MemoryDocuments([TEXTS]), "auto") == "global"
