"""The texts that report a search of `--mode=plan`."""

import shlex

import plan_helpers
import pytest
from facts import assert_names
from plan_helpers import H100, make_job

from spmd_trainer.kernels.chips import chip
from spmd_trainer.planner import plan_report
from spmd_trainer.planner.plan_candidates import Candidate
from spmd_trainer.planner.plan_report import Outcome

as_h100 = pytest.fixture(plan_helpers.as_h100)


def outcome(seconds, num_bytes, rows=8):
    return Outcome(Candidate((("data", 8),)), seconds=seconds, bytes=num_bytes, rows=rows)


def test_the_pareto_front_compares_seconds_per_row_and_bytes():
    fast, small, neither = outcome(1.0, 100), outcome(2.0, 50), outcome(3.0, 60)
    larger_batch = outcome(1.8, 200, rows=16)
    unknown = Outcome(Candidate((("data", 4),)), reason="too large")
    front = plan_report.pareto_front([neither, small, unknown, fast, larger_batch])
    assert front == [larger_batch, fast, small]


def test_the_flags_of_the_best_are_complete(tmp_path, as_h100, monkeypatch):
    monkeypatch.setattr(plan_report.chips, "chip", lambda kind: chip(H100))
    monkeypatch.setattr(plan_report.plan, "chip", lambda kind: chip(H100))
    override = "train_datasets[0].batch_size.global_batch_size=12"
    job = make_job(tmp_path, overrides=(override,), num_minibatches=2)
    memory = chip(H100).memory_bytes
    found = Outcome(Candidate((("data", 8),)), 1.0, 0.5, 2.0, bytes=int(0.8 * memory), rows=12)
    lines = plan_report.report_text(job, [found]).splitlines()
    flags = shlex.split(lines[-2])
    assert flags == [f"--fdl.set={override}", "--num_minibatches=2", "--mesh=data:8"]
    assert lines[-1].strip().startswith("set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95")
    found.bytes = memory // 2
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in plan_report.report_text(job, [found])


def test_the_least_number_of_chips_counts_temporaries(tmp_path, as_h100):
    job = make_job(tmp_path)
    state = sum(variable.logical_bytes() for variable in job.partitioner.metadata.records())
    outcomes = [
        Outcome(Candidate((("data", 8),)), bytes=state + rest, state_bytes=state, reason="too large", compiled_in=1.0)
        for rest in (900, 600)
    ]
    message = plan_report.nothing_fits(job, outcomes, 1000)
    assert_names(message, "compiled step 600 B")
    assert f"at least {-(-state // 400)} chips of 1000 B are needed" in message
    # The state would fit on the 8 chips, if a mesh split all of it.
    assert "more than 8 chips of" in plan_report.nothing_fits(job, outcomes, 10 * state)
    assert_names(plan_report.nothing_fits(job, outcomes, 600), "has 600 B", "no number of")
