"""Cost of padding: the step time of uneven models divided by that of the same models at the next even size.

    python -m benchmarks.padding [--rounds 12]

Five pairs on 8 devices, the two models of a pair in turns: vocabulary 50257 over 4 (mesh data=2, mdl=4) and over 8 (data=1,
mdl=8), feed-forward width 1004 over 8, 13 rows over 4 (data=4, mdl=2) and 15 over 8. The even model, or the next batch that
divides, is the baseline. Also prints the bytes of collectives in both compiled programs, by kind.
"""

from __future__ import annotations

import os
import random
import sys
import time
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
from praxis import layers, optimizers, pax_fiddle, schedules

from benchmarks import reporting
from spmd_trainer import sharding, tasks_lib
from spmd_trainer.inputs import batches
from spmd_trainer.step import pjit, step_fns

Config = pax_fiddle.Config
ROWS, LENGTH, DIMS = 8, 64, 512
# name: (vocabulary, feed-forward width, rows) uneven and even, mesh sizes of (replica, data, mdl)
PAIRS = {
    "vocabulary 50257 over 4": ((50257, 512, ROWS), (50260, 512, ROWS), (1, 2, 4)),
    "vocabulary 50257 over 8": ((50257, 512, ROWS), (50264, 512, ROWS), (1, 1, 8)),
    "feed-forward 1004 over 8": ((1024, 1004, ROWS), (1024, 1008, ROWS), (1, 1, 8)),
    "13 rows over 4": ((1024, 1024, 13), (1024, 1024, 16), (1, 4, 2)),
    "15 rows over 8": ((1024, 1024, 15), (1024, 1024, 16), (1, 8, 1)),
}


def task(vocab_size: int, hidden: int, sizes: tuple[int, ...]) -> Config[tasks_lib.SingleTask]:
    """Returns the task of a two-layer transformer with tied embedding, v1 sharding and Adam; `sizes` is the mesh shape."""
    axes = ("replica", "data", "mdl")
    lm_p = Config(layers.TransformerLm, vocab_size=vocab_size, model_dims=DIMS)
    stack = Config(layers.StackedTransformer, model_dims=DIMS, hidden_dims=hidden, num_layers=2, num_heads=8)
    stack.transformer_layer_params_tpl.tr_atten_tpl.use_bias = False
    lm_p.stacked_transformer_tpl = stack
    task_p = Config(tasks_lib.SingleTask, name="padding")
    task_p.model = Config(layers.LanguageModel, name="lm", ici_mesh_shape=list(sizes), mesh_axis_names=list(axes))
    task_p.model.lm_tpl = layers.TransformerLm.set_sharding_params_v1(
        lm_p,
        replica_axis="replica",
        data_axis="data",
        mdl_axis="mdl",
        ici_mesh_shape=list(sizes),
        mesh_axis_names=list(axes),
        training_optimized=False,
    )
    task_p.train.inputs_split_mapping = {
        "map_1d": (("replica", "data"),),
        "map_2d": (("replica", "data"), None),
    }
    task_p.train.learner.loss_name = "total_loss"
    task_p.train.learner.optimizer = Config(
        optimizers.Adam, learning_rate=1e-3, lr_schedule=Config(schedules.Constant, value=1.0)
    )
    return task_p


class Run:
    """One model: its compiled step, its state and a batch."""

    def __init__(self, vocabulary: int, hidden: int, rows: int, sizes: tuple[int, ...]):
        mesh = sharding.create_device_mesh(list(zip(("replica", "data", "mdl"), sizes, strict=True)))
        partitioner = pjit.PjitPartitioner(mesh)
        specs = batches.lm_input_specs(rows, LENGTH)
        partitioner.setup(tasks_lib.build_task(task(vocabulary, hidden, sizes)), specs)
        step = partitioner.partition(_loss_only, specs, is_eval=False)
        self.key = jax.random.key(0)
        self.compiled = step.lower(self.key).compile()
        self.state = partitioner.initialize_train_state(self.key)
        rng = np.random.default_rng(0)
        batch = jax.tree.map(lambda x: rng.integers(1, 2, x.shape).astype(x.dtype), specs)
        self.inputs = partitioner.layout.put(batch)

    def seconds(self) -> float:
        """Takes one step and returns its seconds."""
        started = time.perf_counter()
        self.state, loss = self.compiled(self.state, self.key, self.inputs)
        jax.block_until_ready(loss)
        return time.perf_counter() - started


def _loss_only(*args: Any) -> tuple[Any, jax.Array]:
    state, output = step_fns.train_step(*args)
    return state, output.loss


def compare(report: reporting.Report, name: str, rounds: int) -> None:
    """Measures and reports one pair."""
    uneven, even, sizes = PAIRS[name]
    runs = {"uneven": Run(*uneven, sizes), "even": Run(*even, sizes)}
    for run in runs.values():
        run.seconds()
    times: dict[str, list[float]] = {kind: [] for kind in runs}
    for _ in range(rounds):
        for kind in random.sample(list(runs), 2):
            times[kind].append(runs[kind].seconds())
    report.figure(f"{name}, even", times["even"], "ms", scale=1e3)
    report.ratio(f"{name}, uneven / even", times["uneven"], times["even"])
    for kind, run in runs.items():
        report.note(f"{name}, {kind}", reporting.collectives_text(run.compiled.as_text()))


def main() -> int:
    """Measures and prints all pairs; returns the exit status."""
    args = reporting.parser(__doc__, rounds=12).parse_args()
    report = reporting.Report("padding", args.json)
    for name in PAIRS:
        compare(report, name, args.rounds)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
