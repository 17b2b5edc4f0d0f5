"""Records in `run_times.jsonl` how many seconds each launch of a run has spent on each part of the work.

A launch is the time from one start of the run to its end, failure or kill. A restarted run has several launches.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Mapping, Sequence

import jax
from absl import logging
from etils import epath

from spmd_trainer.callbacks import PARTS, Callback, Run, Turn
from spmd_trainer.step.packing import Scalars
from spmd_trainer.storage import json_values
from spmd_trainer.storage.append import GrowingFile, open_append, read_joined
from spmd_trainer.storage.run_files import has_run

TIMES_FILE = "run_times.jsonl"
# How a launch of a run can end, if it is not killed.
ENDS = ("finished", "stopped", "failed")
# At a step with summaries, times are written if the last line is older than these seconds and than this share of the run's time.
_SECONDS_BETWEEN_LINES = 2.0
_SHARE_BETWEEN_LINES = 0.005


class TimeRecord(Callback):
    """Writes the times of this launch of the run to `run_times.jsonl`: after each pause (start, save, evaluation, decode), at
    some of the steps with a summary, and at the end.

    A restarted run also writes a line at once, because until its first step, the last line would still be the previous launch's.

    Attributes:
      ended: how this launch has ended, one of `ENDS`; '' while it runs.
    """

    turn = Turn.WRITES

    def __init__(self) -> None:
        self._file: RunTimesFile | None = None
        self._written = 0.0
        self._has_state = False
        self.ended = ""

    def on_open(self, run: Run) -> None:
        """Prepares the file on process 0, and writes the first line of a restarted run."""
        # Reading a field of a config costs as much as waking a thread, so it isn't done at every step.
        self._interval = run.task.train.summary_interval_steps
        if jax.process_index() == 0:
            began = time.time() - (time.monotonic() - run.began)
            self._file = RunTimesFile(run.job_log_dir, round(began, 3))
            # A new directory has no line of a previous launch, and a launch that is refused must leave nothing there.
            if has_run(run.job_log_dir):
                self.write(run)

    def on_start(self, run: Run) -> None:
        """Notes that the state is restored or initialized. From now on, the lines have step numbers."""
        del run
        self._has_state = True

    def after_step(self, run: Run, step: int, scalars: Scalars) -> None:
        """Writes the times if the step has a summary and the last line is old enough."""
        del scalars
        if step % self._interval:
            return
        now = time.monotonic()
        if now - self._written >= max(_SECONDS_BETWEEN_LINES, _SHARE_BETWEEN_LINES * (now - run.began)):
            self.write(run)

    def after_pause(self, run: Run, step: int) -> None:
        del step
        self.write(run)

    def on_failure(self, run: Run, error: BaseException) -> None:
        """Writes the times and how the run has ended, unless `on_end` has written them."""
        run.times.begin("other")
        if self._written and not self.ended:  # else a new run did not get to its first step
            self.ended = run.end(error)
            self.write(run)

    def on_end(self, run: Run) -> None:
        self.ended = run.end()
        self.write(run)

    def write(self, run: Run) -> None:
        """Writes the times so far. Only process 0 writes."""
        if self._file is None:
            return
        self._written = time.monotonic()
        first_step = run.first_step if self._has_state else None
        self._file.write(run.times.seconds(), first_step, run.step, self.ended)


class LastTimes(Callback):
    """Makes a `TimeRecord` write the times once more at the very end, including the time for the run's page and trackers."""

    turn = Turn.LAST

    def __init__(self, record: TimeRecord) -> None:
        self._record = record

    def on_end(self, run: Run, error: BaseException | None = None) -> None:
        del error
        if self._record.ended:
            self._record.write(run)

    on_failure = on_end


@dataclasses.dataclass(frozen=True)
class StartTimes:
    """Times of one launch of a run, from the launch's last record. A restarted run has several launches.

    Attributes:
      start: when this launch began, in seconds since 1970. Identifies the launch.
      seconds: {part: seconds spent on this part of the work}, for all `callbacks.PARTS`.
      first_step: step of the state that this launch restored or initialized.
      time: time of the record, in seconds since 1970.
      ended: how this launch ended, one of `ENDS`; '' while it runs, and if it was killed.
      starting: True until the state is restored or initialized. Until then, `first_step` and `step` are the last step of the
        previous launch.
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
        """Number of steps that this launch has taken."""
        return self.step - self.first_step

    @property
    def total(self) -> float:
        """Total seconds of all parts of the work."""
        return math.fsum(self.seconds.values())


class RunTimesFile:
    """Appends the times of a launch to the run's `run_times.jsonl`. Only process 0 may use it."""

    def __init__(self, job_log_dir: epath.Path, start: float):
        """`start`: when this launch of the run began, in seconds since 1970. The first write creates the file."""
        self._path = job_log_dir / TIMES_FILE
        self._start = start
        self._file: GrowingFile | None = None
        self._has_failed = False

    def write(self, seconds: Mapping[str, float], first_step: int | None, step: int = 0, ended: str = "") -> None:
        """Appends a line. If this fails, logs a warning at the first failure.

        Args:
          seconds: see `RunTimes.seconds`.
          first_step, step, ended: see `StartTimes`. `first_step` is None until the state is restored or initialized.
        """
        steps: dict[str, int] = {"starting": True}
        if first_step is not None:
            steps = {"steps": step - first_step, "first_step": first_step, "step": step}
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
    """Returns the last record of each launch of a run, earliest launch first. Skips unreadable lines, e.g. incomplete ones."""
    last: dict[float, StartTimes] = {}
    reached = 0
    for line in read_joined(epath.Path(job_log_dir) / TIMES_FILE).splitlines():
        try:
            record = json_values.parse_object(line)
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
    """How much of a run's time was spent on training steps whose results the run has kept.

    Attributes:
      seconds: total time of all launches, without the time between launches.
      productive: seconds spent on steps whose results the run has kept.
      redone: seconds spent on steps that a later launch repeated from an earlier checkpoint.
      redone_steps: number of steps that were repeated.
      away: total seconds between the last record of each launch and the beginning of the next launch.
    """

    seconds: float
    productive: float
    redone: float
    redone_steps: int
    away: float

    @property
    def share(self) -> float:
        """`productive` / `seconds`; 0 for a run that has just begun."""
        return self.productive / self.seconds if self.seconds else 0.0


def goodput(records: Sequence[StartTimes]) -> Goodput:
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
