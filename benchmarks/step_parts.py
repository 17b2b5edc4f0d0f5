"""Compares a step of the training loop whose parts are measured (`health/step_parts.py`) with one without: wall and CPU time.

    python -m benchmarks.step_parts [--rounds 20] [--steps 25] [--json FILE]

Both are turns of one training run of `speed_lm.SpeedLm`, with the watch of the devices that jobs of several processes have. Bar:
1.01 times the step without.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax

from benchmarks import reporting, steady_step
from spmd_trainer.health.device_watch import DeviceWatch
from spmd_trainer.health.step_parts import StepParts
from spmd_trainer.programs import train
from spmd_trainer.programs.job import Job

BAR = 1.01


def nothing(*args: object) -> None:
    """Measures nothing."""
    del args


class TakingTurns:
    """Stands for the `StepParts` of a run: in turns one that measures and one that doesn't."""

    def __init__(self, job: Job, rounds: int, steps: int, warm_up: int):
        self._on = StepParts(DeviceWatch.of(job.partitioner.mesh.local_devices))
        self._steps, self._warm_up = steps, warm_up
        self._is_on = [on for _ in range(rounds) for on in random.sample((True, False), 2)]
        self._taken = 0
        self._began = steady_step.now()
        self.times = {True: steady_step.Turns(), False: steady_step.Turns()}
        self._use(on=True)

    def _use(self, *, on: bool) -> None:
        """Lends the methods that measure, or a function that doesn't, so that the loop calls them directly."""
        for name in ("begin", "took_input", "dispatching", "waits", "end"):
            setattr(self, name, getattr(self._on, name) if on else nothing)
        self._measures = on

    def reports(self, report: Callable[[int, Any], object]) -> Callable[[int, Any], object]:
        """Returns `report` with and without a clock, in turns."""
        on = self._on.reports(report)
        return lambda step, scalars: (on if self._measures else report)(step, scalars)

    def dispatched(self, step: int, packed: object) -> None:
        """Notes a step, and ends a turn where it is time to: the devices are idle then."""
        if self._measures:
            self._on.dispatched(step, packed)
        self._taken += 1
        turn, within = divmod(self._taken - self._warm_up, self._steps)
        if turn < 0 or within:
            return
        jax.block_until_ready(packed)
        if turn:
            self.times[self._is_on[turn - 1]].add(self._began, self._steps)
        if turn < len(self._is_on):
            self._use(on=self._is_on[turn])
        self._began = steady_step.now()

    def close(self) -> None:
        """Ends the watch."""
        self._on.close()


def main() -> int:
    """Measures and prints; returns the exit status."""
    parser = reporting.parser(__doc__, rounds=20)
    parser.add_argument("--steps", type=int, default=25, help="steps per turn")
    args = parser.parse_args()
    report = reporting.Report("step_parts", args.json)
    made: list[TakingTurns] = []

    def make(job: Job) -> TakingTurns:
        made.append(TakingTurns(job, args.rounds, args.steps, steady_step.WARM_UP))
        return made[0]

    with tempfile.TemporaryDirectory() as directory:
        job = steady_step.make_job(directory, steady_step.WARM_UP + 2 * args.rounds * args.steps + 1)
        with mock.patch.object(train, "_step_parts", make):
            train.train(job)
    on, off = made[0].times[True], made[0].times[False]
    report.figure("step, on", on.wall, "ms", scale=1e3)
    report.figure("step, off", off.wall, "ms", scale=1e3)
    report.ratio("step, on / off", on.wall, off.wall, bar=BAR)
    report.ratio("CPU time of a step, on / off", on.cpu, off.cpu, bar=BAR)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
