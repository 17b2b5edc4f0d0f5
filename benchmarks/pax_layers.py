"""Compares the step of a Pax experiment file with a hand-written JAX step that makes the same choices, and prices each choice.

    python -m benchmarks.pax_layers [--processes 7] [--rounds 9] [--steps 4] [--json FILE]
    python -m benchmarks.pax_layers --breakdown [--rounds 9] [--steps 3]
    python -m benchmarks.pax_layers --breakdown --topology v5e:2x4

The experiment is `lm.cloud.LmCloudSpmd`, as paxml publishes it, in a small size, on 8 host devices, mesh (replica, data, mdl) =
(1, 4, 2). Its choices are the fields of `pax_baseline.Choices`. --breakdown drops one choice after the other from the
hand-written program, down to a lean one. On host devices it reports the CPU time of a step; programs take turns. With --topology
it compiles a larger size for these chips, and reports FLOPs and bytes moved by `planner.hlo_costs`, which counts a loop's body
as often as it runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
import time
from typing import Any

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from jax.sharding import Mesh

from benchmarks import reporting, turns
from benchmarks.pax_baseline import CHIPS, HOST, RATE, Choices, Sizes, batch, lower_hand_written, parameters
from spmd_trainer import sharding, tasks_lib
from spmd_trainer.experiments.lm import cloud
from spmd_trainer.planner import hlo_costs, topologies
from spmd_trainer.step import step_fns
from spmd_trainer.step.pjit import PjitPartitioner

BAR = 1.15
MESH = [("replica", 1), ("data", 4), ("mdl", 2)]
KEY = jax.random.key(0)


def pax_experiment(sizes: Sizes) -> Any:
    """Returns the experiment in this size."""
    fields = {
        "NUM_LAYERS": sizes.layers,
        "MODEL_DIMS": sizes.width,
        "HIDDEN_DIMS": sizes.hidden,
        "DIMS_PER_HEAD": sizes.width // sizes.heads,
        "VOCAB_SIZE": sizes.vocab,
        "MAX_SEQ_LEN": sizes.seq,
        "FPROP_DTYPE": sizes.dtype,
        "LEARNING_RATE": RATE,
        "ICI_MESH_SHAPE": tuple(size for _, size in MESH),
    }
    return type("PaxLayers", (cloud.LmCloudSpmd,), fields)()


def trainer(mesh: Mesh, sizes: Sizes) -> tuple[Any, Any]:
    """Returns the partitioner of the experiment's task on this mesh, and its train step."""
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch(sizes))
    partitioner = PjitPartitioner(mesh)
    partitioner.setup(tasks_lib.build_task(pax_experiment(sizes).task()), rows)
    return partitioner, partitioner.partition(step_fns.train_step, rows, is_eval=False)


def host_trainer() -> tuple[turns.Program, Any]:
    """Returns the trainer's step on the host devices, and its initial variables."""
    partitioner, step = trainer(sharding.create_device_mesh(MESH), HOST)
    inputs = partitioner.layout.put(batch(HOST))
    held = {"state": partitioner.initialize_train_state(KEY)}
    initial = parameters(jax.tree.map(np.asarray, held["state"].mdl_vars))

    def take() -> None:
        held["state"], held["output"] = step(held["state"], KEY, inputs)

    return turns.Program(take, lambda: held["output"].loss), initial


def host_hand_written(choices: Choices, initial: Any) -> turns.Program:
    """Returns the hand-written step on the host devices, from these initial parameters."""
    mesh = sharding.create_device_mesh(MESH)
    compiled = lower_hand_written(choices, HOST, mesh, initial).compile()
    state = {
        "step": np.zeros((), np.int32),
        "params": initial,
        **{k: jax.tree.map(np.zeros_like, initial) for k in "mv"},
    }
    in_shardings = compiled.input_shardings[0]
    held = {"state": jax.device_put(state, in_shardings[0])}
    rows = jax.device_put(dict(batch(HOST)), in_shardings[1])

    def take() -> None:
        held["state"], held["metrics"], _ = compiled(held["state"], rows)

    return turns.Program(take, lambda: np.asarray(held["metrics"])[0])


def make_programs() -> dict[str, turns.Program]:
    """Returns both programs with the same choices and initial values."""
    program, initial = host_trainer()
    return {turns.TRAINER: program, turns.HAND_WRITTEN: host_hand_written(Choices(), initial)}


def cumulative() -> dict[str, Choices]:
    """Returns {name: choices}: all choices, and then one less at a time."""
    found, dropped = {"all choices": Choices()}, {}
    for field in dataclasses.fields(Choices):
        dropped[field.name] = False
        found[f"without {field.name}"] = Choices(**dropped)
    return found


def break_down_on_host(rounds: int, steps: int, report: reporting.Report) -> None:
    """Reports the CPU time of a step of the trainer, and of the hand-written program with ever fewer choices."""
    program, initial = host_trainer()
    programs = {"trainer": program} | {
        name: host_hand_written(choices, initial) for name, choices in cumulative().items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    rng = np.random.default_rng(0)
    for number in range(rounds + 1):  # the first round uses everything for the first time, and is not counted
        for name in rng.permutation(list(programs)):
            began = time.process_time()
            for _ in range(steps):
                programs[name].step()
            float(programs[name].loss())
            if number:
                seconds[name].append((time.process_time() - began) / steps)
    for name, values in seconds.items():
        report.figure(f"CPU time of a step, {name}", values, "ms", scale=1e3)
        report.ratio(f"{name} / all choices", values, seconds["all choices"])


def break_down_for_chips(topology: str, report: reporting.Report) -> None:
    """Reports FLOPs and bytes accessed of a step on one chip, of the trainer and with ever fewer choices."""
    mesh = sharding.create_device_mesh(MESH, devices=topologies.topology_devices(topology))
    partitioner, step = trainer(mesh, CHIPS)
    abstract = partitioner.layout.padded_shapes
    shapes = parameters(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), abstract.mdl_vars))
    key = jax.eval_shape(lambda: jax.random.key(0))
    lowered = {"trainer": lambda: step.lower(key)}
    for name, choices in cumulative().items():
        lowered[name] = functools.partial(lower_hand_written, choices, CHIPS, mesh, shapes)
    for name, lower in lowered.items():
        compiled = lower().compile()
        costs = hlo_costs.instruction_costs(compiled.as_text())
        flops, moved = (sum(getattr(cost, field) * cost.times for cost in costs) for field in ("flops", "num_bytes"))
        report.figure(f"FLOPs, {name}", flops, "GFLOP per chip", scale=1e-9)
        report.figure(f"bytes moved, {name}", moved, "GiB per chip", scale=2**-30)
        memory = compiled.memory_analysis().temp_size_in_bytes
        report.figure(f"temporaries, {name}", memory, "GiB per chip", scale=2**-30)


def main() -> int:
    """Measures and prints; returns the exit status."""
    if "--breakdown" not in sys.argv:
        return turns.main("pax_layers", __doc__, make_programs, bar=BAR, tolerance=1e-4)
    parser: argparse.ArgumentParser = reporting.parser(__doc__, rounds=9)
    parser.add_argument(
        "--breakdown", action="store_true", help="price each choice instead of comparing with the trainer"
    )
    parser.add_argument("--steps", type=int, default=3, help="steps per turn")
    parser.add_argument("--topology", help="compile for these chips, e.g. v5e:2x4, instead of running on host devices")
    args = parser.parse_args()
    report = reporting.Report("pax_layers", args.json)
    if args.topology:
        break_down_for_chips(args.topology, report)
    else:
        break_down_on_host(args.rounds, args.steps, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
