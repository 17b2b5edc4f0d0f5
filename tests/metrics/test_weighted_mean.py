"""Means over the batches of an evaluation."""

import math

from spmd_trainer.step.packing import WeightedMean


def mean_of(*batches):
    mean = WeightedMean()
    for value, weight in batches:
        mean.add({"x": value}, {"x": weight})
    return mean.result()


def test_batches_count_by_their_weight():
    assert mean_of((1.0, 3.0), (5.0, 1.0)) == {"x": 2.0}


def test_a_batch_without_weight_does_not_count():
    assert mean_of((1.0, 3.0), (math.nan, 0.0)) == {"x": 1.0}
    assert mean_of((math.nan, 0.0)) == {}
