"""Compares a step of the training loop with the baseline's: wall and CPU time, host work, memory.

    python -m benchmarks.steady_step [--processes 7] [--rounds 5] [--steps 25] [--json FILE]

`training.train.train` runs `speed_lm.SpeedLm` as in a real job (compiled step, prefetcher, packing, reports, summaries), and
`baseline_lm.Baseline` runs the same model. Both run in one process and take turns of --steps steps, in random order; the devices
are idle at the end of each turn. The ratio varies by a few hundredths between processes, so several processes measure one
after another, and the median is over the rounds of all of them.

Bars: step time 1.03 times the baseline's; 300 microseconds of host work between two dispatches. Host work is the CPU time of
the loop's thread outside the call of the compiled step. It doesn't include waiting for devices. Releasing the arrays that the
last step used, which JAX makes every loop do, is reported separately. Memory: peak RSS of fresh processes of both programs, and
the state's bytes against what its shapes and shardings need.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import statistics
import sys
import tempfile
import time
from typing import Any
from unittest import mock

import jax
import numpy as np

from benchmarks import (
    baseline_lm,
    fresh_process,
    reporting,
    turns,
)  # baseline_lm sets up the host devices, so before JAX
from spmd_trainer.step.partitioner import Partitioner
from spmd_trainer.training import start_up, train
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import make_run_config

EXPERIMENT = "benchmarks.speed_lm.SpeedLm"
BAR_STEP, BAR_HOST_MICROSECONDS = 1.03, 300
# Unmeasured first steps of each program: they import the summary writer and use everything for the first time.
WARM_UP = 40


@dataclasses.dataclass
class Turns:
    """Wall seconds per step in each turn of one program, and CPU seconds of the whole process per step."""

    wall: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)

    def add(self, began: tuple[float, float], steps: int) -> None:
        """Records a turn of `steps` steps that ends now; `began` is what `now` returned at its start."""
        wall, cpu = now()
        self.wall.append((wall - began[0]) / steps)
        self.cpu.append((cpu - began[1]) / steps)


def now() -> tuple[float, float]:
    """Returns the wall and CPU clocks of this process, in seconds."""
    return time.perf_counter(), time.process_time()


class TakingTurns:
    """Wraps the trainer's compiled step: forwards each call, and runs the baseline's turns in between."""

    def __init__(self, fn: Any, baseline: baseline_lm.Baseline, rounds: int, steps: int, warm_up: int):
        """`fn` is the compiled step. Each program takes `rounds` turns of `steps` steps, after `warm_up` steps."""
        self._fn, self._baseline, self._steps, self._warm_up = fn, baseline, steps, warm_up
        self._baseline_is_first = [random.random() < 0.5 for _ in range(rounds)]
        self._taken = 0
        self._began = now()
        self._host_began: float | None = None
        self.trainer, self.baseline = Turns(), Turns()
        self.host: list[float] = []
        self.dispatch: list[float] = []
        self.release: list[float] = []
        self.state_bytes = 0
        self._used_up: Any = None

    def __call__(self, state: Any, *args: Any) -> Any:
        """Takes one step of the trainer."""
        host_ended = time.thread_time()
        if self._host_began is not None and self._taken > self._warm_up:
            self.host.append(host_ended - self._host_began)
        turn, within = divmod(self._taken - self._warm_up, self._steps)
        if turn >= 0 and within == 0:
            self._between_turns(state, turn)
        began = time.thread_time()
        self._used_up = None
        called = time.thread_time()
        result = self._fn(state, *args)
        # Held until the next call, so that releasing them isn't measured as host work.
        self._used_up = state, args
        self._host_began = time.thread_time()
        if self._taken > self._warm_up:
            self.release.append(called - began)
            self.dispatch.append(self._host_began - called)
        self._taken += 1
        return result

    def _between_turns(self, state: Any, turn: int) -> None:
        jax.block_until_ready(state)
        self.state_bytes = bytes_per_device(state)
        if turn:
            self.trainer.add(self._began, self._steps)
            if not self._baseline_is_first[turn - 1]:
                self._run_baseline()
        if turn < len(self._baseline_is_first) and self._baseline_is_first[turn]:
            self._run_baseline()
        self._began = now()

    def _run_baseline(self) -> None:
        began = now()
        self._baseline.run(self._steps)
        self.baseline.add(began, self._steps)


def make_job(directory: str, steps: int, overrides: tuple[str, ...] = (), mesh: Any = None) -> Job:
    """Returns a training job of SpeedLm for `steps` steps, without evaluation and checkpoints."""
    config = make_run_config(
        EXPERIMENT,
        directory,
        overrides=(f"task.train.num_train_steps={steps}", *overrides),
        eval_on_test=False,
        enable_checkpoint_saving=False,
        mesh=mesh,
    )
    return Job.build(config)


def seconds_to_compile(overrides: tuple[str, ...], mesh: Any) -> float:
    """Returns the seconds that the trainer takes to trace and compile its step. Arguments as in `make_job`."""
    with tempfile.TemporaryDirectory() as directory:
        job = make_job(directory, 1, overrides, mesh)
        started = time.perf_counter()
        start_up.compile_train_step(job)
        return time.perf_counter() - started


@dataclasses.dataclass(frozen=True)
class Taken:
    """Result of `take_turns`: the turns, the trainer's own compiled step, and its job."""

    turns: TakingTurns
    fn: Any
    job: Job


def take_turns(
    baseline: baseline_lm.Baseline,
    rounds: int,
    steps: int,
    *,
    overrides: tuple[str, ...] = (),
    mesh: Any = None,
    warm_up: int = WARM_UP,
) -> Taken:
    """Trains with the trainer and the baseline in turns.

    Args:
      baseline: the program to compare with.
      rounds: turns of each program.
      steps: steps per turn.
      overrides: overrides of the experiment's fields.
      mesh: as in `RunConfig.mesh`.
      warm_up: steps of each program before its first turn.

    Raises:
      SystemExit: the training run was interrupted before its last turn.
    """
    compile_as_it_is = start_up.compile_train_step
    found: list[tuple[TakingTurns, Any]] = []

    def compile_and_take_turns(job: Job) -> start_up.CompiledTrainStep:
        compiled = compile_as_it_is(job)
        turns = TakingTurns(compiled.fn, baseline, rounds, steps, warm_up)
        found.append((turns, compiled.fn))
        return dataclasses.replace(compiled, fn=turns)

    with tempfile.TemporaryDirectory() as directory:
        # One step more than is measured: a turn ends when the next one would begin.
        job = make_job(directory, warm_up + rounds * steps + 1, overrides, mesh)
        with mock.patch.object(start_up, "compile_train_step", compile_and_take_turns):
            baseline.run(warm_up)
            train.train(job)
    if len(found[0][0].trainer.wall) < rounds:
        raise SystemExit("the training run ended before its last turn: it was interrupted")
    return Taken(*found[0], job)


def bytes_per_device(state: Any) -> int:
    """Returns the bytes of a tree of arrays on the device that holds the most of it."""
    held: dict[int, int] = {}
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards:
            held[shard.device.id] = held.get(shard.device.id, 0) + shard.data.nbytes
    return max(held.values())


def needed_bytes_per_device(partitioner: Partitioner) -> float:
    """Returns the state's bytes per device by its logical shapes, dtypes and specs, as if all divided without padding."""
    total = 0.0
    mesh = partitioner.mesh
    for record in partitioner.metadata.records():
        splits = 1
        for entry in record.spec:
            for axis in (entry,) if isinstance(entry, str) else entry or ():
                splits *= mesh.shape[axis]
        size = jax.numpy.dtype(record.dtype).itemsize
        for dimension in record.logical_shape:
            size *= dimension
        total += size / splits
    return total


def measure_here(rounds: int, steps: int) -> dict[str, Any]:
    """Measures both programs in this process; returns JSON values for `report_turns` and `report_memory`."""
    baseline = baseline_lm.Baseline(baseline_lm.SPEED, baseline_lm.declared_mesh())
    taken = take_turns(baseline, rounds, steps)
    turns = taken.turns
    temporaries = {"trainer": taken.fn, "baseline": baseline.compiled}
    return {
        "wall": {"trainer": turns.trainer.wall, "baseline": turns.baseline.wall},
        "cpu": {"trainer": turns.trainer.cpu, "baseline": turns.baseline.cpu},
        "loop": {"host": turns.host, "release": turns.release, "dispatch": turns.dispatch},
        "bytes": {
            "state, trainer": turns.state_bytes,
            "state, as shapes and shardings need": needed_bytes_per_device(taken.job.partitioner),
            "state, baseline": bytes_per_device(baseline.state),
            **{f"temporaries, {k}": v.memory_analysis().temp_size_in_bytes for k, v in temporaries.items()},
        },
    }


def report_turns(report: reporting.Report, parts: list[dict[str, Any]]) -> None:
    """Reports step time and host work over all processes."""

    def together(kind: str, name: str) -> list[float]:
        return [value for part in parts for value in part[kind][name]]

    for name in ("trainer", "baseline"):
        report.figure(f"step, {name}", together("wall", name), "ms", scale=1e3)
    report.ratio("step, trainer / baseline", together("wall", "trainer"), together("wall", "baseline"), bar=BAR_STEP)
    report.ratio("CPU time of a step, trainer / baseline", together("cpu", "trainer"), together("cpu", "baseline"))
    host = together("loop", "host")
    report.figure("host work between dispatches", host, "microseconds", scale=1e6)
    report.figure("releasing the last state and batch", together("loop", "release"), "microseconds", scale=1e6)
    report.figure("dispatch", together("loop", "dispatch"), "microseconds", scale=1e6)
    if reporting.quartiles(host)["median"] * 1e6 > BAR_HOST_MICROSECONDS:
        report.fails(f"host work is above {BAR_HOST_MICROSECONDS} microseconds")


def report_memory(report: reporting.Report, part: dict[str, Any]) -> None:
    """Reports the bytes per device of state and temporaries."""
    for name, value in part["bytes"].items():
        report.figure(name, value / 2**20, "MiB per device")


def report_rss(report: reporting.Report, rounds: int) -> None:
    """Reports the peak memory of fresh processes."""
    steps = 2 * WARM_UP
    peaks: dict[str, list[float]] = {"trainer": [], "baseline": []}
    for _ in range(rounds):
        for name in random.sample(list(peaks), 2):
            peaks[name].append(fresh_process.run(name, steps=steps).peak_rss)
    for name, values in peaks.items():
        report.figure(f"peak RSS, {name}", values, "MiB", scale=2**-20)
    report.ratio("peak RSS, trainer / baseline", peaks["trainer"], peaks["baseline"])


def main() -> int:
    """Measures and prints; returns the exit status."""
    parser = reporting.parser(__doc__, rounds=5)
    parser.add_argument("--steps", type=int, default=25, help="steps per turn")
    parser.add_argument(
        "--processes",
        type=int,
        default=7,
        help="measuring processes; 0: measure in this one and write raw numbers to --json",
    )
    parser.add_argument("--rss_rounds", type=int, default=3, help="pairs of fresh processes; 0 for none")
    args = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if not args.processes:
        if not args.json:
            parser.error("--processes=0 needs --json=FILE, the file for this process's numbers")
        args.json.write_text(json.dumps(measure_here(args.rounds, args.steps)))
        return 0
    report = reporting.Report("steady_step", args.json)
    options = [f"--rounds={args.rounds}", f"--steps={args.steps}"]
    parts = [turns.measure_in_process("steady_step", options) for _ in range(args.processes)]
    report_turns(report, parts)
    report.note("ratio of each process", [statistics.median(np.divide(*part["wall"].values())) for part in parts])
    report_memory(report, parts[0])
    if args.rss_rounds:
        report_rss(report, args.rss_rounds)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
