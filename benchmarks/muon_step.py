"""Compares a Muon step of a decoder with an Adam step, beside the arithmetic of both.

    python -m benchmarks.muon_step [--layers 16] [--width 1024] [--rows 8] [--length 128] [--rounds 3] [--json FILE]

On 8 host devices, mesh (replica, data, mdl) = (1, 4, 2), in one process; both take turns. By default the decoder has 300M
parameters. Muon's iterations are matrix products, so its step has more arithmetic: the ratio of the times is divided by the ratio
of the FLOPs of both compiled programs. What is left is the cost of moving matrices, of matrices that don't divide by the devices,
and of products of other shapes. The bar is 1.15. Takes about 15 minutes on 2 cores.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import jax
import numpy as np
from praxis import optimizers, schedules
from praxis.pax_fiddle import Config
from praxis.py_utils import NestedMap

import spmd_trainer as st
from benchmarks import reporting, turns
from spmd_trainer import sharding, task_defaults, tasks_lib
from spmd_trainer.decoder import lm
from spmd_trainer.models.decoder_spec import DecoderSpec
from spmd_trainer.planner import hlo_costs
from spmd_trainer.step import step_fns
from spmd_trainer.step.pjit import PjitPartitioner

KEY = jax.random.key(0)
VOCAB, HEAD_DIMS = 16_384, 64
BAR = 1.15


def batch(rows: int, length: int) -> NestedMap:
    """Returns random tokens in the form of a text input."""
    ids = np.random.default_rng(0).integers(0, VOCAB, (rows, length), dtype=np.int32)
    ones = np.ones_like(ids)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), ids.shape).copy()
    weights = ones.astype(np.float32)
    return NestedMap(
        ids=ids, labels=ids, weights=weights, paddings=1 - weights, segment_ids=ones, segment_pos=positions
    )


def program(optimizer_p: Config, layers: int, width: int, rows: NestedMap) -> tuple[turns.Program, float, int]:
    """Returns the step with an optimizer, the FLOPs of one device in it, and the model's parameters."""
    spec_p = Config(
        DecoderSpec,
        vocab_size=VOCAB,
        model_dims=width,
        hidden_dims=4 * width,
        num_layers=layers,
        num_heads=width // HEAD_DIMS,
        num_kv_heads=width // HEAD_DIMS,
        head_dims=HEAD_DIMS,
    )
    model_p = Config(lm.DecoderLanguageModel, name="lm", lm_tpl=Config(lm.DecoderLm, spec=spec_p))
    task_p = Config(tasks_lib.SingleTask, name="muon_step", model=model_p)
    mesh = sharding.create_device_mesh([("replica", 1), ("data", 4), ("mdl", 2)])
    task_defaults.set_sharding_annotations_v1(task_p, False, mesh.devices.shape)
    task_p.train.learner.loss_name = "total_loss"
    task_p.train.variable_norm_summary = False
    optimizer_p.learning_rate, optimizer_p.lr_schedule = 1e-3, Config(schedules.Constant, value=1.0)
    task_p.train.learner.optimizer = optimizer_p
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), rows)
    partitioner = PjitPartitioner(mesh)
    partitioner.setup(tasks_lib.build_task(task_p), shapes)
    step = partitioner.partition(step_fns.train_step, shapes, is_eval=False)
    compiled = step.lower(jax.eval_shape(lambda: KEY)).compile()
    flops = float(sum(cost.flops * cost.times for cost in hlo_costs.instruction_costs(str(compiled.as_text()))))
    inputs = partitioner.layout.put(rows)
    held: dict[str, Any] = {"state": partitioner.initialize_train_state(KEY)}

    def take() -> None:
        held["state"], held["output"] = compiled(held["state"], KEY, inputs)

    return turns.Program(take, lambda: held["output"].loss), flops, partitioner.layout.num_params()


def main() -> int:
    """Measures and prints; returns the exit status."""
    parser = reporting.parser(__doc__, rounds=3)
    for name, value in {"layers": 16, "width": 1024, "rows": 8, "length": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    report, rows = reporting.Report("muon_step", args.json), batch(args.rows, args.length)
    programs, flops = {}, {}
    for name, optimizer_p in {"adam": Config(optimizers.Adam), "muon": Config(st.Muon)}.items():
        programs[name], flops[name], size = program(optimizer_p, args.layers, args.width, rows)
        report.figure(f"FLOPs of a device, {name}", flops[name], "GFLOP", scale=1e-9)
    report.figure("parameters", size, "M", scale=1e-6)
    seconds = turns.take_turns(programs, args.rounds, 1)["seconds"]
    for name, times in seconds.items():
        report.figure(f"step, {name}", times, "s")
    more = flops["muon"] / flops["adam"]
    report.ratio("step, muon / adam", seconds["muon"], seconds["adam"])
    report.ratio("the same over the FLOPs'", [s / more for s in seconds["muon"]], seconds["adam"], bar=BAR)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
