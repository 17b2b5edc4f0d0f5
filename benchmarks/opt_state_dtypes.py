"""Losses of `lm.stdlib.StdlibBytes` with optimizer states in float32, bfloat16 and 8 bits.

    python -m benchmarks.opt_state_dtypes [--rounds 3] [--steps 1000] [--rows 8] [--dtypes float32,8bit] [--json FILE]

Trains once for each dtype and seed (--rounds), on one device, and compares the losses on the held-out text at the end. The bar is
0.5%. Also prints the bytes of the optimizer state for each parameter. 1,000 steps take about six minutes on 2 idle cores.
"""

from __future__ import annotations

import sys
import tempfile

import jax
import numpy as np

import spmd_trainer as st
from benchmarks import reporting
from spmd_trainer.step.opt_state_dtypes import DTYPES, FLOAT32

EXPERIMENT = "lm.stdlib.StdlibBytes"
BAR = 1.005


def run(dtype: str, seed: int, steps: int, rows: int) -> tuple[float, float]:
    """Trains; returns the loss in nats per byte on the held-out text, and the bytes of the optimizer state per parameter."""
    overrides = [
        f"task.train.learner.opt_state_dtype={dtype!r}",
        f"task.train.random_seed={seed}",
        f"train_datasets[0].input_random_seed={seed}",
        f"train_datasets[0].batch_size={rows}",
        f"task.train.num_train_steps={steps}",
        f"task.train.eval_interval_steps={steps}",
        f"task.train.save_interval_steps={steps}",
    ]
    with tempfile.TemporaryDirectory() as directory:
        result = st.train(EXPERIMENT, directory, overrides=overrides, mesh="data:1", enable_checkpoint_saving=False)
    size = sum(x.nbytes for x in jax.tree.leaves(result.state.opt_states))
    return float(result.metrics["heldout/total_loss"]), size / sum(
        x.size for x in jax.tree.leaves(result.state.mdl_vars)
    )


def main() -> int:
    """Trains and prints; returns the exit status."""
    parser = reporting.parser(__doc__, rounds=3)
    parser.add_argument("--steps", type=int, default=1000, help="training steps of each run")
    parser.add_argument("--rows", type=int, default=8, help="rows of a batch")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="what to compare, float32 first")
    args = parser.parse_args()
    if args.dtypes.split(",")[0] != FLOAT32 or not {*args.dtypes.split(",")} <= {*DTYPES}:
        parser.error(f"--dtypes={args.dtypes}: give float32 first, then some of {', '.join(DTYPES[1:])}")
    report = reporting.Report("opt_state_dtypes", args.json)
    losses: dict[str, list[float]] = {dtype: [] for dtype in args.dtypes.split(",")}
    for seed in range(1, args.rounds + 1):
        for dtype, found in losses.items():
            loss, size = run(dtype, seed, args.steps, args.rows)
            found.append(loss)
            report.figure(f"seed {seed}, {dtype}", loss, "nats/byte")
            report.figure(f"optimizer state, {dtype}", size, "bytes a parameter")
    for dtype, found in losses.items():
        if dtype != FLOAT32:
            report.ratio(f"loss, {dtype} / {FLOAT32}", found, losses[FLOAT32], bar=BAR)
            report.figure(f"largest loss, {dtype} / {FLOAT32}", float(np.max(np.divide(found, losses[FLOAT32]))))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
