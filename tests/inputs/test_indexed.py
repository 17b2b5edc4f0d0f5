"""The global order of examples."""

import json
import tracemalloc

import numpy as np
import pytest
from facts import raises_naming

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import indexed, permutations
from spmd_trainer.inputs.indexed import ExampleOrder


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_each_epoch_is_a_permutation_of_its_own(size):
    order = ExampleOrder(size, shuffle=True, seed=5)
    epochs = order.examples(0, 4 * size).reshape(4, size)
    np.testing.assert_array_equal(np.sort(epochs, axis=1), np.tile(np.arange(size), (4, 1)))
    if size > 2:
        assert len({tuple(epoch) for epoch in epochs}) == 4


def test_any_range_of_the_order_gives_the_same_examples():
    order = ExampleOrder(7, shuffle=True, seed=5)
    whole = order.examples(0, 60)
    for first, count in ((0, 3), (5, 4), (13, 22), (59, 1)):
        np.testing.assert_array_equal(order.examples(first, count), whole[first : first + count])


def test_the_shuffle_never_changes():
    # A run that is resumed under another version of numpy must see the same order: these values stay.
    order = ExampleOrder(8, shuffle=True, seed=17)
    assert order.examples(0, 16).tolist() == [7, 2, 3, 4, 1, 5, 0, 6, 3, 7, 1, 2, 0, 5, 6, 4]


def test_the_shuffle_of_a_large_set_never_changes():
    order = ExampleOrder(10**9, shuffle=True, seed=17)
    assert order.examples(0, 4).tolist() == [167127619, 323361528, 973442204, 296372742]
    assert order.examples(10**9, 3).tolist() == [238601639, 283035642, 775512431]


def test_a_large_set_is_shuffled_in_little_memory():
    order = ExampleOrder(10**9, shuffle=True, seed=5)
    tracemalloc.start()
    before_the_end = order.examples(10**9 - 500, 1000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20
    assert before_the_end.min() >= 0
    assert before_the_end.max() < 10**9
    np.testing.assert_array_equal(order.examples(10**9 - 5, 10), before_the_end[495:505])


@pytest.mark.parametrize("size", [1, 2, 3, 7, 99, 100, 101, 65537])
def test_a_permutation_that_is_not_stored_is_one(size):
    epochs = [permutations.KeyedPermutation(size, 5, epoch)(np.arange(size)) for epoch in range(3)]
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(size))
    if size > 3:
        assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a_permutation_that_is_not_stored_spreads_its_entries_evenly():
    size, drawn, bins = 10**9, 100_000, 500
    entries = permutations.KeyedPermutation(size, 5, 0)(np.arange(drawn))
    # Neither the entries nor the steps from one to the next prefer a part of the range. 99.99% of the time, chi^2 is below.
    for values in (entries, np.diff(entries) % size):
        counts, _ = np.histogram(values, bins, (0, size))
        assert np.sum((counts - len(values) / bins) ** 2) / (len(values) / bins) < 630
    assert abs(np.corrcoef(np.arange(drawn), entries)[0, 1]) < 0.02


class LargeInput(indexed.IndexedInput):
    """A training input over more examples than permutations are stored for."""

    @property
    def order(self):
        return ExampleOrder(permutations.STORED_SIZE + 1, shuffle=True, seed=self.seed)


def test_a_position_in_an_order_of_before_is_not_continued_in_another():
    source = LargeInput(batch_size=2, name="large", is_training=True)
    state = source.get_state()
    source.set_state(state)
    saved = json.loads(state)
    del saved["data"]["permutation"]
    with raises_naming(UserError, "permutation", "None", "feistel"):
        source.set_state(json.dumps(saved).encode())


def test_a_finite_order_ends():
    order = ExampleOrder(5, endless=False)
    assert order.examples(3, 4).tolist() == [3, 4, 5, 5]


def test_a_set_without_end_is_in_order():
    assert ExampleOrder(None).examples(2**40, 2).tolist() == [2**40, 2**40 + 1]
