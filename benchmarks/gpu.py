"""Language models on one accelerator: tokens per second, MFU in both counts, memory beside the plan's, and which kernels ran.

    python -m benchmarks.gpu [CASE ...] [--rounds 4] [--tiny] [--plan h100:1x1] [--json FILE]

Without names, all cases run, in ten minutes; each is a model of one device, on synthetic tokens, in rows that fit an H200's
141 GB (`--plan` says what fits elsewhere):

| case | model | passes at | good |
|---|---|---|---|
| A | Llama-3.2-1B, rows of 4,096 | 45,000 tokens/s | 54,000 |
| B | Llama-3.2-3B, rows of 4,096 | 18,500 | 23,100 |
| C | GPT-2 XL, rows of 1,024 | 46,000 | 50,000 |
| D | 26 layers of 1,664, windows in 3 of 4 layers, rows of 2,048 | 70,000 | 79,000 |
| E | Llama-3.1-8B, all parameters, moments in 8 bits, rows of 8,192 | - | 7,700 |
| F | Llama-3.1-8B with LoRA, rows of 8,192 | 10,800 | 13,500 |
| G | 16 layers of 2,048, 8 of 64 experts of 1,024 | 20% MFU | 30% |
| pair | 1.1 billion parameters of praxis, against `plan_baseline`'s hand-written step | - | - |

The bars are published figures of other trainers on one H100 or H200, or a fifth below them. D has AdamW and a ReLU; the figures
are of Muon and a squared ReLU. First comes the rate of a product of two 8,192 x 8,192 bfloat16 matrices, which bounds all.

Each case times windows of the trainer's compiled step, after one that isn't timed, on a batch that is already on the device.
MFU "6N" is `chips.model_flops`; MFU "products" is what the field publishes, `DecoderSpec.matrix_flops`. Neither counts experts
that a token doesn't choose, nor recomputation.

Exits with 2 without a GPU. `--tiny` runs the same code with tiny models on any device; its figures mean nothing. `--plan`
compiles for a chip that isn't here, and prints memory.
"""

from __future__ import annotations

import dataclasses
import functools
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
from praxis import pax_fiddle, py_utils

from benchmarks import plan_baseline, reporting
from spmd_trainer import experiment_registry
from spmd_trainer.experiments.lm import cloud, gpt2, llama
from spmd_trainer.experiments.lm.synthetic_decoder import SyntheticDecoder, TinySizes
from spmd_trainer.kernels import chips
from spmd_trainer.models.decoder_spec import MoeSpec
from spmd_trainer.planner import topologies
from spmd_trainer.step import opt_state_dtypes

STEPS = 5
PRODUCT = 8192
SAVED = cloud.layers.AutodiffCheckpointType.SAVE_DOT_EXCEPT_LOGITS


class LlamaA(llama.Llama3_2_1B):
    PERCORE_BATCH_SIZE, CHECKPOINT_POLICY = 8, SAVED


class LlamaB(llama.Llama3_2_3B):
    PERCORE_BATCH_SIZE, CHECKPOINT_POLICY = 4, SAVED


class Gpt2C(gpt2.Gpt2Xl):
    MAX_SEQ_LEN, PERCORE_BATCH_SIZE, CHECKPOINT_POLICY = 1024, 32, SAVED


class WindowsD(SyntheticDecoder):
    """The shape of nanochat's depth 26: 0.92 billion parameters."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIMS = 26, 1664, 6656, 13, 13, 128
    VOCAB_SIZE, MAX_SEQ_LEN, MAX_POSITIONS = 32_768, 2048, 2048
    ACTIVATION, GATED, QUERY_KEY_NORM, FINAL_SOFTCAP = "relu", False, "head", 15.0
    LAYER_PATTERN, WINDOW = ("local", "local", "local", "global"), 1024
    PERCORE_BATCH_SIZE, CHECKPOINT_POLICY = 16, SAVED


class LlamaE(llama.Llama3_1_8B):
    MAX_SEQ_LEN, PERCORE_BATCH_SIZE = 8192, 1

    def task(self) -> Any:
        task_p = super().task()
        task_p.train.learner.opt_state_dtype = "8bit"
        return task_p


class LlamaF(llama.Llama3_1_8BLora):
    MAX_SEQ_LEN, PERCORE_BATCH_SIZE, CHECKPOINT_POLICY = 8192, 2, SAVED


class ExpertsG(SyntheticDecoder):
    """OLMoE's shape (arXiv:2409.02060): 1.3 of 6.9 billion parameters for a token."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIMS = 16, 2048, 1024, 16, 16, 128
    VOCAB_SIZE, MAX_POSITIONS, QUERY_KEY_NORM = 50_304, 4096, "all"
    MOE = MoeSpec(num_experts=64, num_experts_per_token=8, hidden_dims=1024, normalise_top_k=False)
    PERCORE_BATCH_SIZE = 4


@dataclasses.dataclass(frozen=True)
class Case:
    """One model on one device.

    Attributes:
      experiment: its experiment.
      passes, good: tokens per second, or shares of the peak if below 1; None: no bar.
    """

    experiment: type[SyntheticDecoder]
    passes: float | None
    good: float | None


CASES = {
    "A": Case(LlamaA, 45_000, 54_000),
    "B": Case(LlamaB, 18_500, 23_100),
    "C": Case(Gpt2C, 46_000, 50_000),
    "D": Case(WindowsD, 70_000, 79_000),
    "E": Case(LlamaE, None, 7_700),
    "F": Case(LlamaF, 10_800, 13_500),
    "G": Case(ExpertsG, 0.2, 0.3),
}
PAIR = "pair"


@experiment_registry.register
class Gpu1B(cloud.LmCloudSpmd):
    """1.1B parameters on one GPU, fused attention, bfloat16 compute with float32 variables, global batch 8."""

    PERCORE_BATCH_SIZE, NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS = 8, 20, 2048, 8192
    ATTEN_LOGIT_CAP = 0.0
    USE_FUSED_ATTENTION = True
    ICI_MESH_SHAPE = (1, 1, 1)


@experiment_registry.register
class GpuTiny(cloud.TinyCloud, Gpu1B):
    """The structure of Gpu1B in a size that runs in seconds on any device."""


PAIRS = {
    "1B": plan_baseline.Case(
        "benchmarks.gpu.Gpu1B", None, (1, 1, 1), 8, 20, 2048, 8192, attention_cap=0.0, fused_attention=True
    ),
    "tiny": plan_baseline.Case(
        "benchmarks.gpu.GpuTiny", None, (1, 1, 1), 1, 2, 32, 67, 8, 61, 16, jnp.float32, 0.0, fused_attention=True
    ),
}


def tiny(experiment: type[SyntheticDecoder]) -> type[SyntheticDecoder]:
    """Returns a model of the same structure in a size that runs in seconds on any device."""
    sizes = {name: value for name, value in vars(TinySizes).items() if name.isupper()} | {"PERCORE_BATCH_SIZE": 2}
    heads = "NUM_KV_HEADS" if experiment.NUM_KV_HEADS < experiment.NUM_HEADS else "NUM_HEADS"
    sizes["NUM_KV_HEADS"] = sizes[heads]
    if getattr(experiment, "MOE", None) is not None:
        sizes["MOE"] = dataclasses.replace(experiment.MOE, num_experts=5, num_experts_per_token=2, hidden_dims=7)
    if getattr(experiment, "WINDOW", None) is not None:
        sizes["WINDOW"] = 5
    if getattr(experiment, "ROTARY_SCALING", None) is not None:
        sizes["ROTARY_SCALING"] = dataclasses.replace(experiment.ROTARY_SCALING, original_max_positions=8)
    if issubclass(experiment, LlamaE):  # its embeddings are large enough for 8 bits
        sizes["VOCAB_SIZE"] = 1 + opt_state_dtypes.LEAST_ELEMENTS // sizes["MODEL_DIMS"]
    return type(f"Tiny{experiment.__name__}", (experiment,), sizes)


def job_of(experiment: type[SyntheticDecoder], directory: str, topology: str | None = None) -> Any:
    """Returns the trainer's job on one device."""
    from spmd_trainer.training.job import Job
    from spmd_trainer.training.run_config import make_run_config

    mesh = tuple((name, 1) for name in experiment.MESH_AXIS_NAMES)
    rows = (f"train_datasets[0].batch_size.global_batch_size={round(experiment.PERCORE_BATCH_SIZE)}",)
    return Job.build(
        make_run_config(experiment, directory, overrides=rows, mode="inspect", mesh=mesh, topology=topology)
    )


def measure(report: reporting.Report, name: str, case: Case, device: Any, windows: int) -> None:
    """Times one case and reports it."""
    from spmd_trainer.planner import plan
    from spmd_trainer.training import start_up

    with tempfile.TemporaryDirectory() as directory:
        job = job_of(case.experiment, directory)
        compiled = start_up.compile_train_step(job)
        with start_up.train_batches(job, None) as batches:
            batch = next(iter(batches)).batch
    planned = plan.chip_bytes(compiled.fn, None).total
    step = _stepper(compiled.fn, job.partitioner.initialize_train_state(job.prng_key), job.prng_key, batch)
    window(step)  # warms up
    seconds = np.array([window(step) for _ in range(windows)])
    layout, spec = job.partitioner.layout, pax_fiddle.build(case.experiment().spec())
    params, frozen = (float(count(per_token=True)) for count in (layout.num_params, layout.num_frozen_params))
    rows, length = next(iter(jax.tree.leaves(job.inputs_shape_dtype.ids))).shape
    tokens = rows * length
    flops = {
        "6N": chips.model_flops(round(params), tokens, num_frozen=round(frozen)),
        "products": tokens * spec.matrix_flops(params, frozen, length),
    }
    size = f"{layout.num_params():,} parameters learn, {layout.num_frozen_params():,} don't; batch {rows} x {length}"
    for what, line in (("model", f"{case.experiment.__name__}, {size}"), *(("kernel", x) for x in compiled.attention)):
        report.note(f"{name}, {what}", line)
    report.figure(f"{name}, step", seconds.tolist(), "ms", scale=1e3)
    report.figure(f"{name}, rate", (tokens / seconds).tolist(), "tokens/s")
    report.figure(f"{name}, products of a token", flops["products"] / tokens, "GFLOP", scale=1e-9)
    _report_shares(report, name, case, device, tokens / seconds, {k: v / seconds for k, v in flops.items()})
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    report.figure(f"{name}, memory of the plan", planned, "GB", scale=1e-9)
    if peak is not None:
        report.figure(f"{name}, peak memory so far", peak, "GB", scale=1e-9)


def _report_shares(
    report: reporting.Report, name: str, case: Case, device: Any, rates: np.ndarray, flops: dict[str, np.ndarray]
) -> None:
    """Reports the shares of the chip's peak, and the bars."""
    peak = chips.peak_flops(device.device_kind, 1)
    for count, values in flops.items():
        if peak is None:
            report.note(f"{name}, MFU ({count})", f"unknown: {device.device_kind} is not in chips.CHIPS")
        else:
            report.figure(f"{name}, MFU ({count})", (100 * values / peak).tolist(), "%")
    for what, bar in (("passes", case.passes), ("is good", case.good)):
        if bar is None or peak is None:
            continue
        found = float(np.median(flops["products"] / peak if bar < 1 else rates))
        unit = "of the peak" if bar < 1 else "tokens/s"
        report.note(f"{name} {what} at {bar:,g} {unit}", "yes" if found >= bar else f"NO, {found / bar:.0%} of it")


def _stepper(fn: Callable[..., Any], state: Any, key: Any, batch: Any) -> Callable[[], Any]:
    """Returns a function that takes the next step and returns its scalars."""

    def step() -> Any:
        nonlocal state
        state, scalars = fn(state, key, batch)
        return scalars

    return step


def product_rate(size: int, windows: int) -> list[float]:
    """Returns FLOP/s of the product of two square bfloat16 matrices, one for each window."""
    x = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    multiply = jax.jit(lambda x: (x @ x).astype(jnp.bfloat16))
    window(lambda: multiply(x))
    return [2.0 * size**3 / window(lambda: multiply(x)) for _ in range(windows)]


def print_plan(name: str, make_job: Callable[[str], Any], topology: str) -> bool:
    """Compiles a case for an absent chip, and prints its memory; returns whether it fits. `make_job` gets a directory."""
    from spmd_trainer.errors import UserError
    from spmd_trainer.planner import plan

    with tempfile.TemporaryDirectory() as directory:
        try:
            made = plan.plan(make_job(directory))
        except UserError as error:  # the compiler itself says that it doesn't fit
            print(f"{name}: {error}", flush=True)
            return False
    parts = {"state and batch": made.arguments, "temporaries": made.temporaries, "all": made.total}
    sizes = ", ".join(f"{what} {size / 1e9:.1f} GB" for what, size in parts.items())
    print(f"{name} on {topology}: {'fits' if made.fits else 'DOES NOT FIT'}; {sizes}; {made.seconds:.0f} s", flush=True)
    return bool(made.fits)


# --- the pair: the trainer's step and a hand-written one ----------------------------------------------------------------


def batch_of(case: plan_baseline.Case) -> dict[str, np.ndarray]:
    """Returns a batch of random tokens, one sequence per row."""
    ids = np.random.default_rng(0).integers(0, case.vocab, (case.rows, case.seq)).astype(np.int32)
    ones, places = np.ones_like(ids), np.broadcast_to(np.arange(case.seq, dtype=np.int32), ids.shape)
    batch = {"ids": ids, "labels": np.roll(ids, -1, axis=1), "segment_ids": ones, "segment_pos": places}
    return batch | {"weights": ones.astype(np.float32)}


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


def trainer_step(case: plan_baseline.Case) -> Callable[[], Any]:
    """Returns a function that takes one step of the trainer."""
    from spmd_trainer.training import start_up

    with tempfile.TemporaryDirectory() as directory:
        job = plan_baseline.trainer_job(case, directory)
    fn = start_up.compile_train_step(job).fn
    padded = job.partitioner.layout.pad_inputs_shape_dtype(job.inputs_shape_dtype)
    # Inputs that the baseline doesn't have: nothing is padding, and every row has weight 1.
    values = batch_of(case) | {"paddings": np.zeros((case.rows, case.seq)), "eval_sample_weights": np.ones(case.rows)}
    rows = py_utils.NestedMap({name: values[name].astype(x.dtype) for name, x in padded.items()})
    batch = job.partitioner.layout.put(rows)
    return _stepper(fn, job.partitioner.initialize_train_state(job.prng_key), job.prng_key, batch)


def compare(report: reporting.Report, case: plan_baseline.Case, device: Any, windows: int) -> None:
    """Times both programs in windows of random order, and reports the ratio of their steps."""
    steps = {"trainer": trainer_step(case), "baseline": baseline_step(case, [device])}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        window(step)  # warms up
    for _ in range(windows):
        for name in random.sample(list(steps), len(steps)):
            seconds[name].append(window(steps[name]))
    for name, values in seconds.items():
        report.figure(f"{PAIR}, step, {name}", values, "ms", scale=1e3)
    report.ratio(f"{PAIR}, step, trainer / baseline", seconds["trainer"], seconds["baseline"])


def window(step: Callable[[], Any]) -> float:
    """Takes STEPS steps; returns the seconds per step."""
    started = time.perf_counter()
    result = None
    for _ in range(STEPS):
        result = step()
    jax.block_until_ready(result)
    return (time.perf_counter() - started) / STEPS


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures on the first device; returns the exit status."""
    parser = reporting.parser(__doc__, rounds=4)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES, PAIR], help="cases to run; default: all")
    parser.add_argument("--tiny", action="store_true", help="tiny models of the same structure, on any device")
    parser.add_argument("--plan", metavar="CHIP:1x1", help="compile for this chip instead, and print memory")
    options = parser.parse_args(arguments)
    names = options.cases or [*CASES, PAIR]
    experiments = {name: tiny(case.experiment) if options.tiny else case.experiment for name, case in CASES.items()}
    if options.plan:
        topologies.run_on_host()
        jobs = {name: functools.partial(job_of, exp, topology=options.plan) for name, exp in experiments.items()}
        pair = dataclasses.replace(PAIRS["tiny" if options.tiny else "1B"], topology=options.plan)
        jobs[PAIR] = functools.partial(plan_baseline.trainer_job, pair)  # the other program's sizes: `plan_baseline`
        fits = [print_plan(name, jobs[name], options.plan) for name in names]
        return int(not all(fits))
    device = jax.devices()[0]
    if device.platform != "gpu" and not options.tiny:
        sys.stderr.write(
            f"benchmarks.gpu: needs a GPU, but the first device is {device.device_kind}; --tiny and --plan run anywhere\n"
        )
        return 2
    # The tiny models' timings are too noisy for any limit.
    report = reporting.Report("gpu", options.json, limit_spread=math.inf if options.tiny else reporting.LIMIT_SPREAD)
    report.note("device", f"{device.device_kind}, JAX {jax.__version__}")
    rates = product_rate(64 if options.tiny else PRODUCT, options.rounds)
    report.figure("product of two bfloat16 matrices", rates, "TFLOP/s", scale=1e-12)
    for name in names:
        if name == PAIR:
            compare(report, PAIRS["tiny" if options.tiny else "1B"], device, options.rounds)
        else:
            measure(
                report, name, dataclasses.replace(CASES[name], experiment=experiments[name]), device, options.rounds
            )
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
