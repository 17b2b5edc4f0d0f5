"""Which way a metric is better, and for how long it may be worse."""

import pytest

from spmd_trainer.training.early_stopping import EarlyStopping


@pytest.mark.parametrize(("mode", "values"), [("min", [3.0, 2, 2.5, 1, 2, 2]), ("max", [1.0, 2, 1.5, 3, 2, 2])])
def test_lower_or_higher_is_better_as_told(mode, values):
    stopping = EarlyStopping(metric="a/b", mode=mode, patience=2)
    told = []
    for step, value in enumerate(values):
        stops = stopping({"a/b": value}, "eval", step, False)
        told.append((stops, stopping.improved))
    assert told == [(False, True), (False, True), (False, False), (False, True), (False, False), (True, False)]
