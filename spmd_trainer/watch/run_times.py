"""Keeps where the run's time goes in `run_times.jsonl`."""

from __future__ import annotations

import time

import jax

from spmd_trainer.callbacks.base import Callback, Run, Turn
from spmd_trainer.metrics.packing import Scalars
from spmd_trainer.metrics.run_times import RunTimesFile
from spmd_trainer.storage.run_files import has_run

# Summaries may be written at every step. The times are not: a kill may cost the record this many seconds, or this share of all.
_SECONDS_BETWEEN_LINES = 2.0
_SHARE_BETWEEN_LINES = 0.005


class TimeRecord(Callback):
    """Writes the times after each pause (the start, saves, evaluations, decodes), now and then with a summary, and at the end.

    A later start of a run notes at once that it has begun: until its first step, the last line would else say how the one
    before it has ended.

    The file stays small: within months of training it gets some thousand lines, besides those of the pauses.
    """

    turn = Turn.WRITES

    def __init__(self) -> None:
        self._file: RunTimesFile | None = None
        self._written = 0.0
        self._has_state = False
        self._ended = ""

    def on_open(self, run: Run) -> None:
        """Process 0 notes when the run began."""
        # Reading a field of a config costs as much as waking a thread, so it isn't done at every step.
        self._interval = run.task.train.summary_interval_steps
        if jax.process_index() == 0:
            began = time.time() - (time.monotonic() - run.began)
            self._file = RunTimesFile(run.job_log_dir, round(began, 3))
            # In a new directory there is nothing to contradict, and a start that is refused must leave nothing there.
            if has_run(run.job_log_dir):
                self._write(run)

    def on_start(self, run: Run) -> None:
        """Notes that the run has a state, and so a first step."""
        del run
        self._has_state = True

    def after_step(self, run: Run, step: int, scalars: Scalars) -> None:
        """Writes the times with a summary, if the last line is not too young."""
        del scalars
        if step % self._interval:
            return
        now = time.monotonic()
        if now - self._written >= max(_SECONDS_BETWEEN_LINES, _SHARE_BETWEEN_LINES * (now - run.began)):
            self._write(run)

    def after_pause(self, run: Run, step: int) -> None:
        """Writes the times."""
        del step
        self._write(run)

    def on_failure(self, run: Run, error: BaseException) -> None:
        """Writes the times and how the run has ended, unless `on_end` has done that."""
        run.times.begin("other")
        if self._written and not self._ended:  # else a new run did not get to its first step
            self._ended = run.end(error)
            self._write(run)

    def on_end(self, run: Run) -> None:
        """Writes the times and how the run has ended."""
        self._ended = run.end()
        self._write(run)

    def write_last(self, run: Run) -> None:
        """Writes the times once more if an end was written: now they have what came after it."""
        if self._ended:
            self._write(run)

    def _write(self, run: Run) -> None:
        if self._file is None:
            return
        self._written = time.monotonic()
        first_step = run.first_step if self._has_state else None
        self._file.write(run.times.seconds(), first_step, run.step, self._ended)


class LastTimes(Callback):
    """Lets a `TimeRecord` add what the page and the trackers have taken."""

    turn = Turn.LAST

    def __init__(self, record: TimeRecord) -> None:
        self._record = record

    def on_end(self, run: Run, error: BaseException | None = None) -> None:
        """Writes the times."""
        del error
        self._record.write_last(run)

    on_failure = on_end
