"""Bytes per chip of a train step whose optimizer states are on the device, and in pinned host memory; TPUs need not be here.

`python -m benchmarks.host_memory` needs the `tpu` extra and takes minutes. `--topology`, `--layers`, `--width`, `--rows` and
`--dtype` (of the states) change the case: Llama's structure, with the states split over all chips.

`peak` is the compiler's own peak without the host's arrays, which it counts: device memory alone.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

# Programs are compiled for the topology's chips, so no accelerator is needed here.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from jax.sharding import Mesh

from spmd_trainer import tasks_lib
from spmd_trainer.experiments.lm.llama import Llama3_1
from spmd_trainer.inputs import batches
from spmd_trainer.planner import topologies
from spmd_trainer.step import host_states, step_fns
from spmd_trainer.step.pjit import PjitPartitioner


def compiled_step(case: argparse.Namespace, devices: Any, **fields: Any) -> tuple[Any, float]:
    """Returns the compiled train step with these fields of the decoder or the learner, and its compile time in seconds."""

    class Small(Llama3_1):
        NUM_LAYERS = case.layers
        MODEL_DIMS, HIDDEN_DIMS = case.width, 4 * case.width
        NUM_HEADS = NUM_KV_HEADS = case.width // 128
        HEAD_DIMS = 128
        VOCAB_SIZE = case.vocab
        ICI_MESH_SHAPE = (1, len(devices), 1)

    task_p = Small().task()
    decoder = {name: fields.pop(name) for name in tuple(fields) if hasattr(task_p.model.lm_tpl, name)}
    task_p.model.lm_tpl.set(**decoder)
    task_p.train.learner.set(opt_state_dtype=case.dtype, **fields)
    mesh = Mesh(np.array(devices).reshape(1, -1, 1), Small.MESH_AXIS_NAMES)
    partitioner = PjitPartitioner(mesh)
    shapes = batches.lm_input_specs(case.rows, case.seq)
    partitioner.setup(tasks_lib.build_task(task_p), shapes)
    step = partitioner.partition(step_fns.train_step, shapes, is_eval=False)
    start = time.monotonic()
    return step.lower(jax.eval_shape(jax.random.key, 0)).compile(), time.monotonic() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v5e:2x2")
    parser.add_argument("--dtype", default="float32")
    for name, default in {"layers": 16, "width": 1024, "vocab": 8192, "rows": 4, "seq": 512}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    case = parser.parse_args()
    devices = topologies.topology_devices(case.topology)
    print(f"{'states':>12} {'host MiB':>9} {'device args':>12} {'temporaries':>12} {'peak':>8} {'compile s':>10}")
    for kind in host_states.MEMORY_KINDS:
        compiled, seconds = compiled_step(case, devices, opt_state_memory_kind=kind)
        memory, mib = compiled.memory_analysis(), 2**20
        host = memory.host_argument_size_in_bytes
        print(
            f"{kind:>12} {host / mib:9.1f} {memory.argument_size_in_bytes / mib:12.1f} "
            f"{memory.temp_size_in_bytes / mib:12.1f} {(memory.peak_memory_in_bytes - host) / mib:8.1f} {seconds:10.1f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
