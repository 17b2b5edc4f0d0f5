"""Compares the bytes per chip of three train steps with long rows, compiled for GPUs that need not be here.

- trainer: lm.cloud 2B with the attention kernel that the trainer picks. Rows are packed.
- unfused: the same with praxis' own attention, which holds logits and probabilities.
- hand-written: `plan_baseline`'s step with `jax.nn.dot_product_attention(is_causal=True)` by cuDNN, without segments.

`python -m benchmarks.attention_memory` needs the `cuda12` or `cuda13` extra and takes minutes. It exits with 1 if the trainer's
peak is over 5% more than the hand-written one's, or more than a quarter of the unfused one's. `--seq`, `--rows`, `--topology` and
`--mesh` (sizes of replica, data and mdl) change the case.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

# Programs are compiled for the topology's chips, so no accelerator is needed here.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmarks import plan_baseline
from benchmarks.plan_baseline import Case
from spmd_trainer.planner.plan import ChipBytes

LEAST_SAVING, MOST_OF_HAND_WRITTEN = 4.0, 1.05
CASE = Case(
    "lm.cloud.LmCloudSpmd2B",
    "h100:1x8",
    (1, 8, 1),
    16,
    18,
    3072,
    12288,
    seq=8192,
    attention_cap=0.0,
    fused_attention=True,
    packed=False,
)


@dataclasses.dataclass(frozen=True)
class Step:
    """A compiled step.

    Attributes:
      sizes: bytes that it needs on a chip.
      seconds: compile time.
      attention: the kernels of its attention layers; empty if they are not the trainer's.
    """

    sizes: ChipBytes
    seconds: float
    attention: Sequence[str] = ()


def trainer_step(case: Case, *, fused: bool) -> Step:
    """Compiles the trainer's step, with the kernel that it picks or with praxis' own attention."""
    from spmd_trainer.planner import plan
    from spmd_trainer.training.job import Job
    from spmd_trainer.training.run_config import make_run_config

    overrides = (
        f"MAX_SEQ_LEN={case.seq}",
        f"ATTEN_LOGIT_CAP={case.attention_cap}",
        f"USE_FUSED_ATTENTION={fused}",
        f"train_datasets[0].batch_size.global_batch_size={case.rows}",
    )
    mesh = tuple(zip(("replica", "data", "mdl"), case.mesh, strict=True))
    with tempfile.TemporaryDirectory() as directory:
        config = make_run_config(
            case.exp, directory, overrides=overrides, mode="inspect", mesh=mesh, topology=case.topology
        )
        result = plan.plan(Job.build(config))
    return Step(result, result.seconds, result.attention)


def hand_written_step(case: Case) -> Step:
    """Compiles the hand-written step."""
    from spmd_trainer.planner import plan

    started = time.monotonic()
    compiled = plan_baseline.compile_baseline(case, plan_baseline.devices_of(case))
    return Step(plan.chip_bytes(compiled, case.topology), time.monotonic() - started)


def compare(case: Case) -> bool:
    """Compiles the three steps, prints their sizes and ratios, and returns True if both bars are met."""
    makers: dict[str, Callable[[], Step]] = {
        "trainer": lambda: trainer_step(case, fused=True),
        "hand-written": lambda: hand_written_step(case),
        "unfused": lambda: trainer_step(case, fused=False),
    }
    print(f"{case.exp} on {case.topology or 'host devices'}, mesh {case.mesh}, {case.rows} rows of {case.seq} tokens")
    print(
        f"  {'GiB':12}{'arguments':>10}{'temporary':>10}{'outputs':>10}{'total':>10}{'peak':>10}   compiled", flush=True
    )
    peaks: dict[str, int] = {}
    for name, make in makers.items():
        step = make()
        sizes = step.sizes
        peaks[name] = sizes.total if sizes.peak is None else sizes.peak
        numbers = (sizes.arguments, sizes.temporaries, sizes.outputs, sizes.total, peaks[name])
        parts = "".join(f"{part / plan_baseline.GIB:10.3f}" for part in numbers)
        print(f"  {name:12}{parts}{step.seconds:8.0f} s", *step.attention, flush=True)
    saving, ratio = peaks["unfused"] / peaks["trainer"], peaks["trainer"] / peaks["hand-written"]
    print(f"  unfused / trainer, live at the peak: {saving:.2f}, bar {LEAST_SAVING:.0f}")
    print(f"  trainer / hand-written, live at the peak: {ratio:.3f}, bar {MOST_OF_HAND_WRITTEN}", flush=True)
    return saving >= LEAST_SAVING and ratio <= MOST_OF_HAND_WRITTEN


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares the case that the flags describe; returns the exit status."""
    parser = argparse.ArgumentParser(description="bytes per chip of attention: trainer, hand-written and unfused")
    parser.add_argument("--seq", type=int, default=CASE.seq, help="tokens per row")
    parser.add_argument("--rows", type=int, default=CASE.rows, help="rows of the global batch")
    parser.add_argument("--topology", default=CASE.topology)
    parser.add_argument("--mesh", type=int, nargs=3, default=CASE.mesh, metavar=("REPLICA", "DATA", "MDL"))
    given = parser.parse_args(arguments)
    case = dataclasses.replace(CASE, seq=given.seq, rows=given.rows, topology=given.topology, mesh=tuple(given.mesh))
    return 0 if compare(case) else 1


if __name__ == "__main__":
    sys.exit(main())
