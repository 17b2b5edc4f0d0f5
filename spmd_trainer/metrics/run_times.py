"""Where a run's time goes: seconds per part of each start of the run, kept in `run_times.jsonl`."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence

from absl import logging
from etils import epath

from spmd_trainer.storage.append import GrowingFile, open_append, read_joined

TIMES_FILE = "run_times.jsonl"
PARTS = ("start", "compile", "input", "step", "save", "evaluation", "decode", "other")
# How a start of a run can end, as far as it can tell.
ENDS = ("finished", "stopped", "failed")


class RunTimes:
    """Adds up the seconds that a process spends on each part of a run. It is in one part at any time.

    `begin` costs a clock's reading and an addition, so that a training loop can call it at every step.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        """Begins with 'start'.

        Args:
          clock: returns the time in seconds, as `time.monotonic`.
        """
        self._clock = clock
        self._seconds = dict.fromkeys(PARTS, 0.0)
        # One attribute, so that another thread sees a part and its own beginning.
        self._current = ("start", clock())

    @property
    def current(self) -> tuple[str, float]:
        """The part in progress, and when it began, by the clock. Any thread may ask."""
        return self._current

    def begin(self, part: str) -> float:
        """Ends one part and begins the next, one of `PARTS`.

        Returns:
          The time at which it began, by the clock.

        Raises:
          KeyError: there is no such part.
        """
        now = self._clock()
        before, since = self._current
        self._seconds[before] += now - since
        self._seconds[part] += 0.0
        self._current = (part, now)
        return now

    def seconds(self) -> dict[str, float]:
        """Returns {part: seconds so far}, the part in progress included. Any thread may ask."""
        seconds, (part, since) = dict(self._seconds), self._current
        seconds[part] += self._clock() - since
        return seconds


@dataclasses.dataclass(frozen=True)
class StartTimes:
    """What one start of a run has taken so far.

    Attributes:
      start: when it began, in seconds since 1970; it tells the starts of a run apart.
      seconds: {part: seconds}, of all `PARTS`.
      first_step: the step of the state that it began with.
      step: the step that it has reached.
      time: when this was noted, in seconds since 1970.
      ended: how it ended, one of `ENDS`; '' while it goes on, and if it was killed.
      starting: True until its state is restored or initialised. Its steps are then those that the start before has reached.
    """

    start: float
    seconds: Mapping[str, float]
    first_step: int
    step: int
    time: float
    ended: str = ""
    starting: bool = False

    @property
    def steps(self) -> int:
        """The steps that it has taken."""
        return self.step - self.first_step

    @property
    def total(self) -> float:
        """Seconds of all parts."""
        return math.fsum(self.seconds.values())


class RunTimesFile:
    """Appends what a start of a run has taken to the run's `run_times.jsonl`. Only process 0 may use it."""

    def __init__(self, job_log_dir: epath.Path, start: float):
        """Writes nothing yet.

        Args:
          job_log_dir: the run's directory.
          start: see `StartTimes`.
        """
        self._path = job_log_dir / TIMES_FILE
        self._start = start
        self._file: GrowingFile | None = None
        self._has_failed = False

    def write(self, seconds: Mapping[str, float], first_step: int, step: int, ended: str = "") -> None:
        """Appends a line. If that fails, logs a warning once: times are no reason to end a run.

        Args:
          seconds: see `RunTimes.seconds`.
          first_step, step, ended: see `StartTimes`.
        """
        self._append(seconds, {"steps": step - first_step, "first_step": first_step, "step": step}, ended)

    def write_starting(self, seconds: Mapping[str, float], ended: str = "") -> None:
        """Appends a line of a start that has no state yet, as `write` does.

        Args:
          seconds: see `RunTimes.seconds`.
          ended: see `StartTimes`.
        """
        self._append(seconds, {"starting": True}, ended)

    def _append(self, seconds: Mapping[str, float], steps: Mapping[str, int], ended: str) -> None:
        line = {
            "start": self._start,
            "seconds": {part: round(value, 3) for part, value in seconds.items()},
            **steps,
            "time": round(time.time(), 3),
            **({"ended": ended} if ended else {}),
        }
        try:
            if self._file is None:
                self._file = open_append(self._path, attempts=1)
            self._file.write(json.dumps(line).encode() + b"\n")
            if ended:
                self._file.flush()
        except Exception as error:  # object stores have errors of their own
            if not self._has_failed:
                self._has_failed = True
                logging.warning("can't write %s: %s", self._path, error)


def read_run_times(job_log_dir: epath.PathLike) -> list[StartTimes]:
    """Reads what the starts of a run have taken.

    Returns:
      The last record of each start, the earliest start first; empty if there is no record. Lines that can't be read, such as
      one that was cut short by a kill, are left out.
    """
    last: dict[float, StartTimes] = {}
    reached = 0
    for line in read_joined(epath.Path(job_log_dir) / TIMES_FILE).splitlines():
        try:
            record = json.loads(line)
            starting = record.get("starting") is True
            found = StartTimes(
                start=float(record["start"]),
                seconds={part: float(record["seconds"].get(part, 0.0)) for part in PARTS},
                first_step=reached if starting else int(record["first_step"]),
                step=reached if starting else int(record["step"]),
                time=float(record["time"]),
                ended=str(record.get("ended", "")),
                starting=starting,
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            continue
        if math.isfinite(found.total + found.time + found.start):
            last[found.start] = found
            reached = found.step
    return [last[start] for start in sorted(last)]


@dataclasses.dataclass(frozen=True)
class Goodput:
    """How much of a run's time went into steps that count.

    Attributes:
      seconds: time of all starts together, without the time between them.
      productive: seconds of steps whose result the run has kept.
      redone: seconds of steps that a later start took again, from an earlier checkpoint.
      redone_steps: the number of those steps.
      away: seconds between the last record of each start and the beginning of the next one.
    """

    seconds: float
    productive: float
    redone: float
    redone_steps: int
    away: float

    @property
    def share(self) -> float:
        """`productive` as a part of `seconds`; 0 for a run that has just begun."""
        return self.productive / self.seconds if self.seconds else 0.0


def goodput(records: Sequence[StartTimes]) -> Goodput:
    """Returns how much of a run's time went into steps that count.

    Args:
      records: those of `read_run_times`.
    """
    productive = redone = away = 0.0
    redone_steps = 0
    for index, record in enumerate(records):
        later = records[index + 1 :]
        lost = max(0, record.step - min((one.first_step for one in later), default=record.step))
        lost = min(lost, record.steps)
        share = lost / record.steps if record.steps else 0.0
        redone_steps += lost
        redone += record.seconds["step"] * share
        productive += record.seconds["step"] * (1.0 - share)
        if later:
            away += max(0.0, later[0].start - record.time)
    return Goodput(math.fsum(record.total for record in records), productive, redone, redone_steps, away)
