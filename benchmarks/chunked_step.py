"""Compares a training step with chunked attention with the same step with praxis' own attention: time and memory.

    python -m benchmarks.chunked_step [--processes 3] [--rounds 5] [--steps 2] [--json FILE]

The experiment is `lm.cloud.LmCloudSpmd` in a small size (2 layers of 4 heads of 32, logits capped, layers rematerialised) on 8
host devices, mesh (replica, data, mdl) = (1, 4, 2), with packed rows. Both programs start from the same variables, get the same
batch and take turns of --steps steps; their losses must agree.

Bars: at 1,024 tokens the step takes at most 1.05 times as long; at 8,192 tokens the compiled step needs at most a tenth of the
temporary memory.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import jax
import numpy as np
from praxis.py_utils import NestedMap

from benchmarks import reporting, turns
from spmd_trainer import tasks_lib
from spmd_trainer.experiments.lm import cloud
from spmd_trainer.step import step_fns
from spmd_trainer.step.pjit import PjitPartitioner
from spmd_trainer.tasks.lm.attention import use_fused_attention_in

CHUNKED, PRAXIS = "chunked", "praxis"
ROWS, VOCAB, STEP_TOKENS, MEMORY_TOKENS = 4, 256, 1024, 8192
BAR_STEP, BAR_MEMORY = 1.05, 0.1
KEY = jax.random.key(0)


class Small(cloud.LmCloudSpmd):
    """The experiment in the benchmark's size."""

    NUM_LAYERS = 2
    MODEL_DIMS = 128
    HIDDEN_DIMS = 512
    DIMS_PER_HEAD = 32
    VOCAB_SIZE = VOCAB
    FPROP_DTYPE = np.float32
    ICI_MESH_SHAPE = (1, 4, 2)


def batch(tokens: int) -> NestedMap:
    """Returns random tokens in the form of a text input; rows hold segments of a quarter of the row."""
    ids = np.random.default_rng(0).integers(0, VOCAB, (ROWS, tokens), dtype=np.int32)
    index = np.broadcast_to(np.arange(tokens, dtype=np.int32), ids.shape)
    segment = tokens // 4
    return NestedMap(
        ids=ids,
        labels=np.roll(ids, -1, axis=1),
        weights=np.ones(ids.shape, np.float32),
        paddings=np.zeros(ids.shape, np.float32),
        segment_ids=index // segment + 1,
        segment_pos=index % segment,
    )


def partitioned_step(attention: str, tokens: int) -> tuple[PjitPartitioner, Any]:
    """Returns a partitioner and its train step for rows of `tokens` tokens."""
    experiment = type("Sized", (Small,), {"MAX_SEQ_LEN": tokens})()
    task_p = experiment.task()
    if attention == CHUNKED:
        use_fused_attention_in(task_p.model, "chunked")
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch(tokens))
    partitioner = PjitPartitioner()
    partitioner.setup(tasks_lib.build_task(task_p), shapes)
    return partitioner, partitioner.partition(step_fns.train_step, shapes, is_eval=False)


def make_program(attention: str) -> turns.Program:
    """Returns the step on rows of `STEP_TOKENS` tokens."""
    partitioner, step = partitioned_step(attention, STEP_TOKENS)
    inputs = partitioner.layout.put(batch(STEP_TOKENS))
    held = {"state": partitioner.initialize_train_state(KEY)}

    def take() -> None:
        held["state"], held["output"] = step(held["state"], KEY, inputs)

    return turns.Program(take, lambda: held["output"].loss)


def temporaries(attention: str) -> int:
    """Returns the bytes of temporary memory per device of the compiled step on rows of `MEMORY_TOKENS` tokens."""
    _, step = partitioned_step(attention, MEMORY_TOKENS)
    lowered = step.lower(KEY)
    return lowered.compile().memory_analysis().temp_size_in_bytes


def take_turns(rounds: int, steps: int) -> dict[str, Any]:
    """Lets both programs take turns; returns wall and CPU seconds per step of each turn, and the last losses."""
    programs = {name: make_program(name) for name in (CHUNKED, PRAXIS)}
    taken: dict[str, Any] = {clock: {name: [] for name in programs} for clock in ("wall", "cpu")}
    for number in range(rounds + 1):  # the first round compiles, and is not counted
        for name in sorted(programs, reverse=bool(number % 2)):
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(steps):
                programs[name].step()
            taken.setdefault("losses", {})[name] = float(programs[name].loss())
            if number:
                taken["wall"][name].append((time.perf_counter() - wall) / steps)
                taken["cpu"][name].append((time.process_time() - cpu) / steps)
    return taken


def main() -> int:
    """Measures and prints; returns the exit status."""
    parser = reporting.parser(__doc__, rounds=5)
    parser.add_argument("--steps", type=int, default=2, help="steps per turn")
    parser.add_argument(
        "--processes", type=int, default=3, help="measuring processes; 0: measure in this one, for --json"
    )
    args = parser.parse_args()
    if not args.processes:
        if not args.json:
            parser.error("--processes=0 needs --json=FILE, the file for this process's numbers")
        args.json.write_text(json.dumps(take_turns(args.rounds, args.steps)))
        return 0
    report = reporting.Report("chunked_step", args.json)
    options = [f"--rounds={args.rounds}", f"--steps={args.steps}"]
    parts = [turns.measure_in_process("chunked_step", options) for _ in range(args.processes)]
    for clock, what in (("wall", "step"), ("cpu", "CPU time of a step")):
        seconds = {name: [value for part in parts for value in part[clock][name]] for name in (CHUNKED, PRAXIS)}
        for name, values in seconds.items():
            report.figure(f"{what}, {name}", values, "ms", scale=1e3)
        report.ratio(f"{what}, {CHUNKED} / {PRAXIS}", seconds[CHUNKED], seconds[PRAXIS], bar=BAR_STEP)
    ratios = [statistics.median(np.divide(part["cpu"][CHUNKED], part["cpu"][PRAXIS])) for part in parts]
    report.note("ratio of CPU times of each process", ", ".join(f"{ratio:.3f}" for ratio in ratios))
    losses = parts[0]["losses"]
    if not np.isclose(losses[CHUNKED], losses[PRAXIS], rtol=1e-3):
        report.fails(f"the programs don't do the same work: losses {losses}")
    needed = {name: temporaries(name) for name in (CHUNKED, PRAXIS)}
    for name, value in needed.items():
        report.figure(f"temporaries at {MEMORY_TOKENS:,} tokens, {name}", value / 2**20, "MiB per device")
    report.ratio("temporaries, chunked / praxis", [needed[CHUNKED]], [needed[PRAXIS]], bar=BAR_MEMORY)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
