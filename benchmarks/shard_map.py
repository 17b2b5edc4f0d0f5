"""Step time, collective bytes and peak device bytes of both partitioners, data parallel and FSDP, against the baseline.

    python -m benchmarks.shard_map [--rounds 10] [--rows 32]

All run the model of `lm.stdlib.StdlibBytes` on 8 devices, mesh (replica, data, mdl) = (1, 8, 1), in one process. Each round takes
one step of each variant, in random order. The baseline is the hand-written step of `benchmarks.baseline_lm`, data parallel on
the same mesh. Prints the median, with quartiles, of step time / the baseline's step time in the same round; the bytes of
collectives per device and step (of their results, or of a reduce-scatter's operand), counted in the compiled program with
the trip counts of its loops; and the compiler's own count of temporary and argument bytes per device.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import baseline_lm, reporting  # baseline_lm sets up the host devices, so before JAX
from spmd_trainer import sharding, tasks_lib
from spmd_trainer.experiments.lm.stdlib import StdlibBytes
from spmd_trainer.inputs import batches
from spmd_trainer.step import pjit, step_fns
from spmd_trainer.step.partitioner import Partitioner
from spmd_trainer.step.shard_map import ShardMapPartitioner

MESH = (("replica", 1), ("data", 8), ("mdl", 1))
MIN_WEIGHT_SIZE = 2**12


@dataclasses.dataclass
class Variant:
    """One variant of the train step: its compiled program and its state."""

    name: str
    compiled: Any
    state: Any
    call: Callable[[Any], Any]  # state -> state

    def step(self) -> float:
        """Takes one step and returns its seconds."""
        started = time.perf_counter()
        self.state = self.call(self.state)
        jax.block_until_ready(self.state)
        return time.perf_counter() - started


def ours(name: str, partitioner: Partitioner, rows: int, strategy: Any, batch: Any) -> Variant:
    """Returns the trainer's step with a partitioner; `strategy` replaces the layers' own annotations, None keeps them."""
    task_p = StdlibBytes().task()
    task_p.train.variable_norm_summary = False
    task_p.train.sharding_strategy = strategy
    if strategy is not None:
        _remove_annotations(task_p.model.lm_tpl)
    partitioner.setup(tasks_lib.build_task(task_p), batches.lm_input_specs(rows, baseline_lm.STDLIB.seq))

    def step(*args: Any) -> tuple[Any, jax.Array]:
        state, output = step_fns.train_step(*args)
        return state, output.loss

    partitioned = partitioner.partition(step, batches.lm_input_specs(rows, baseline_lm.STDLIB.seq), is_eval=False)
    key = jax.random.key(0)
    compiled = partitioned.lower(key).compile()
    inputs = partitioner.layout.put(batch)
    return Variant(
        name, compiled, partitioner.initialize_train_state(key), lambda state: compiled(state, key, inputs)[0]
    )


def _remove_annotations(config: Any) -> None:
    """Removes the layers' own split mappings, so that a strategy decides."""
    import fiddle as fdl
    from fiddle import daglish

    for value, _ in daglish.iterate(config):
        if isinstance(value, fdl.Buildable) and "weight_split_dims_mapping" in fdl.ordered_arguments(value):
            for field in list(fdl.ordered_arguments(value.weight_split_dims_mapping)):
                setattr(value.weight_split_dims_mapping, field, None)


def baseline(mesh: jax.sharding.Mesh, rows: int, batch: Any) -> Variant:
    """Returns the hand-written step with replicated parameters."""
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(mesh.axis_names))

    init = functools.partial(baseline_lm.init_state, sizes=baseline_lm.STDLIB)
    with jax.set_mesh(mesh):
        state = jax.jit(init, out_shardings=whole)(jax.random.key(0))
        names = ("ids", "labels", "paddings", "weights")
        placed = jax.device_put({name: batch[name] for name in names}, split)
        step = jax.jit(
            baseline_lm.train_step,
            in_shardings=(whole, split),
            out_shardings=(whole, whole),
            donate_argnums=0,
        )
        compiled = step.lower(state, placed).compile()
    return Variant("baseline dp", compiled, state, lambda state: compiled(state, placed)[0])


def variants(rows: int) -> list[Variant]:
    """Returns all variants, the baseline first."""
    mesh = sharding.create_device_mesh(list(MESH))
    tokens = np.random.default_rng(0).integers(1, 257, (rows, baseline_lm.STDLIB.seq + 1)).astype(np.int32)
    batch = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), batches.lm_input_specs(rows, baseline_lm.STDLIB.seq))
    batch.ids, batch.labels = tokens[:, :-1], tokens[:, 1:]
    batch.paddings = np.zeros_like(batch.paddings)
    batch.segment_pos = np.broadcast_to(np.arange(baseline_lm.STDLIB.seq, dtype=np.int32), batch.segment_pos.shape)
    make = functools.partial(ours, rows=rows, batch=batch)
    megabytes = MIN_WEIGHT_SIZE * 4 / 2**20
    split = [(".*", sharding.fsdp("data", megabytes, allow_uneven=True))]
    result = [
        baseline(mesh, rows, batch),
        make("pjit dp", pjit.PjitPartitioner(mesh), strategy=[(".*", sharding.replicate())]),
        make("pjit fsdp", pjit.PjitPartitioner(mesh), strategy=split),
    ]
    for count in (1, 4):
        label = f"{count} minibatch{'es' if count > 1 else ''}"
        dp = ShardMapPartitioner("dp", num_minibatches=count, mesh=mesh)
        result.append(make(f"shard_map dp, {label}", dp, strategy=None))
        for gather in ("layer", "step"):
            fsdp = ShardMapPartitioner("fsdp", None, MIN_WEIGHT_SIZE, num_minibatches=count, gather=gather, mesh=mesh)
            result.append(make(f"shard_map fsdp, {label}, by {gather}", fsdp, strategy=None))
    return result


def main() -> int:
    """Measures and prints; returns the exit status."""
    parser = reporting.parser(__doc__, rounds=10)
    parser.add_argument("--rows", type=int, default=32, help="global batch size")
    args = parser.parse_args()
    if args.rows % 32:
        parser.error(f"--rows={args.rows}: must be a multiple of 32 (8 devices x 4 minibatches)")
    all_variants = variants(args.rows)
    times: dict[str, list[float]] = {variant.name: [] for variant in all_variants}
    for index in range(args.rounds + 1):
        for variant in random.sample(all_variants, len(all_variants)):
            seconds = variant.step()
            if index:  # the first round warms up
                times[variant.name].append(seconds)
    report = reporting.Report("shard_map", args.json)
    report.figure("baseline dp", times["baseline dp"], "ms", scale=1e3)
    for variant in all_variants:
        memory = variant.compiled.memory_analysis()
        if variant.name != "baseline dp":
            report.ratio(f"{variant.name}, step / baseline", times[variant.name], times["baseline dp"])
        report.figure(f"{variant.name}, temporaries", memory.temp_size_in_bytes / 2**20, "MiB per device")
        report.figure(f"{variant.name}, arguments", memory.argument_size_in_bytes / 2**20, "MiB per device")
        report.note(
            f"{variant.name}, collectives per device and step", reporting.collectives_text(variant.compiled.as_text())
        )
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
