"""The hand-written step that plans are compared with has the same variables in the same layout, and trains."""

import dataclasses
import os
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from facts import assert_names
from praxis import pax_fiddle

from benchmarks import gpu, plan_baseline
from spmd_trainer.errors import UserError
from spmd_trainer.models.decoder_spec import DecoderSpec
from spmd_trainer.planner import plan
from spmd_trainer.training import experiment_config
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import make_run_config

TINY = plan_baseline.CASES["tiny"]


@pytest.mark.full
def test_the_baseline_needs_the_same_argument_bytes_as_the_trainer(tmp_path, capsys):
    job = plan_baseline.trainer_job(TINY, str(tmp_path))
    trainer = plan.plan(job)
    baseline = plan_baseline.compile_baseline(TINY, jax.devices())
    sizes = plan.chip_bytes(baseline, None)
    # The batches differ: the trainer's model may read one input more or fewer.
    rows = TINY.rows * TINY.seq * 4 // 8
    assert sizes.arguments == pytest.approx(trainer.arguments, abs=2 * rows)
    line = plan_baseline.row("baseline", sizes, 1.0)
    assert f"{sizes.total / plan_baseline.GIB:.4f}" in line


@pytest.mark.full
def test_the_baseline_trains():
    devices = jax.devices()[:1]
    step = gpu.baseline_step(gpu.PAIRS["tiny"], devices)
    losses = [float(step()) for _ in range(3)]
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("1B", 1.07e9),
        ("2B", 2.14e9),
        ("2B even", 2.14e9),
        ("16B", 16.5e9),
        ("2B h100", 2.14e9),
        ("2B h100 mdl", 2.14e9),
        ("16B h200", 16.5e9),
        ("16B b200", 16.5e9),
    ],
)
def test_the_cases_have_the_sizes_of_their_experiments(name, size):
    case = {**plan_baseline.CASES, **gpu.PAIRS}[name]
    lm_p = experiment_config.resolve(case.exp).task_p.model.lm_tpl
    stack = lm_p.stacked_transformer_tpl
    assert (lm_p.model_dims, lm_p.vocab_size, stack.x_times) == (case.width, case.vocab, case.layers)
    assert (stack.block.hidden_dims, stack.block.dim_per_head) == (case.hidden, case.head)
    assert stack.block.transformer_layer_params_tpl.tr_atten_tpl.atten_logit_cap == case.attention_cap
    unpadded = plan_baseline.dataclasses.replace(case, mesh=(1, 1, 1))
    total = sum(np.prod(shape) for shape, _ in plan_baseline.variables(unpadded).values())
    assert total == pytest.approx(size, rel=0.01)


def test_cases_without_their_compiler_are_left_out_and_named(monkeypatch, capsys):
    def devices_of(case):
        if case.topology.startswith("h100"):
            raise UserError("--topology needs the GPU compiler")
        return []

    monkeypatch.setattr(plan_baseline, "devices_of", devices_of)
    monkeypatch.setattr(plan_baseline, "compare", lambda name, case, devices: 1.04)
    assert plan_baseline.main(["2B", "2B h100"]) == 0
    assert_names(capsys.readouterr().out, "2B h100 left out", "--topology")
    assert plan_baseline.main(["2B h100"]) == 1, "nothing was compared"

    def does_not_fit(name, case, devices):
        raise UserError("the train step doesn't fit")

    monkeypatch.setattr(plan_baseline, "compare", does_not_fit)
    with pytest.raises(UserError, match="doesn't fit"):
        plan_baseline.main(["2B"])


def test_the_gpu_benchmark_refuses_to_run_without_a_gpu(capsys):
    assert gpu.main([]) == 2
    assert "needs a GPU" in capsys.readouterr().err
    assert os.environ["JAX_PLATFORMS"] == "cpu"


def test_a_tokens_products_leave_out_lookups_and_what_a_window_hides():
    sizes = {"vocab_size": 10, "model_dims": 4, "num_layers": 3, "num_heads": 2, "num_kv_heads": 1, "head_dims": 8}
    spec = DecoderSpec(**sizes, hidden_dims=5, layer_pattern=("local", "global"), window=4)
    # Rows of 16: 8 keys in the global layer, and in the two local ones 4, less a triangle of 8 of 64.
    attention = 12 * 2 * 8 * (8 + 2 * (4 - 0.5))
    assert spec.matrix_flops(1000, 0, 16) == 6 * (1000 - 40) + attention
    assert spec.matrix_flops(7, 1000, 16) == 6 * 7 + 4 * (1000 - 40) + attention  # adapters alone learn
    tied = dataclasses.replace(spec, tied_embeddings=True, positions="learned", max_positions=16)
    assert tied.matrix_flops(1000, 0, 16) == 6 * (1000 - 64) + attention
    assert spec.matrix_flops(0, 0, 2) == -6 * 40 + 12 * 2 * 8 * 3, "a window as long as the row hides nothing"


@pytest.mark.parametrize(("name", "gigaflops"), [("A", 8.22), ("B", 21.4)])
def test_a_tokens_products_are_those_that_are_published(name, gigaflops):
    """Llama 3.2's sizes, rows of 4,096: products of the parameters, and of attention with half of the keys."""
    params = {"A": 1_235_814_400, "B": 3_212_749_824}[name]
    spec = pax_fiddle.build(gpu.CASES[name].experiment().spec())
    assert round(spec.matrix_flops(params, 0.0, 4096) / 1e9, 2 if name == "A" else 1) == gigaflops


def test_the_tiny_model_of_small_moments_has_some(tmp_path):
    model = gpu.tiny(gpu.CASES["E"].experiment)
    mesh = [(name, 8 if name == "data" else 1) for name in model.MESH_AXIS_NAMES]
    job = Job.build(make_run_config(model, tmp_path, mode="inspect", mesh=mesh))
    assert [variable for variable in job.partitioner.layout.records() if variable.path.endswith("/codes_8bit")]


@pytest.mark.parametrize("fits", [True, False])
def test_each_named_case_is_planned(monkeypatch, capsys, fits):
    def planned(job):
        assert job.config.topology == "h100:1x1"
        return types.SimpleNamespace(arguments=1e9, temporaries=1e9, total=2e9, fits=fits, seconds=1.0)

    def job(*args, topology=None, **_):
        topology = topology or args[0].topology
        return types.SimpleNamespace(config=types.SimpleNamespace(topology=topology))

    monkeypatch.setattr(plan, "plan", planned)
    monkeypatch.setattr(gpu, "job_of", job)
    monkeypatch.setattr(plan_baseline, "trainer_job", job)
    monkeypatch.setattr(gpu.topologies, "run_on_host", lambda: None)
    assert gpu.main(["pair", "E", "--plan", "h100:1x1"]) == int(not fits)
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said] == ["pair", "E"]


@pytest.mark.full
def test_the_gpu_benchmark_runs_tiny_models_of_the_same_structure():
    """So that nothing is found missing on the day when there is a GPU. In a process that has one device."""
    names = ["C", "E", "F", "G"]
    command = [sys.executable, "-m", "benchmarks.gpu", *names, "--tiny", "--rounds=1"]
    done = subprocess.run(command, env={**os.environ, "XLA_FLAGS": ""}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in names:
        assert f"{name}, rate" in done.stdout
