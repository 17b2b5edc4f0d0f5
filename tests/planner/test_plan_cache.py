"""What a search of `--mode=plan` keeps in `plan_search.json`, and when a later one uses it."""

import json
import math
import os
import re
import subprocess
import sys
import types

import jax
import plan_helpers
import pytest
from facts import assert_names
from plan_helpers import fake_plan, make_job, run
from praxis.layers import AutodiffCheckpointType

from spmd_trainer.decoder import feed_forward
from spmd_trainer.planner import links, plan_candidates, plan_report, plan_search
from spmd_trainer.step.pjit import PjitPartitioner
from spmd_trainer.step.shard_map import ShardMapPartitioner

as_h100 = pytest.fixture(plan_helpers.as_h100)


@pytest.mark.full
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


@pytest.mark.full
def test_other_settings_do_not_use_what_was_kept(tmp_path, as_h100, monkeypatch):
    monkeypatch.setattr(plan_search.plan, "plan", fake_plan)
    outcomes, store = run(make_job(tmp_path))
    store.write(outcomes)
    other = make_job(tmp_path, overrides=("LEARNING_RATE=0.5",))
    fresh = plan_search.Search(other, ()).outcomes
    plan_report.Store(other, ()).read(fresh)
    assert not any(outcome.is_known for outcome in fresh)
    same_job = make_job(tmp_path)
    same = plan_search.Search(same_job, ()).outcomes
    plan_report.Store(same_job, ()).read(same)
    assert all(outcome.is_known for outcome in same)


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
    experiment = type(job.config.experiment.experiment)
    for partitioner in (ShardMapPartitioner("dp"), ShardMapPartitioner("fsdp")):
        monkeypatch.setattr(experiment, "partitioner", lambda self, partitioner=partitioner: partitioner)
        keys.append(plan_report.Store(job, ()).key)
    assert len(set(keys)) == len(keys) == 7


def test_settings_of_a_partitioner_that_are_no_plain_values_are_part_of_the_key(tmp_path, monkeypatch):
    class Ruled(PjitPartitioner):
        rules = ()

    job, keys = make_job(tmp_path), []
    for axis in ("data", "mdl", "mdl"):
        partitioner = Ruled()
        # An object without a text of its own is printed with its address.
        partitioner.rules = [{"kernel": axis}, object()]
        monkeypatch.setattr(type(job.config.experiment.experiment), "partitioner", lambda self, p=partitioner: p)
        keys.append(plan_report.Store(job, ()).key)
    assert keys[0] != keys[1] == keys[2]


@pytest.mark.full
def test_a_program_that_has_changed_is_compiled_again(tmp_path, as_h100, monkeypatch):
    """The code of a layer is in no setting."""
    compiled = []

    def count(job):
        compiled.append(job)
        return fake_plan(job)

    monkeypatch.setattr(plan_search.plan, "plan", count)
    found, store = run(make_job(tmp_path))
    store.write(found)
    run(make_job(tmp_path))
    assert len(compiled) == 1
    with monkeypatch.context() as patch:
        patch.setitem(feed_forward.ACTIVATION_FNS, "silu", jax.nn.relu)
        again, store = run(make_job(tmp_path))
    assert len(compiled) == 2
    assert again[0].program != found[0].program
    store.write(again)
    # What was kept is checked even if no time is left.
    (forgotten,), _ = run(make_job(tmp_path), budget=0.0)
    assert forgotten.seconds is None
    assert_names(forgotten.not_reached, "budget", "predicted")


@pytest.mark.full
def test_the_program_is_the_same_in_another_process(tmp_path, as_h100):
    """Strings, and so sets of them, are ordered anew in each process."""
    code = (
        "import pytest, sys, plan_helpers\n"
        "plan_helpers.as_h100(pytest.MonkeyPatch())\n"
        "print(plan_helpers.program(sys.argv[1]))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    other = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert other.stdout.split()[-1] == plan_helpers.program(tmp_path)


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


@pytest.mark.full
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
        assert_names(outcomes[1].reason, "same program", "save_nothing")
    assert len(compiled) == 1


@pytest.mark.full
def test_a_second_search_leaves_out_what_the_first_left_out(tmp_path, as_h100, monkeypatch):
    def too_large(job):
        found = fake_plan(job)
        return types.SimpleNamespace(**{**vars(found), "fits": False, "total": 2**40, "arguments": 1, "temporaries": 2})

    monkeypatch.setattr(plan_search.plan, "plan", too_large)
    job = make_job(tmp_path, overrides=("train_datasets[0].batch_size.global_batch_size=8",))
    store = plan_report.Store(job, ("minibatches",))
    first = plan_search.Search(job, ("minibatches",))
    first._trace_all(math.inf)
    first.outcomes.sort(key=lambda o: -o.candidate.minibatches)
    first.compile(first.outcomes[0])
    store.write(first.outcomes)
    again = plan_search.Search(job, ("minibatches",))
    again.run(0.0, store)
    assert [bool(o.reason) for o in again.outcomes] == [o.candidate.minibatches > 1 for o in again.outcomes]
