"""Fault injection: signals sent to a chain of jobs in one directory, and the checks that must hold after any fault."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import random
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping

import pytest
from etils import epath
from job_helpers import STATUS_LOST_PROCESS, RunningJob, Settings, losses, started, steps_on_disk

# Steps between evaluations. Every step is logged.
EVAL_INTERVAL = 10
# The first line that a job logs contains this name.
EXPERIMENT = "lm.stdlib.StdlibBytesTiny"
# When to send a signal: at a random time, at most this many seconds, after the first line that matches the pattern. `phase`
# finds out afterwards what the signal has hit.
MOMENTS = {
    "start": (EXPERIMENT, 3.0),
    "restore": (EXPERIMENT, 0.6),
    "train": ("training from step", 0.4),
    "save": ("saving step", 0.15),
    "evaluate": (r"step \d*0/", 0.4),
}
LONGEST_END_SECONDS = 45
# Mesh of a job by its number of processes; each has one device, or two. Global batches of `ROWS` rows are for all of them.
MESHES = {
    1: "replica:1,data:2,mdl:2",
    2: "replica:1,data:2,mdl:2",
    3: "replica:1,data:3,mdl:1",
    4: "replica:1,data:4,mdl:1",
    5: "replica:1,data:5,mdl:1",
    8: "replica:1,data:8,mdl:1",
}
ROWS = 120
# The last line of a job that ended cleanly, complete or after a signal.
ENDED = re.compile(r"(?:finished:|finished at|stopped at) step (\d+) of")


@dataclasses.dataclass
class Table:
    """The faults injected, by kind: how many were survived, how many were named as they must be, how many neither."""

    tried: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    processes: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    named: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    lost: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    notes: list[str] = dataclasses.field(default_factory=list)

    def report(self, kind: str, problems: list[str], processes: int, good: str = "survived") -> None:
        """Counts one fault in a job of `processes` processes, and prints it.

        Args:
          kind: of fault.
          problems: what went wrong; if it is empty, the fault counts as `good`.
          processes: of the job.
          good: 'survived': the run goes on as if nothing had been; 'named': the message says what and who it was.
        """
        self.tried[kind] += 1
        self.processes[processes] += 1
        self.lost[kind] += bool(problems)
        self.named[kind] += good == "named" and not problems
        self.notes += [f"{kind}: {problem}" for problem in problems]
        sys.stdout.write(f"{self.tried.total():4} {kind}, {processes} processes: {'; '.join(problems) or good}\n")
        sys.stdout.flush()

    @contextlib.contextmanager
    def naming(self, kind: str, processes: int) -> Iterator[None]:
        """Counts a fault as named if the assertions of the block hold, otherwise as lost."""
        try:
            yield
        except BaseException as error:
            self.report(kind, [(str(error).splitlines() or [type(error).__name__])[0]], processes)
            raise
        self.report(kind, [], processes, "named")

    def __str__(self) -> str:
        rows = [f"{'fault':44}{'tried':>7}{'survived':>10}{'named':>7}{'lost':>6}"]
        counts = [(k, n, self.named[k], self.lost[k]) for k, n in sorted(self.tried.items())]
        counts.append(("all", self.tried.total(), self.named.total(), self.lost.total()))
        rows += [f"{k:44}{n:7}{n - named - lost:10}{named:7}{lost:6}" for k, n, named, lost in counts]
        rows += [f"in jobs of {n} processes: {count}" for n, count in sorted(self.processes.items())]
        return "\n".join(rows + self.notes)


def phase(job: RunningJob) -> str:
    """Returns what a job is doing, judged by the first process's log and the checkpoints on disk."""
    log = job.logs[0]
    if "training from step" not in log:
        if "restored step" in log:
            return "compile"
        return "restore" if EXPERIMENT in log else "start"
    saving = re.findall(r"saving step (\d+)", log)
    if saving and int(saving[-1]) not in steps_on_disk(job.settings.directory):
        return "async save"
    taken, evaluated = re.findall(r"step (\d+)/", log), re.findall(r"eval heldout at step (\d+)", log)
    due = bool(taken) and int(taken[-1]) % EVAL_INTERVAL == 0 and taken[-1:] != evaluated[-1:]
    return "eval" if due and not ENDED.search(log) else "train"


class Chain:
    """One run that is interrupted repeatedly: each job continues from the checkpoints of the one before."""

    def __init__(
        self,
        settings: Settings,
        reference: dict[int, float],
        tolerance: float,
        seed: int,
        moments: Mapping[str, tuple[str, float]] = MOMENTS,
    ):
        """`reference` holds the losses of an uninterrupted run by step; `tolerance` is relative, 0 for exact equality."""
        self.settings = settings
        self.random = random.Random(seed)
        self._reference = reference
        self._tolerance = tolerance
        self._moments = moments

    @property
    def directory(self) -> epath.PathLike:
        """The run's directory."""
        return self.settings.directory

    def with_processes(self, count: int) -> Settings:
        """Returns the settings of the next job, with `count` processes."""
        mesh = MESHES[count] if self.settings.rows == ROWS else None
        return dataclasses.replace(self.settings, processes=count, mesh=mesh)

    def kill(self, processes: int, moment: str, number: signal.Signals = signal.SIGKILL) -> tuple[str, list[str]]:
        """Kills or stops one process of a job at a random time; returns the phase it was in and the problems found."""
        before = steps_on_disk(self.directory)
        with started(self.with_processes(processes)) as job:
            victim = self.random.randrange(processes)
            self._wait(job, moment)
            job.send(number, victim)
            killed, hit = time.monotonic(), phase(job)
            statuses = job.finish_but(victim)
            took = time.monotonic() - killed
            problems = self._after_kill(job, victim, statuses, took)
        return hit, problems + self._check(job, before)

    def terminate(self, processes: int, moment: str) -> tuple[str, list[str]]:
        """Sends SIGTERM to one process at a random time; returns the phase it was in and the problems found."""
        before = steps_on_disk(self.directory)
        with started(self.with_processes(processes)) as job:
            self._wait(job, moment)
            job.send(signal.SIGTERM, self.random.randrange(processes))
            hit = phase(job)
            statuses = job.finish()
        problems = [] if statuses == [0] * processes else [f"statuses {statuses}\n{job.log()}"]
        stopped = ENDED.findall(job.logs[0])
        if not stopped or int(stopped[0]) not in steps_on_disk(self.directory):
            problems.append(f"it stopped at step {stopped}, which is not saved; saved: {steps_on_disk(self.directory)}")
        return hit, problems + self._check(job, before)

    def _wait(self, job: RunningJob, moment: str) -> None:
        pattern, seconds = self._moments[moment]
        job.wait_for_line(pattern)
        time.sleep(self.random.uniform(0, seconds))

    def _after_kill(self, job: RunningJob, victim: int, statuses: list[int], took: float) -> list[str]:
        problems = []
        if took > LONGEST_END_SECONDS:
            problems.append(f"the others ended only after {took:.0f} s")
        for index, status in enumerate(statuses):
            if index == victim or (status == 0 and ENDED.search(job.logs[0])):
                continue
            if status != STATUS_LOST_PROCESS:
                problems.append(f"process {index} ended with status {status}\n{job.logs[index][-3000:]}")
            # A process that ends before all have joined has no name yet for the others but its id.
            if not re.search(rf"process {index} exits[^\n]*process(es)? [\d, ]*\b{victim}\b", job.logs[index]):
                problems.append(f"process {index} does not name process {victim}\n{job.logs[index][-3000:]}")
        return problems

    def _check(self, job: RunningJob, before: list[int]) -> list[str]:
        """Checks after any fault: no checkpoint is lost, the newest is restored, losses equal the uninterrupted run's."""
        problems, after = [], steps_on_disk(self.directory)
        if before and (not after or after[-1] < before[-1]):
            problems.append(f"checkpoints went back from {before} to {after}")
        restored = re.findall(r"restored step (\d+) from", job.logs[0])
        if before and restored and int(restored[0]) != before[-1]:
            problems.append(f"restored step {restored[0]} instead of {before[-1]}")
        if before and not restored and "training from step 0" in job.logs[0]:
            problems.append(f"began at step 0 although there were checkpoints {before}")
        curve = losses(self.directory)
        if not curve:
            return problems
        wrong = [s for s, loss in curve.items() if s in self._reference and loss != self.expected(s)]
        missing = sorted(set(range(1, max(curve) + 1)) - set(curve))
        if wrong or missing:
            problems.append(f"losses differ at steps {wrong[:5]} and are missing at steps {missing[:5]}")
        return problems

    def expected(self, step: int) -> object:
        """Returns the loss of the uninterrupted run at this step."""
        return pytest.approx(self._reference[step], rel=self._tolerance) if self._tolerance else self._reference[step]
