"""The search of `--mode=plan`, on host devices that stand for eight H100s of one host."""

import dataclasses
import json
import re
import shlex
import subprocess
import sys
import types

import jax
import pytest
from praxis.layers import AutodiffCheckpointType

from spmd_trainer.analysis import links, roofline
from spmd_trainer.analysis.chips import chip
from spmd_trainer.errors import UserError
from spmd_trainer.experiments.lm import llama
from spmd_trainer.partitioning.shard_map import ShardMapPartitioner
from spmd_trainer.programs import job as job_module
from spmd_trainer.programs import plan_candidates, plan_prediction, plan_report, plan_search
from spmd_trainer.programs.job import Job
from spmd_trainer.programs.plan_candidates import Candidate
from spmd_trainer.programs.plan_report import Outcome
from spmd_trainer.programs.run_config import make_run_config

H100 = "NVIDIA H100 80GB HBM3"
EXPERIMENT = "lm.llama.TinyLlama"


@pytest.fixture
def as_h100(monkeypatch):
    known, machine = chip(H100), links.machine(H100)
    for module in (roofline, plan_search):
        monkeypatch.setattr(module, "chip", lambda kind: known)
    monkeypatch.setattr(links, "machine", lambda kind: machine)


def make_job(directory, **settings):
    return Job.build(make_run_config(EXPERIMENT, directory, mode="plan", **settings))


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return make_job(tmp_path_factory.mktemp("job"))


def test_all_ways_to_factor_the_devices():
    found = list(plan_candidates.meshes(("replica", "data", "mdl"), 64))
    assert len(found) == len(set(found)) == 28  # 2 ** 6 over three axes
    assert (("replica", 1), ("data", 16), ("mdl", 4)) in found
    assert len(list(plan_candidates.meshes(("data", "mdl"), 12))) == 6
    across = list(plan_candidates.meshes(("replica", "data", "mdl"), 8, num_slices=4))
    # Only an outermost axis of 4 or 8 crosses the slices.
    assert all(next(size for _, size in mesh if size > 1) % 4 == 0 for mesh in across)
    assert (("replica", 1), ("data", 4), ("mdl", 2)) in across
    assert (("replica", 2), ("data", 4), ("mdl", 1)) not in across


def test_flags_of_a_candidate_give_its_settings(job, tmp_path):
    candidate = Candidate((("replica", 1), ("data", 2), ("mdl", 4)), "save_dot_only", 2, 12)
    # As a shell reads them.
    assert shlex.split(candidate.flags(job.config.experiment)) == [
        "--mesh=replica:1,data:2,mdl:4",
        "--num_minibatches=2",
        "--fdl.set=task.model.lm_tpl.checkpoint_policy='save_dot_only'",
        "--fdl.set=train_datasets[0].batch_size.global_batch_size=12",
    ]
    changed = make_run_config(EXPERIMENT, tmp_path, overrides=candidate.overrides(job.config.experiment))
    lines = changed.experiment.lines()
    assert "task.model.lm_tpl.checkpoint_policy: 'save_dot_only'" in lines
    assert "train_datasets[0].batch_size.global_batch_size: 12" in lines


def test_the_dimensions_multiply(job):
    def count(*searched):
        return len(
            plan_candidates.enumerate_candidates(
                job.config.experiment,
                searched,
                mesh=job.partitioner.mesh_shape(),
                num_slices=1,
                rows=job.num_rows,
            )
        )

    assert count("mesh") == 10
    assert count("mesh", "minibatches") == 20  # 6 rows: 1 or 2
    assert count("mesh", "remat") == 10 * 17
    assert count("batch") == 4


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("20m", 1200), ("1.5h", 5400)])
def test_budgets(text, seconds):
    assert plan_candidates.parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["20", "m", "-1m", "20 minutes"])
def test_a_budget_that_cannot_be_read(text):
    with pytest.raises(UserError, match=f"--budget={text} is not of the form 90s, 20m or 1h"):
        plan_candidates.parse_budget(text)


@pytest.mark.parametrize("text", ["0s", "0.0h"])
def test_a_budget_of_no_time(text):
    with pytest.raises(UserError, match=f"--budget={text} leaves no time to compile a candidate"):
        plan_candidates.parse_budget(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mode=plan"], "--mode=plan needs --topology=CHIP:SHAPE, e.g. v5e:16x16 or h100:32x8"),
        (["--mode=inspect", "--budget=5m"], "--budget goes with --mode=plan"),
        (["--mode=inspect", "--num_slices=2"], "--num_slices goes with --topology"),
        (["--mode=eval", "--num_minibatches=2"], "--num_minibatches goes with --mode=train, inspect, plan and verify"),
        (["--mode=plan", "--topology=v5e:2x2", "--search=mehs"], "--search has no 'mehs'"),
        (["--mode=plan", "--topology=v5e:2x2", "--budget=20"], "--budget=20 is not of the form 90s, 20m or 1h"),
        (["--mode=train", "--topology=v5e:2x2"], "--topology goes with --mode=inspect and --mode=plan"),
    ],
)
def test_flags_that_do_not_go_together(tmp_path, arguments, message):
    command = [
        sys.executable,
        "-m",
        "spmd_trainer.main",
        f"--exp={EXPERIMENT}",
        f"--job_log_dir={tmp_path}",
        *arguments,
    ]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 2
    assert message in finished.stderr


def test_the_number_of_minibatches_is_that_of_the_flag(tmp_path):
    assert make_job(tmp_path, num_minibatches=2).partitioner.num_minibatches == 2
    with pytest.raises(UserError, match="num_minibatches=4"):
        make_job(tmp_path, num_minibatches=4)  # 6 rows


def test_an_unknown_dimension_gets_a_suggestion():
    with pytest.raises(UserError, match=r"--search has no 'remta'; it takes mesh, remat, .*did you mean remat"):
        plan_candidates.parse_dimensions(["remta"])


def run(job, *searched, budget=1000.0):
    found = plan_search.Search(job, searched)
    store = plan_report.Store(job, searched)
    return found.run(budget, store), store


def fake_plan(job):
    """A plan whose seconds and bytes depend on the mesh: the larger 'mdl', the slower and the smaller."""
    part = job.partitioner.mesh_shape()["mdl"]
    found = types.SimpleNamespace(
        shortest=float(part),
        middle=2.0 * part,
        longest=3.0 * part,
        collectives=[roofline.CollectiveTime("all-gather", ("mdl",), 1.0, "NVLink")],
    )
    return types.SimpleNamespace(
        total=2**30 // part,
        arguments=2**29 // part,
        temporaries=2**29 // part,
        outputs=0,
        padding=64,
        estimate=found,
        fits=True,
        memory=2**36,
        kind=H100,
        mesh=dict(job.partitioner.mesh_shape()),
        collectives=[{"kind": "all-gather", "axes": ["mdl"], "count": 2, "bytes": 1024}],
        memory_over_time=None,
    )


def test_one_candidate_is_compiled_for_its_settings(as_h100, tmp_path):
    job = make_job(tmp_path)
    found = plan_search.Search(job, ("minibatches",))
    found.outcomes = [o for o in found.outcomes if o.candidate.minibatches == 2]
    (outcome,) = found.run(1000.0, plan_report.Store(job, ("minibatches",)))
    assert outcome.shortest <= outcome.seconds <= outcome.longest
    assert outcome.bytes > outcome.state_bytes > outcome.padding > 0  # TinyLlama's sizes don't divide
    assert "all-" in outcome.dominant or "reduce-" in outcome.dominant
    assert outcome.bound < outcome.shortest


def test_a_search_ranks_and_goes_on_where_it_ended(tmp_path, as_h100, monkeypatch):
    job = make_job(tmp_path)
    monkeypatch.setattr(plan_search.plan, "plan", fake_plan)
    outcomes, store = run(job, "mesh")
    store.write(outcomes)
    assert len(outcomes) == 10
    assert all(outcome.seconds is not None or outcome.reason for outcome in outcomes)
    ranked = plan_report.best(outcomes)
    assert dict(ranked[0].candidate.mesh)["mdl"] == 1
    text = plan_report.report_text(job, outcomes)
    assert ranked[0].candidate.flags(job.config.experiment) in text
    record = json.loads((tmp_path / "plan_search.json").read_text())
    assert len(record["candidates"]) == 10
    # One candidate per number of bytes: none other is faster.
    assert len({c["bytes"] for c in record["candidates"] if c["front"]}) == sum(
        c["front"] for c in record["candidates"]
    )

    def fail(job):
        raise AssertionError("compiled again")

    monkeypatch.setattr(plan_search.plan, "plan", fail)
    again, _ = run(make_job(tmp_path), "mesh")
    assert {str(o.candidate): o.seconds for o in again if o.compiled_in} == {
        str(o.candidate): o.seconds for o in outcomes if o.compiled_in
    }
    # What a page shows of the front's programs is kept too.
    assert {str(o.candidate) for o in again if o.details} == {c["name"] for c in record["candidates"] if c["front"]}


def test_other_settings_do_not_use_what_was_kept(tmp_path, as_h100, monkeypatch):
    monkeypatch.setattr(plan_search.plan, "plan", fake_plan)
    outcomes, store = run(make_job(tmp_path))
    store.write(outcomes)
    other = make_job(tmp_path, overrides=("LEARNING_RATE=0.5",))
    fresh = plan_search.Search(other, ()).outcomes
    plan_report.Store(other, ()).read(fresh)
    assert not any(outcome.is_known for outcome in fresh)
    same = plan_search.Search(make_job(tmp_path), ()).outcomes
    store.read(same)
    assert all(outcome.is_known for outcome in same)


def test_ctrl_c_keeps_what_is_known(tmp_path, as_h100, monkeypatch, capsys):
    plans = iter([fake_plan, fake_plan])

    def interrupted(job):
        return next(plans, stop)(job)

    def stop(job):
        raise KeyboardInterrupt

    monkeypatch.setattr(plan_search.plan, "plan", interrupted)
    config = dataclasses.replace(make_job(tmp_path).config, topology="h100:1x8", search=("mesh",))
    plan_search.search(dataclasses.replace(make_job(tmp_path), config=config))
    assert "10 candidates on h100:1x8: 2 compiled" in capsys.readouterr().out
    record = json.loads((tmp_path / "plan_search.json").read_text())
    assert sum(candidate["seconds"] is not None for candidate in record["candidates"]) == 2
    assert all(c["seconds"] or c["reason"] or c["not_reached"] for c in record["candidates"])
    assert "the search was interrupted before it was compiled" in (tmp_path / "plan.html").read_text()


def test_ctrl_c_works_while_candidates_are_predicted(tmp_path, as_h100, monkeypatch, capsys):
    predict, calls = plan_prediction.predict, []

    def interrupted(*args, **settings):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return predict(*args, **settings)

    monkeypatch.setattr(plan_prediction, "predict", interrupted)
    config = dataclasses.replace(make_job(tmp_path).config, topology="h100:1x8", search=("mesh",))
    with pytest.raises(UserError, match="no candidate is compiled: the search was interrupted before it was compiled"):
        plan_search.search(dataclasses.replace(make_job(tmp_path), config=config))
    assert not capsys.readouterr().out  # the error is the only message
    record = json.loads((tmp_path / "plan_search.json").read_text())
    assert sum(candidate["predicted"] > 0 for candidate in record["candidates"]) == 2
    assert all(c["reason"] or c["not_reached"] for c in record["candidates"])


def test_policies_that_give_the_same_program_are_compiled_once(tmp_path, as_h100, monkeypatch):
    compiled = []

    def too_large(job):
        compiled.append(job)
        raise UserError("the train step doesn't fit: RESOURCE_EXHAUSTED")

    monkeypatch.setattr(plan_search.plan, "plan", too_large)
    policies = (
        AutodiffCheckpointType.SAVE_NOTHING,
        AutodiffCheckpointType.SAVE_UNET_CONV,
        AutodiffCheckpointType.SAVE_DOT_ONLY,
    )
    monkeypatch.setattr(plan_candidates, "AutodiffCheckpointType", policies)
    outcomes, _ = run(make_job(tmp_path), "remat")
    reasons = {outcome.candidate.remat: outcome.reason for outcome in outcomes}
    assert reasons == {
        "save_nothing": "the train step doesn't fit: RESOURCE_EXHAUSTED",
        "save_unet_conv": "the same program as with save_nothing",  # the model has no convolutions
        "save_dot_only": "the train step doesn't fit: RESOURCE_EXHAUSTED",
    }
    assert len(compiled) == 2


def test_state_that_does_not_fit_is_not_compiled(tmp_path, as_h100, monkeypatch):
    small = dataclasses.replace(chip(H100), gpu=dataclasses.replace(chip(H100).gpu, memory_bytes=1000))
    monkeypatch.setattr(plan_search, "chip", lambda kind: small)
    job = make_job(tmp_path)
    outcomes, _ = run(job, "minibatches")
    assert all(outcome.reason.startswith("the state alone takes") for outcome in outcomes)
    state = sum(variable.logical_bytes() for variable in job.partitioner.metadata.records())
    message = plan_report.nothing_fits(job, outcomes, 1000)
    assert "no candidate fits" in message
    assert f"at least {-(-state // 1000)} chips of 1000 B are needed" in message


def test_the_least_number_of_chips_counts_temporaries(tmp_path, as_h100):
    job = make_job(tmp_path)
    state = sum(variable.logical_bytes() for variable in job.partitioner.metadata.records())
    outcomes = [
        Outcome(Candidate((("data", 8),)), bytes=state + rest, state_bytes=state, reason="too large", compiled_in=1.0)
        for rest in (900, 600)
    ]
    message = plan_report.nothing_fits(job, outcomes, 1000)
    assert "the smallest compiled step 600 B more on each chip" in message
    assert f"at least {-(-state // 400)} chips of 1000 B are needed" in message
    # The state would fit on the 8 chips, if a mesh split all of it.
    assert "more than 8 chips of" in plan_report.nothing_fits(job, outcomes, 10 * state)
    assert "no number of chips is enough with this batch per chip" in plan_report.nothing_fits(job, outcomes, 600)


def test_the_budget_leaves_candidates_with_a_reason(tmp_path, as_h100, monkeypatch):
    outcomes, _ = run(make_job(tmp_path), "minibatches", budget=0.0)
    assert {outcome.not_reached for outcome in outcomes} == {"the budget ended before it was predicted"}
    clock = types.SimpleNamespace(monotonic=lambda: clock.now, now=0.0)
    monkeypatch.setattr(plan_search, "time", clock)

    def slow(job):
        clock.now += 600.0
        return fake_plan(job)

    monkeypatch.setattr(plan_search.plan, "plan", slow)
    outcomes, _ = run(make_job(tmp_path), "minibatches", budget=500.0)
    assert sorted(outcome.not_reached for outcome in outcomes) == ["", "the budget ended before it was compiled"]


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
    assert sum(outcome.not_reached == "the budget ended before it was predicted" for outcome in outcomes) == 6


def outcome(seconds, num_bytes, rows=8):
    return Outcome(Candidate((("data", 8),)), seconds=seconds, bytes=num_bytes, rows=rows)


def test_the_pareto_front_compares_seconds_per_row_and_bytes():
    fast, small, neither = outcome(1.0, 100), outcome(2.0, 50), outcome(3.0, 60)
    larger_batch = outcome(1.8, 200, rows=16)
    unknown = Outcome(Candidate((("data", 4),)), reason="too large")
    front = plan_report.pareto_front([neither, small, unknown, fast, larger_batch])
    assert front == [larger_batch, fast, small]


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


@pytest.mark.parametrize("text", ['{"chips": 8}', "[1, 2]", "{", '{"key": "KEY", "candidates": [{"name": "data:8"}]}'])
def test_a_file_that_is_no_record_of_a_search_is_replaced(tmp_path, as_h100, monkeypatch, text):
    job = make_job(tmp_path)
    store = plan_report.Store(job, ())
    (tmp_path / plan_report.FILE).write_text(text.replace("KEY", store.key))
    outcomes = plan_search.Search(job, ()).outcomes
    store.read(outcomes)
    assert not any(outcome.is_known for outcome in outcomes)
    store.write(outcomes)
    assert json.loads((tmp_path / plan_report.FILE).read_text())["key"] == store.key


def test_the_key_covers_what_changes_a_program_or_its_estimate(tmp_path, monkeypatch):
    job = make_job(tmp_path)
    keys = [plan_report.Store(job, ()).key, plan_report.Store(make_job(tmp_path, num_minibatches=2), ()).key]
    assert plan_report.Store(make_job(tmp_path), ()).key == keys[0]
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "--xla_of_this_test=1")
            keys.append(plan_report.Store(job, ()).key)
    with monkeypatch.context() as patch:
        patch.setattr(links, "MACHINES", links.MACHINES[1:])
        keys.append(plan_report.Store(job, ()).key)
    for partitioner in (ShardMapPartitioner("dp"), ShardMapPartitioner("fsdp")):
        keys.append(plan_report.Store(dataclasses.replace(job, partitioner=partitioner), ()).key)
    assert len(set(keys)) == len(keys) == 7


def test_the_key_is_the_same_in_another_process(tmp_path, monkeypatch):
    """Flax' default of `parent` is printed with its address."""
    job = make_job(tmp_path)
    lines, keys = job.config.experiment.lines(), []
    for address in ("0x7fac755454d0", "0x7f16dd8408d0"):
        other = [re.sub(r"0x[0-9a-f]+", address, line) for line in lines]
        assert other != lines
        monkeypatch.setattr(type(job.config.experiment), "lines", lambda self, other=other: other)
        keys.append(plan_report.Store(job, ()).key)
    assert keys[0] == keys[1]


def test_a_second_search_knows_the_programs_of_the_first(tmp_path, as_h100, monkeypatch):
    policies = (AutodiffCheckpointType.SAVE_NOTHING, AutodiffCheckpointType.SAVE_UNET_CONV)
    monkeypatch.setattr(plan_candidates, "AutodiffCheckpointType", policies)
    compiled = []

    def count(job):
        compiled.append(job)
        return fake_plan(job)

    monkeypatch.setattr(plan_search.plan, "plan", count)
    for _ in range(2):
        outcomes, store = run(make_job(tmp_path), "remat")
        store.write(outcomes)
        assert outcomes[0].seconds is not None
        assert outcomes[1].reason == "the same program as with save_nothing"
    assert len(compiled) == 1


def test_a_search_starts_from_a_mesh_that_the_topology_allows(tmp_path, monkeypatch):
    """`build_job` goes on where the mesh without a search can't be built."""
    build, tried = Job.build.__func__, []

    def refuse(cls, config):
        tried.append(config.mesh)
        if config.mesh is None:
            raise UserError("this mesh doesn't fit the network")
        return build(cls, config)

    def make_mesh(sizes, devices):
        if sizes["replica"] > 2:
            raise ValueError("doesn't fit the network either")

    monkeypatch.setattr(Job, "build", classmethod(refuse))
    monkeypatch.setattr(plan_search, "topology_devices", lambda topology, slices: jax.devices())
    monkeypatch.setattr(plan_search, "mesh_over_slices", make_mesh)
    config = make_run_config(EXPERIMENT, tmp_path, mode="plan", search=("mesh",))
    with pytest.raises(UserError, match="this mesh doesn't fit"):
        plan_search.build_job(config)  # without a topology there is no search
    monkeypatch.setattr(job_module, "topology_devices", lambda topology, slices: jax.devices())
    found = plan_search.build_job(dataclasses.replace(config, topology="h100:1x8"))
    assert dict(found.partitioner.mesh_shape()) == {"replica": 2, "data": 4, "mdl": 1}
    with pytest.raises(UserError, match="this mesh doesn't fit"):
        plan_search.build_job(dataclasses.replace(config, topology="h100:1x8", search=("remat",)))


def test_gpu_meshes_are_not_divided_over_slices(tmp_path, as_h100):
    job = make_job(tmp_path)
    job = dataclasses.replace(job, config=dataclasses.replace(job.config, num_slices=4))
    assert len(plan_search.Search(job, ("mesh",)).outcomes) == 10


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
    assert all("8 minibatches doesn't fit, and this one has no fewer rows" in o.reason for o in outcomes[1:3])
    assert [o.too_large for o in outcomes] == [True, False, False, True]
    assert outcomes[0].reason.startswith("the train step doesn't fit:" if by_compiler else "needs 1.0 TiB of")
    assert "\n" not in outcomes[0].reason


def test_an_error_without_text_leaves_a_candidate_out_too(tmp_path, as_h100, monkeypatch):
    def fails(job):
        raise NotImplementedError

    monkeypatch.setattr(plan_search.plan, "plan", fails)
    job = make_job(tmp_path, overrides=("train_datasets[0].batch_size.global_batch_size=8",))
    outcomes = plan_search.Search(job, ("minibatches",)).run(1000.0, plan_report.Store(job, ("minibatches",)))
    assert {outcome.reason for outcome in outcomes} == {"NotImplementedError"}


def test_a_second_search_leaves_out_what_the_first_left_out(tmp_path, as_h100, monkeypatch):
    def too_large(job):
        found = fake_plan(job)
        return types.SimpleNamespace(**{**vars(found), "fits": False, "total": 2**40, "arguments": 1, "temporaries": 2})

    monkeypatch.setattr(plan_search.plan, "plan", too_large)
    job = make_job(tmp_path, overrides=("train_datasets[0].batch_size.global_batch_size=8",))
    store = plan_report.Store(job, ("minibatches",))
    first = plan_search.Search(job, ("minibatches",))
    first.outcomes.sort(key=lambda o: -o.candidate.minibatches)
    first.compile(first.outcomes[0])
    store.write(first.outcomes)
    again = plan_search.Search(job, ("minibatches",))
    again.run(0.0, store)
    assert [bool(o.reason) for o in again.outcomes] == [o.candidate.minibatches > 1 for o in again.outcomes]


@pytest.mark.parametrize("option", ["jax_default_matmul_precision", "jax_threefry_partitionable"])
def test_options_of_jax_are_part_of_the_key(tmp_path, as_h100, option):
    job = make_job(tmp_path)
    before = plan_report.Store(job, ("mesh",)).key
    value = {"jax_default_matmul_precision": "highest", "jax_threefry_partitionable": False}[option]
    old = jax.config.values[option]
    jax.config.update(option, value)
    try:
        assert plan_report.Store(job, ("mesh",)).key != before
    finally:
        jax.config.update(option, old)


def test_the_bound_does_not_write_frozen_variables(tmp_path):
    class TinyLora(llama.Lora, llama.TinyLlama):
        pass

    job = Job.build(make_run_config(TinyLora, tmp_path, mode="plan"))
    hardware = plan_prediction.Hardware(chip(H100), links.machine(H100))
    whole, _ = plan_prediction.state_bytes(job)
    mesh = job.partitioner.mesh_shape()
    frozen = sum(
        v.bytes_per_device(mesh)
        for v in job.partitioner.metadata.records()
        if v.path.startswith("mdl_vars/params/") and "lora" not in v.path
    )
    assert 0 < frozen < whole
    bound = plan_prediction.lower_bound(job, hardware, 0.0)
    assert bound == pytest.approx((2 * whole - frozen) / hardware.machine.memory)
