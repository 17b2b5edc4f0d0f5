"""Faults on purpose: what is done to a chain of jobs in one directory, and what must hold whatever it was."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import random
import re
import signal
import time

import pytest
from job_helpers import STATUS_LOST_PROCESS, RunningJob, Settings, losses, started, steps_on_disk

# Where in a run a signal falls: a random time after the first of these lines. Between them they cover starting,
# restoring, training, saving in the background, evaluating.
MOMENTS = {
    "start": "experiment lm.stdlib",
    "restore": "experiment lm.stdlib",
    "train": "training from step",
    "save": "saving step",
    "evaluate": "eval heldout at step",
}
# Statuses of the processes that weren't killed: told by the watch, told by JAX' service, or failed at the broken
# connection before either.
ENDED_BY_LOSS = (STATUS_LOST_PROCESS, -signal.SIGABRT, 1)
LONGEST_END_SECONDS = 45


@dataclasses.dataclass
class Table:
    """What was tried, by kind of fault, and what came of it."""

    tried: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    lost: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    notes: list[str] = dataclasses.field(default_factory=list)

    def add(self, kind: str, problems: list[str]) -> None:
        """Counts one fault; it survived when there are no problems."""
        self.tried[kind] += 1
        self.lost[kind] += bool(problems)
        self.notes += [f"{kind}: {problem}" for problem in problems]

    def __str__(self) -> str:
        rows = [f"{'fault':34}{'tried':>7}{'survived':>10}{'lost':>6}"]
        rows += [f"{k:34}{n:7}{n - self.lost[k]:10}{self.lost[k]:6}" for k, n in sorted(self.tried.items())]
        rows.append(f"{'all':34}{self.tried.total():7}{self.tried.total() - self.lost.total():10}{self.lost.total():6}")
        return "\n".join(rows + self.notes)


class Chain:
    """One run, interrupted again and again: each job goes on from what the last one left."""

    def __init__(self, settings: Settings, reference: dict[int, float], tolerance: float, seed: int):
        """`reference` are the losses of an uninterrupted run."""
        self.settings = settings
        self.random = random.Random(seed)
        self._reference = reference
        self._tolerance = tolerance

    @property
    def directory(self) -> pathlib.Path:
        """The run's directory."""
        return self.settings.directory

    def with_processes(self, count: int) -> Settings:
        """The next job, with so many processes."""
        return dataclasses.replace(self.settings, processes=count)

    def kill(self, processes: int, moment: str) -> list[str]:
        """Kills one process of a job at a random time; returns what is not as it should be."""
        before = steps_on_disk(self.directory)
        with started(self.with_processes(processes)) as job:
            victim = self.random.randrange(processes)
            self._wait(job, moment)
            job.send(signal.SIGKILL, victim)
            killed = time.monotonic()
            statuses = job.finish()
            took = time.monotonic() - killed
            problems = self._after_kill(job, victim, statuses, took)
        return problems + self._check(job, before)

    def terminate(self, processes: int, moment: str) -> list[str]:
        """Sends SIGTERM to one process at a random time; returns what is not as it should be."""
        before = steps_on_disk(self.directory)
        with started(self.with_processes(processes)) as job:
            self._wait(job, moment)
            job.send(signal.SIGTERM, self.random.randrange(processes))
            statuses = job.finish()
        problems = [] if statuses == [0] * processes else [f"statuses {statuses}\n{job.log()}"]
        stopped = re.findall(r"stopped after step (\d+) of", job.logs[0])
        if not stopped or int(stopped[0]) not in steps_on_disk(self.directory):
            problems.append(
                f"the step it stopped at, {stopped}, is not saved; there are {steps_on_disk(self.directory)}"
            )
        return problems + self._check(job, before)

    def _wait(self, job: RunningJob, moment: str) -> None:
        job.wait_for_line(MOMENTS[moment])
        time.sleep(self.random.uniform(0, 3.0 if moment in ("start", "restore") else 0.6))

    def _after_kill(self, job: RunningJob, victim: int, statuses: list[int], took: float) -> list[str]:
        problems = []
        if took > LONGEST_END_SECONDS:
            problems.append(f"the others ended only after {took:.0f} s")
        for index, status in enumerate(statuses):
            if index == victim or (status == 0 and "stopped after step" in job.logs[0]):
                continue
            if status not in ENDED_BY_LOSS:
                problems.append(f"process {index} ended with status {status}\n{job.logs[index][-3000:]}")
            named = f"because process {victim} (" in job.logs[index] or (
                victim == 0 and "leader task" in job.logs[index]
            )
            if not named and not re.search(rf"unhealthy[^\n]*\n.*\b{victim}\b", job.logs[index]):
                problems.append(f"process {index} does not name process {victim}\n{job.logs[index][-3000:]}")
        return problems

    def _check(self, job: RunningJob, before: list[int]) -> list[str]:
        """What holds after any fault: no checkpoint is lost, the newest was taken, the curve is the uninterrupted one."""
        problems, after = [], steps_on_disk(self.directory)
        if before and (not after or after[-1] < before[-1]):
            problems.append(f"checkpoints went back from {before} to {after}")
        restored = re.findall(r"restored step (\d+) from", job.logs[0])
        if before and restored and int(restored[0]) != before[-1]:
            problems.append(f"restored step {restored[0]} instead of {before[-1]}")
        if before and not restored and "training from step 0" in job.logs[0]:
            problems.append(f"began at step 0 in spite of {before}")
        if not (self.directory / "summaries" / "train" / "metrics.jsonl").exists():
            return problems
        curve = losses(self.directory)
        wrong = [s for s, loss in curve.items() if s in self._reference and loss != self.expected(s)]
        missing = sorted(set(range(1, max(curve) + 1)) - set(curve))
        if wrong or missing:
            problems.append(f"losses differ at {wrong[:5]} and lack {missing[:5]}")
        return problems

    def expected(self, step: int) -> object:
        """The loss that an uninterrupted run has at this step."""
        return pytest.approx(self._reference[step], rel=self._tolerance) if self._tolerance else self._reference[step]
