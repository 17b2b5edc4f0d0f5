"""A language model of a billion parameters on one GPU: step time, model FLOPs utilization, and ratio to the baseline.

    python -m benchmarks.gpu [--rounds 10] [--tiny] [--json FILE]

Times the trainer's compiled step and the hand-written one of `plan_baseline` in one process, each with its own state, in windows
of steps in random order. The batch is made once: neither input nor TensorFlow is involved. MFU is 6 * parameters * tokens
(`analysis.chips.model_flops`) over the chip's dense bfloat16 peak. Exits with 2 without a GPU. `--tiny` is a smoke run for
any device; its model is too small for its timings to mean anything.
"""

from __future__ import annotations

import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from praxis import py_utils

from benchmarks import plan_baseline, reporting
from spmd_trainer import experiment_registry
from spmd_trainer.experiments.lm import cloud
from spmd_trainer.kernels import chips

STEPS = 5


@experiment_registry.register
class Gpu1B(cloud.LmCloudSpmd):
    """1.1B parameters on one GPU, fused attention, bfloat16 compute with float32 variables, global batch 8."""

    PERCORE_BATCH_SIZE = 8
    NUM_LAYERS = 20
    MODEL_DIMS = 2048
    HIDDEN_DIMS = MODEL_DIMS * 4
    ATTEN_LOGIT_CAP = 0.0
    USE_FUSED_ATTENTION = True
    ICI_MESH_SHAPE = (1, 1, 1)


@experiment_registry.register
class GpuTiny(cloud.TinyCloud, Gpu1B):
    """The structure of Gpu1B in a size that runs in seconds on any device."""


CASES = {
    "1B": plan_baseline.Case(
        "benchmarks.gpu.Gpu1B", None, (1, 1, 1), 8, 20, 2048, 8192, attention_cap=0.0, fused_attention=True
    ),
    "tiny": plan_baseline.Case(
        "benchmarks.gpu.GpuTiny", None, (1, 1, 1), 1, 2, 32, 67, 8, 61, 16, jnp.float32, 0.0, fused_attention=True
    ),
}


def batch_of(case: plan_baseline.Case) -> dict[str, np.ndarray]:
    """Returns a batch of random tokens, one sequence per row."""
    ids = np.random.default_rng(0).integers(0, case.vocab, (case.rows, case.seq)).astype(np.int32)
    ones = np.ones(ids.shape, np.int32)
    places = np.broadcast_to(np.arange(case.seq, dtype=np.int32), ids.shape)
    labels = np.roll(ids, -1, axis=1)
    return {
        "ids": ids,
        "labels": labels,
        "segment_ids": ones,
        "segment_pos": places,
        "weights": ones.astype(np.float32),
    }


def baseline_step(case: plan_baseline.Case, devices: Sequence[Any]) -> Callable[[], Any]:
    """Returns a function that takes one hand-written step and returns the loss."""
    compiled = plan_baseline.compile_baseline(case, devices)
    shardings = compiled.input_shardings[0]
    state = jax.jit(lambda key: plan_baseline.init_state(case, key), out_shardings=shardings[0])(jax.random.key(0))
    batch = jax.device_put(batch_of(case), shardings[1])

    def step() -> Any:
        nonlocal state
        state, loss = compiled(state, batch)
        return loss

    return step


def trainer_step(case: plan_baseline.Case) -> tuple[Callable[[], Any], int]:
    """Returns a function that takes one step of the trainer, and the number of parameters."""
    from spmd_trainer.training import start_up

    with tempfile.TemporaryDirectory() as directory:
        job = plan_baseline.trainer_job(case, directory)
    fn = start_up.compile_train_step(job).fn
    state = job.partitioner.initialize_train_state(job.prng_key)
    padded = job.partitioner.layout.pad_inputs_shape_dtype(job.inputs_shape_dtype)
    # Inputs that the baseline doesn't have: nothing is padding, and every row has weight 1.
    values = batch_of(case) | {"paddings": np.zeros((case.rows, case.seq)), "eval_sample_weights": np.ones(case.rows)}
    rows = py_utils.NestedMap({name: values[name].astype(x.dtype) for name, x in padded.items()})
    batch = job.partitioner.layout.put(rows)

    def step() -> Any:
        nonlocal state
        state, scalars = fn(state, job.prng_key, batch)
        return scalars

    return step, job.partitioner.metadata.num_params()


def window(step: Callable[[], Any]) -> float:
    """Takes STEPS steps; returns the seconds per step."""
    started = time.perf_counter()
    result = None
    for _ in range(STEPS):
        result = step()
    jax.block_until_ready(result)
    return (time.perf_counter() - started) / STEPS


def measure(report: reporting.Report, case: plan_baseline.Case, device: Any, windows: int) -> None:
    """Times both programs and reports the results."""
    trainer, num_params = trainer_step(case)
    steps = {"trainer": trainer, "baseline": baseline_step(case, [device])}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        window(step)  # warms up
    for _ in range(windows):
        for name in random.sample(list(steps), len(steps)):
            seconds[name].append(window(steps[name]))
    flops = chips.model_flops(num_params, case.rows * case.seq)
    peak = chips.peak_flops(device.device_kind, 1)
    size = f"{num_params / 1e9:.3f}B parameters, batch {case.rows} x {case.seq}"
    report.note("device", f"{device.device_kind}, {size}, JAX {jax.__version__}")
    for name, values in seconds.items():
        report.figure(f"step, {name}", values, "ms", scale=1e3)
        if peak is None:
            report.note(f"MFU, {name}", "unknown: the device is not in analysis.chips.CHIPS")
        else:
            report.figure(f"MFU, {name}", 100 * flops / peak / np.asarray(values), "%")
    report.ratio("step, trainer / baseline", seconds["trainer"], seconds["baseline"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures on the first GPU; returns the exit status."""
    parser = reporting.parser(__doc__, rounds=10)
    parser.add_argument("--tiny", action="store_true", help="smoke run of a tiny model on any device")
    options = parser.parse_args(arguments)
    device = jax.devices()[0]
    if device.platform != "gpu" and not options.tiny:
        sys.stderr.write(
            f"benchmarks.gpu: needs a GPU, but the first device is {device.device_kind}; --tiny runs anywhere\n"
        )
        return 2
    # The tiny model's timings are too noisy for any limit.
    limit = math.inf if options.tiny else reporting.LIMIT_SPREAD
    report = reporting.Report("gpu", options.json, limit_spread=limit)
    measure(report, CASES["tiny" if options.tiny else "1B"], device, options.rounds)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
