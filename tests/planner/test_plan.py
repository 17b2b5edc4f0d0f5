"""Plans: what the compiled train step needs, for devices that are here and for topologies that aren't."""

import dataclasses
import json
import types

import jax
import numpy as np
import pytest
from compilers import NEEDS_CUDA
from etils import epath
from facts import assert_names, missing_facts, raises_naming

from spmd_trainer.errors import UserError
from spmd_trainer.experiments.lm import stdlib
from spmd_trainer.planner import inspect_sharding, plan
from spmd_trainer.planner.topologies import topology_devices
from spmd_trainer.step import compiled_step
from spmd_trainer.training import start_up
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import make_run_config

TINY = "lm.stdlib.StdlibBytesTiny"


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    directory = epath.Path(tmp_path_factory.mktemp("plan"))
    return Job.build(make_run_config(TINY, directory, mode="inspect", plan=True))


@pytest.fixture(scope="module")
def result(job):
    return plan.plan(job)


@pytest.mark.full
def test_arguments_are_the_state_and_the_batch(job, result):
    mesh = job.partitioner.mesh_shape()
    state = sum(v.bytes_per_device(mesh) for v in job.partitioner.metadata.records())
    shapes = job.process_inputs_shape_dtype
    batch = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes)) / 8
    # An input that the model doesn't read is no argument; the key is one.
    assert state < result.arguments <= state + batch + 64
    assert 0 < result.padding < state
    assert result.temporaries > 0
    assert result.outputs < state, "the state is donated"


def test_flops_are_6_times_parameters_times_tokens(job, result):
    tokens = job.process_inputs_shape_dtype.ids.size
    assert result.model_flops == pytest.approx(6 * job.partitioner.metadata.num_params() * tokens / 8)


@pytest.mark.full
def test_collectives_name_the_axes_that_they_cross(result):
    crossed = {tuple(row["axes"]) for row in result.collectives}
    assert {("data",), ("mdl",)} & crossed
    assert all(set(axes) <= {"data", "mdl"} for axes in crossed), "replica has size 1"


def test_whether_it_fits_and_what_to_change(result):
    assert "on host devices" in plan.plan_text(result)
    small = dataclasses.replace(result, memory=1024)
    text = plan.plan_text(small)
    assert "DOES NOT FIT" in text
    assert "look here first" in text
    assert "smaller batch" in text or "split variables" in text
    assert result.peak is None, "the CPU's compiler doesn't say it"
    assert "the peak     2.0 GiB" in plan.plan_text(dataclasses.replace(result, peak=2 * plan.GIB))
    assert "fits in 16 GiB" in plan.plan_text(dataclasses.replace(result, memory=16 * plan.GIB))


def test_a_gpu_keeps_a_part_of_its_memory(result):
    def with_share(share, kind="NVIDIA H100 80GB HBM3"):
        return dataclasses.replace(result, kind=kind, memory=int(result.total / share))

    assert with_share(0.94).fits
    assert not with_share(0.96).fits
    assert with_share(0.96, "TPU v5e").fits
    assert "DOES NOT FIT" in (text := plan.plan_text(with_share(0.96)))
    assert "(96%; JAX can take 95%)" in text
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in text


def test_a_gpu_s_default_share_of_memory_is_pointed_out(result):
    whole = dataclasses.replace(result, kind="NVIDIA H100 80GB HBM3", memory=int(result.total / 0.9))
    assert "set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95: JAX takes only 75%" in plan.plan_text(whole)
    for other in ({"memory": 2 * result.total}, {"kind": "TPU v5e"}, {"memory": result.total - 1}):
        assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in plan.plan_text(dataclasses.replace(whole, **other))


def test_the_plan_names_the_chips_and_the_attention_kernels(result):
    line = "attention kernel: chunked; not cudnn: head width 320 is over 256"
    lines = plan.plan_text(dataclasses.replace(result, kind="NVIDIA H200", attention=[line])).splitlines()
    assert lines[0].startswith("train step on 8 chips (NVIDIA H200), mesh")
    assert lines[2].strip() == line


@pytest.mark.full
def test_the_plan_is_printed_and_written(job, capsys):
    inspect_sharding.write_plan(job)
    assert "bytes per chip" in capsys.readouterr().out
    record = json.loads((job.config.job_log_dir / "plan.json").read_text())
    assert record["chips"] == 8
    assert record["total"] == record["arguments"] + record["temporaries"] + record["outputs"]
    assert record["largest"][0].keys() >= {"num_bytes", "count", "array", "operation"}
    page = (job.config.job_log_dir / "plan.html").read_text()
    assert "lm.stdlib.StdlibBytesTiny" in page
    assert '"name":"optimizer state"' in page


def test_a_plan_that_does_not_fit_is_printed_and_then_refused(job, result, monkeypatch, capsys, tmp_path):
    config = dataclasses.replace(job.config, topology="h100:1x8", job_log_dir=epath.Path(tmp_path))
    small = dataclasses.replace(result, kind="NVIDIA H100 80GB HBM3", memory=result.total, least_chips=3)
    monkeypatch.setattr(plan, "plan", lambda job: small)
    with raises_naming(UserError, "doesn't fit h100:1x8", "per chip", "memory of 3 chips"):
        inspect_sharding.write_plan(dataclasses.replace(job, config=config))
    assert "DOES NOT FIT" in capsys.readouterr().out
    on_one = plan.misfit(dataclasses.replace(small, least_chips=1), "h100:1x8")
    assert missing_facts(on_one, "doesn't fit h100:1x8", "temporaries: use a smaller batch per chip") == []
    assert "the state alone" not in on_one
    assert json.loads((tmp_path / "plan.json").read_text())["fits"] is False


def test_the_state_alone_says_how_many_chips_are_too_few(job, monkeypatch):
    state = sum(variable.logical_bytes() for variable in job.partitioner.metadata.records())
    assert plan._least_chips(job) is None, "the memory of host devices is not known"
    planned = dataclasses.replace(job, config=dataclasses.replace(job.config, topology="v5e:2x4"))
    monkeypatch.setattr(plan, "_memory", lambda topology: state // 3)
    assert plan._least_chips(planned) == 4


@NEEDS_CUDA
def test_a_tiny_step_is_planned_for_a_gpu_topology(tmp_path):
    flags = {"xla_gpu_enable_latency_hiding_scheduler": True, "xla_tpu_scoped_vmem_limit_kib": 65536}
    on_gpus = type("OnGpus", (stdlib.StdlibBytesTiny,), {"__module__": __name__, "XLA_FLAGS": flags})
    config = make_run_config(on_gpus, tmp_path, mode="inspect", topology="h100:1x8")
    result = plan.plan(Job.build(config))
    assert (result.chips, result.kind, result.fits) == (8, "NVIDIA H100 80GB HBM3", True)
    assert result.peak <= result.total
    assert 0 < result.estimate.shortest < result.estimate.longest
    assert {row.links for row in result.estimate.collectives} == {"NVLink"}
    assert "XLA flag xla_gpu_enable_latency_hiding_scheduler=True" in plan.plan_text(result)
    assert "xla_tpu" not in plan.plan_text(result)


@pytest.mark.parametrize("topology", ["v5x:4x4", "v5e", "v5e:four"])
def test_an_unknown_topology_is_refused_with_the_form(topology):
    with pytest.raises(UserError, match=r"CHIP:SHAPE, e\.g\. v5e:16x16"):
        topology_devices(topology)


@pytest.mark.parametrize(
    ("error", "fact"),
    [
        ("RESOURCE_EXHAUSTED: too large\nbuffer table", "doesn't fit: RESOURCE_EXHAUSTED: too large\nbuffer"),
        ("INTERNAL: Couldn't find output tile sizes\nstack", "h100:1x8: INTERNAL: Couldn't find output tile sizes"),
    ],
)
def test_errors_of_the_compiler_are_the_user_s(job, monkeypatch, error, fact):
    def fail(job):
        raise jax.errors.JaxRuntimeError(error)

    monkeypatch.setattr(start_up, "compile_train_step", fail)
    config = dataclasses.replace(job.config, topology="h100:1x8")
    with raises_naming(UserError, "train step", fact) as caught:
        plan.plan(dataclasses.replace(job, config=config))
    assert "stack" not in str(caught.value)


def test_the_report_is_written_if_the_forward_pass_cannot_be_traced(tmp_path, monkeypatch, caplog):
    def fail(job):
        raise TypeError("no such kernel")

    monkeypatch.setattr(inspect_sharding.report_parts, "of_forward_pass", fail)
    inspect_sharding.inspect_job(Job.build(make_run_config(TINY, tmp_path, mode="inspect")))
    assert (tmp_path / "sharding_report.txt").exists()
    assert_names(caplog.text, "TypeError", "no such kernel")


def test_triton_is_left_out_only_for_gpus_that_are_not_here():
    def options(platform):
        return compiled_step._options_without_gpus(
            types.SimpleNamespace(devices=np.array([types.SimpleNamespace(platform=platform)]))
        )

    assert options("cpu") is options("tpu") is None
    assert options("cuda") == {"xla_gpu_enable_triton_gemm": False}
