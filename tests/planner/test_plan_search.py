"""The search of `--mode=plan`, on host devices that stand for eight H100s of one host."""

import dataclasses
import json
import types

import jax
import plan_helpers
import pytest
from facts import assert_names, missing_facts, raises_naming
from plan_helpers import EXPERIMENT, H100, fake_plan, make_job, run
from praxis.layers import AutodiffCheckpointType

from spmd_trainer.errors import UserError
from spmd_trainer.kernels.chips import chip
from spmd_trainer.planner import links, plan_candidates, plan_mode, plan_prediction, plan_report, plan_search, roofline
from spmd_trainer.training import job as job_module
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import make_run_config

as_h100 = pytest.fixture(plan_helpers.as_h100)


@pytest.mark.full
def test_one_candidate_is_compiled_for_its_settings(as_h100, tmp_path):
    job = make_job(tmp_path)
    found = plan_search.Search(job, ("minibatches",))
    found.outcomes = [o for o in found.outcomes if o.candidate.minibatches == 2]
    (outcome,) = found.run(1000.0, plan_report.Store(job, ("minibatches",)))
    assert outcome.shortest <= outcome.seconds <= outcome.longest
    assert outcome.bytes > outcome.state_bytes > outcome.padding > 0  # TinyLlama's sizes don't divide
    assert "all-" in outcome.dominant or "reduce-" in outcome.dominant
    assert outcome.bound < outcome.shortest


@pytest.mark.full
def test_ctrl_c_keeps_what_is_known(tmp_path, as_h100, monkeypatch, capsys):
    plans = iter([fake_plan, fake_plan])

    def interrupted(job):
        return next(plans, stop)(job)

    def stop(job):
        raise KeyboardInterrupt

    monkeypatch.setattr(plan_search.plan, "plan", interrupted)
    config = dataclasses.replace(make_job(tmp_path).config, topology="h100:1x8", search=("mesh",))
    plan_mode.search(dataclasses.replace(make_job(tmp_path), config=config))
    out = capsys.readouterr().out
    assert "10 candidates on h100:1x8: 2 compiled" in out
    assert "of the 2 that were compiled" in out  # of the others, nobody knows which is faster
    record = json.loads((tmp_path / "plan_search.json").read_text())
    assert sum(candidate["seconds"] is not None for candidate in record["candidates"]) == 2
    assert all(c["seconds"] or c["reason"] or c["not_reached"] for c in record["candidates"])
    assert_names((tmp_path / "plan.html").read_text(), "search was interrupted")


@pytest.mark.full
def test_ctrl_c_works_while_candidates_are_predicted(tmp_path, as_h100, monkeypatch, capsys):
    predict, calls = plan_prediction.predict, []

    def interrupted(*args, **settings):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return predict(*args, **settings)

    monkeypatch.setattr(plan_prediction, "predict", interrupted)
    config = dataclasses.replace(make_job(tmp_path).config, topology="h100:1x8", search=("mesh",))
    with raises_naming(UserError, "no candidate", "search was interrupted"):
        plan_mode.search(dataclasses.replace(make_job(tmp_path), config=config))
    assert not capsys.readouterr().out  # the error is the only message
    record = json.loads((tmp_path / "plan_search.json").read_text())
    assert sum(candidate["predicted"] > 0 for candidate in record["candidates"]) == 2
    assert all(c["reason"] or c["not_reached"] for c in record["candidates"])


@pytest.mark.full
def test_policies_that_give_the_same_program_are_compiled_once(tmp_path, as_h100, monkeypatch):
    compiled, refusal = [], "the train step doesn't fit: RESOURCE_EXHAUSTED"

    def too_large(job):
        compiled.append(job)
        raise UserError(refusal)

    monkeypatch.setattr(plan_search.plan, "plan", too_large)
    policies = (
        AutodiffCheckpointType.SAVE_NOTHING,
        AutodiffCheckpointType.SAVE_UNET_CONV,
        AutodiffCheckpointType.SAVE_DOT_ONLY,
    )
    monkeypatch.setattr(plan_candidates, "AutodiffCheckpointType", policies)
    outcomes, _ = run(make_job(tmp_path), "remat")
    reasons = {outcome.candidate.remat: outcome.reason for outcome in outcomes}
    assert_names(reasons.pop("save_unet_conv"), "same program", "save_nothing")  # the model has no convolutions
    assert reasons == {"save_nothing": refusal, "save_dot_only": refusal}
    assert len(compiled) == 2


@pytest.mark.full
def test_state_that_does_not_fit_is_not_compiled(tmp_path, as_h100, monkeypatch):
    small = dataclasses.replace(chip(H100), gpu=dataclasses.replace(chip(H100).gpu, memory_bytes=1000))
    monkeypatch.setattr(links, "chip", lambda kind: small)
    job = make_job(tmp_path)
    outcomes, _ = run(job, "minibatches")
    for outcome in outcomes:
        assert_names(outcome.reason, "state alone", "1000 B")
    state = sum(variable.logical_bytes() for variable in job.partitioner.metadata.records())
    message = plan_report.nothing_fits(job, outcomes, 1000)
    assert "no candidate fits" in message
    assert f"at least {-(-state // 1000)} chips of 1000 B are needed" in message


@pytest.mark.full
def test_the_budget_leaves_candidates_with_a_reason(tmp_path, as_h100, monkeypatch):
    outcomes, _ = run(make_job(tmp_path), "minibatches", budget=0.0)
    (reason,) = {outcome.not_reached for outcome in outcomes}
    assert_names(reason, "budget", "predicted")
    clock = types.SimpleNamespace(monotonic=lambda: clock.now, now=0.0)
    monkeypatch.setattr(plan_search, "time", clock)

    def slow(job):
        clock.now += 600.0
        return fake_plan(job)

    monkeypatch.setattr(plan_search.plan, "plan", slow)
    outcomes, _ = run(make_job(tmp_path), "minibatches", budget=500.0)
    reached, not_reached = sorted(outcome.not_reached for outcome in outcomes)
    assert not reached
    assert_names(not_reached, "budget", "compiled")


@pytest.mark.full
def test_tracing_and_predicting_take_half_of_the_budget(tmp_path, as_h100, monkeypatch):
    clock = types.SimpleNamespace(monotonic=lambda: clock.now, now=0.0)
    monkeypatch.setattr(plan_search, "time", clock)
    monkeypatch.setattr(plan_search.plan, "plan", fake_plan)
    predict = plan_prediction.predict

    def slow(*args, **settings):
        clock.now += 30.0
        return predict(*args, **settings)

    monkeypatch.setattr(plan_prediction, "predict", slow)
    outcomes, _ = run(make_job(tmp_path), "mesh", budget=200.0)
    assert sum(outcome.predicted > 0 for outcome in outcomes) == 4  # the fourth ends after 120 s
    assert sum(outcome.compiled_in > 0 or outcome.seconds is not None for outcome in outcomes) == 4
    assert sum(not missing_facts(outcome.not_reached, "budget", "predicted") for outcome in outcomes) == 6


@pytest.mark.full
@pytest.mark.parametrize(
    "error", [jax.errors.JaxRuntimeError("INTERNAL: no tile sizes"), NotImplementedError("no tile sizes")]
)
def test_a_candidate_that_cannot_be_compiled_is_left_out(tmp_path, as_h100, monkeypatch, error):
    def some_fail(job):
        if job.partitioner.mesh_shape()["mdl"] > 1:
            raise error
        return fake_plan(job)

    monkeypatch.setattr(plan_search.plan, "plan", some_fail)
    outcomes, _ = run(make_job(tmp_path), "mesh")
    assert any("no tile sizes" in outcome.reason for outcome in outcomes)
    assert any(outcome.seconds is not None for outcome in outcomes)


def test_a_search_starts_from_a_mesh_that_the_topology_allows(tmp_path, monkeypatch):
    """`build_job` goes on where the mesh without a search can't be built."""
    build, tried, refusal = Job.build.__func__, [], "this mesh doesn't fit the network"

    def refuse(cls, config):
        tried.append(config.mesh)
        if config.mesh is None:
            raise UserError(refusal)
        return build(cls, config)

    def make_mesh(sizes, devices):
        if sizes["replica"] > 2:
            raise ValueError("doesn't fit the network either")

    monkeypatch.setattr(Job, "build", classmethod(refuse))
    monkeypatch.setattr(plan_mode, "topology_devices", lambda topology, slices: jax.devices())
    monkeypatch.setattr(plan_mode, "mesh_over_slices", make_mesh)
    config = make_run_config(EXPERIMENT, tmp_path, mode="plan", search=("mesh",))
    for none in (None, ""):  # without a topology there is no search
        with raises_naming(UserError, "--mode=plan needs --topology"):
            plan_mode.build_job(dataclasses.replace(config, topology=none))
    monkeypatch.setattr(job_module, "_topology_devices", lambda topology, slices: jax.devices())
    found = plan_mode.build_job(dataclasses.replace(config, topology="h100:1x8"))
    assert dict(found.partitioner.mesh_shape()) == {"replica": 2, "data": 4, "mdl": 1}
    with raises_naming(UserError, refusal):
        plan_mode.build_job(dataclasses.replace(config, topology="h100:1x8", search=("remat",)))


def test_gpu_meshes_are_not_divided_over_slices(tmp_path, as_h100):
    job = make_job(tmp_path)
    job = dataclasses.replace(job, config=dataclasses.replace(job.config, topology="h100:1x8", num_slices=4))
    assert len(plan_search.Search(job, ("mesh",)).outcomes) == 10


@pytest.mark.full
@pytest.mark.parametrize("by_compiler", [True, False])
def test_what_needs_more_memory_than_one_that_does_not_fit_is_left_out(tmp_path, as_h100, monkeypatch, by_compiler):
    compiled = []

    def too_large(job):
        compiled.append(job.partitioner.num_minibatches)
        if by_compiler:
            raise UserError("the train step doesn't fit:\ntable") from jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")
        found = fake_plan(job)
        return types.SimpleNamespace(**{**vars(found), "fits": False, "total": 2**40, "arguments": 1, "temporaries": 2})

    monkeypatch.setattr(plan_search.plan, "plan", too_large)
    job = make_job(tmp_path, overrides=("train_datasets[0].batch_size.global_batch_size=8",))
    found = plan_search.Search(job, ("minibatches",))
    # So that the one with the most minibatches is compiled first.
    monkeypatch.setattr(plan_search.Search, "_next", lambda self: next((o for o in outcomes if not o.is_known), None))
    outcomes = found.outcomes[::-1]
    found.run(1000.0, plan_report.Store(job, ("minibatches",)))
    # One minibatch holds no accumulated gradients, so it may fit.
    assert compiled == [8, 1]
    assert [o.candidate.minibatches for o in outcomes] == [8, 4, 2, 1]
    for smaller in outcomes[1:3]:
        assert_names(smaller.reason, "8 minibatches doesn't fit", "this one", "rows")
    assert [o.too_large for o in outcomes] == [True, False, False, True]
    assert_names(outcomes[0].reason, "step doesn't fit:" if by_compiler else "needs 1.0 TiB of")
    assert "\n" not in outcomes[0].reason


@pytest.mark.full
def test_an_error_without_text_leaves_a_candidate_out_too(tmp_path, as_h100, monkeypatch):
    def fails(job):
        raise NotImplementedError

    monkeypatch.setattr(plan_search.plan, "plan", fails)
    job = make_job(tmp_path, overrides=("train_datasets[0].batch_size.global_batch_size=8",))
    outcomes = plan_search.Search(job, ("minibatches",)).run(1000.0, plan_report.Store(job, ("minibatches",)))
    assert {outcome.reason for outcome in outcomes} == {"NotImplementedError"}


@pytest.mark.full
def test_a_batch_that_the_experiments_minibatches_do_not_divide(tmp_path, as_h100, monkeypatch):
    """6 rows in 3 minibatches; half of them, 3 rows, only in 1 or 3."""
    monkeypatch.setattr(plan_search.plan, "plan", fake_plan)
    monkeypatch.setattr(plan_search.plan_candidates, "_BATCH_FACTORS", (0.5, 1, 4 / 3))
    job = make_job(tmp_path, num_minibatches=3)
    outcomes, _ = run(job, "minibatches", "batch")
    found = {(o.candidate.rows, o.candidate.minibatches): o for o in outcomes}
    assert set(found) == {(3, 1), (6, 1), (6, 2), (8, 1), (8, 2), (8, 4), (8, 8)}
    assert {o.reason for o in outcomes if o.seconds is None} <= {""}
    # Where the number of minibatches isn't searched, it stays 3, which doesn't divide 8.
    outcomes, _ = run(make_job(tmp_path, num_minibatches=3), "batch")
    reasons = {o.candidate.rows: o.reason for o in outcomes}
    assert not reasons[3]
    assert not reasons[6]
    assert "num_minibatches=3" in reasons[8]


@pytest.mark.full
def test_a_collective_without_time_dominates_nothing(tmp_path, as_h100, monkeypatch):
    def on_one_device(job):
        found = fake_plan(job)
        found.estimate.collectives = [roofline.CollectiveTime("all-reduce", ("replica",), 0.0, "")]
        return found

    monkeypatch.setattr(plan_search.plan, "plan", on_one_device)
    (outcome,), _ = run(make_job(tmp_path))
    assert outcome.seconds is not None
    assert outcome.dominant == ""
