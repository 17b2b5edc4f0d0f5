"""The exit status of the comparison with published steps."""

import types

import pytest

from benchmarks import plan_published
from spmd_trainer.errors import MissingCompilerError, UserError
from spmd_trainer.training import job

NAMES = list(plan_published.RUNS)[:2]


def result(shortest, middle, longest):
    estimate = types.SimpleNamespace(shortest=shortest, middle=middle, longest=longest)
    return plan_published.Result(1.0, estimate, 0.0)


GOOD = result(0.5, 0.9, 1.3)
INSIDE_ONLY = result(0.1, 0.6, 1.1)
CLOSE_ONLY = result(0.8, 0.9, 0.95)


@pytest.mark.parametrize(
    ("results", "status"),
    [
        ([GOOD, GOOD], 0),
        ([GOOD, None], 0),
        ([None, None], 1),
        # One in the range and another near its middle: neither is good.
        ([INSIDE_ONLY, CLOSE_ONLY], 1),
    ],
)
def test_a_run_counts_if_it_is_inside_and_near_the_middle(monkeypatch, results, status):
    def estimate(name, run, programs):
        if (found := results[NAMES.index(name)]) is None:
            raise MissingCompilerError("no compiler")
        return found

    monkeypatch.setattr(plan_published, "estimate", estimate)
    monkeypatch.setattr(plan_published, "row", lambda name, result: name)
    assert plan_published.main(NAMES) == status


def test_each_of_six_inside_or_close_is_not_enough(monkeypatch):
    kinds = [GOOD, GOOD, GOOD, GOOD, INSIDE_ONLY, CLOSE_ONLY]
    names = list(plan_published.RUNS)[:6]
    monkeypatch.setattr(plan_published, "estimate", lambda name, run, programs: kinds[names.index(name)])
    monkeypatch.setattr(plan_published, "row", lambda name, result: name)
    # 5 of 6 are inside and 5 of 6 close, but only 4 are both.
    assert plan_published.main(names) == 1


def test_only_a_missing_compiler_leaves_a_run_out(monkeypatch, capsys):
    missing = "no GPU compiler"
    errors = iter([MissingCompilerError(missing), UserError("the step doesn't fit")])

    def estimate(name, run, programs):
        raise next(errors)

    monkeypatch.setattr(plan_published, "estimate", estimate)
    with pytest.raises(UserError, match="doesn't fit"):
        plan_published.main(NAMES)
    assert f"{NAMES[0]:20} left out: {missing}" in capsys.readouterr().out


def test_building_a_job_says_that_a_compiler_is_missing(monkeypatch):
    def devices(topology, num_slices):
        raise MissingCompilerError("no TPU compiler")

    monkeypatch.setattr(job, "_topology_devices", devices)
    with pytest.raises(MissingCompilerError, match="no TPU compiler"):
        plan_published.estimate(NAMES[0], plan_published.RUNS[NAMES[0]], None)
