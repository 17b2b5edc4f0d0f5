"""Sums and weights that are added up over parts of a batch, and divided at the end."""

import math

import pytest

from spmd_trainer.step import minibatches


@pytest.mark.parametrize(
    ("parts", "mean"),
    [
        ([(2.0, 3.0), (6.0, 1.0)], 3.0),
        ([(2.0, 3.0), (math.nan, 0.0)], 2.0),
        ([(math.inf, 0.0), (5.0, 0.5)], 5.0),
        ([(math.nan, 0.0)], 0.0),
    ],
)
def test_a_part_without_weight_does_not_count_whatever_its_value(parts, mean):
    sums = [minibatches.weighted_sum(value, weight) for value, weight in parts]
    total, weight = (sum(column) for column in zip(*sums, strict=True))
    assert minibatches.weighted_mean(total, weight) == mean
