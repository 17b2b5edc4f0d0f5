"""Reports a run that makes no progress: which processes are behind, and their Python stacks. Ends such a run (--hang_seconds)."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping

from absl import logging
from etils import epath

from spmd_trainer import multihost
from spmd_trainer.callbacks import Callback, Run, Turn
from spmd_trainer.errors import UserError
from spmd_trainer.sharding.messages import format_duration
from spmd_trainer.step.packing import Scalars
from spmd_trainer.storage.append import open_append
from spmd_trainer.storage.run_files import LOGS
from spmd_trainer.training.callback_list import within
from spmd_trainer.training.live_status import live
from spmd_trainer.watch import link
from spmd_trainer.watch.board import Board, Digest
from spmd_trainer.watch.stacks import LONGEST, HeldInterpreter, stacks
from spmd_trainer.watch.stuck import DEVICES, OTHERS, OTHERS_INPUT, Beat

# A process that has sent no beat (heartbeat) for this long is stopped, or C code holds its interpreter. Less than half of
# --heartbeat_seconds (30), so that the warning that comes after half of that time can say where the process was.
_SILENT_SECONDS = 10.0
# Up to this many processes send a beat per second each. More processes send fewer beats, so that process 0 can read all of them.
_BEATS_A_SECOND = 128
# Minimum number of checks within the shortest time limit.
_CHECKS = 10
# Until the first step is done, --hang_seconds is multiplied by this: the step is compiled, and files are read for the first time.
_FIRST_STEP = 4
# Maximum seconds for all the last work of a hanging process.
_LAST_SECONDS = 90.0
_LOGS_SECONDS = 10.0
# After this many periods between beats, all processes have read the same digest.
_TURNS = 4


class HangError(UserError):
    """No process of the run has made progress for --hang_seconds."""

    exit_status = link.STATUS_HANG


class Watchdog(Callback):
    """Sends this process's beats (heartbeats), and watches those of all processes, in threads from `on_open` to the run's end."""

    turn = Turn.FIRST

    def __init__(
        self,
        seconds: float = 600.0,
        *,
        hang_seconds: float = 0.0,
        window: Callable[[], Mapping[str, object] | None] = lambda: None,
        report: Callable[[str], object] = logging.error,
        job: link.JobLink = link.job,
    ):
        """Stores the arguments; `on_open` starts the threads.

        Args:
          seconds: a report is made when no process has made progress for this many seconds, and again after 2, 4, 8, ... times
            this many seconds without progress. 0: no reports.
          hang_seconds: seconds without progress after which the process exits with `link.STATUS_HANG`; 0 for never. Before the
            first step, the limit is `_FIRST_STEP` times as long.
          window: returns the times of this process's last steps, for `slow.judge`; see `StepParts.window`. Called by any thread.
          report: function that is called with the text of each report.
          job: the link through which this process leaves its job.

        Raises:
          ValueError: `seconds` or `hang_seconds` is negative.
        """
        for name, value in (("watchdog_seconds", seconds), ("hang_seconds", hang_seconds)):
            if value < 0:
                raise ValueError(f"{name}={value}; give a number of seconds, or 0 to switch it off")
        self._seconds, self._hang_seconds = seconds, hang_seconds
        self._report, self._job = report, job
        self._window = window
        self._next = seconds
        self._count, self._index = 1, 0
        self._finished = 0
        self._period = 0.0
        # Seconds until this process ends itself.
        self._left = hang_seconds or math.inf
        self._numbers = itertools.count(1)
        self._board: Board | None = None
        self._held: HeldInterpreter | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def on_open(self, run: Run) -> None:
        limits = [limit for limit in (self._seconds, self._hang_seconds) if limit]
        if not limits:
            return
        self._count, self._index = multihost.joined()
        self._period = period = min(max(1.0, self._count / _BEATS_A_SECOND), min(limits) / _CHECKS)
        self._board = Board(
            multihost.client(),
            self._index,
            self._count,
            lambda: self._beat(run),
            period=period,
            silent_after=max(_SILENT_SECONDS, 5 * period),
        )
        self._job.last_beat = self._board.last_beat
        self._thread = threading.Thread(target=self._watch, args=(run, self._board), name="watchdog", daemon=True)
        self._board.start()
        self._thread.start()

    def on_start(self, run: Run) -> None:
        """Begins to write Python stacks to the run's directory whenever C code holds the interpreter for too long."""
        if self._board is None:
            return
        try:
            self._held = HeldInterpreter(_file(run, self._index), _SILENT_SECONDS)
        except OSError as error:
            logging.warning("stacks of a held interpreter can't be written: %s", error)

    def after_step(self, run: Run, step: int, scalars: Scalars) -> None:
        del run, scalars
        self._finished = step

    def on_failure(self, run: Run, error: BaseException) -> None:
        """Ends the threads, but leaves the watching thread time to report a hang and exit the process.

        When one process exits because of a hang, the steps of the others fail. Those processes should report the hang, not the
        failed step.
        """
        if isinstance(error, HangError):
            return
        while self._thread is not None and self._thread.is_alive() and self._left < _TURNS * self._period:
            self._thread.join(self._period)
        self.on_end(run)

    def on_end(self, run: Run) -> None:
        del run
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        if self._board is not None:
            self._board.close()
            self._job.forget_run()
        if self._held is not None:
            self._held.close()

    def check(self, digest: Digest, run: Run) -> None:
        """Reports a lack of progress if a report is due. Called by the watchdog's thread."""
        if digest.still <= self._seconds:
            if self._next > self._seconds:
                logging.warning("the run makes progress again")
            self._next = self._seconds
        elif digest.still > self._next:
            while self._next < digest.still:
                self._next *= 2
            then = f"at --hang_seconds={self._hang_seconds:g} it ends" if self._hang_seconds else "it goes on"
            self._say(digest, run, f"--watchdog_seconds={self._seconds:g}; {then}")

    def _watch(self, run: Run, board: Board) -> None:
        has_failed = False
        while not self._closed.wait(self._period):
            try:
                self._turn(run, board)
            except Exception:  # else nobody would watch any more
                if not has_failed:
                    logging.exception("the watchdog failed; it goes on, and says no more of this")
                has_failed = True

    def _turn(self, run: Run, board: Board) -> None:
        if self._held is not None:
            self._held.alive()
        digest = board.conclusion()
        if digest is None:
            return
        if self._seconds:
            self.check(digest, run)
        if self._hang_seconds:
            self._left = self._hang_seconds * (1 if self._finished else _FIRST_STEP) - digest.still
            if self._left < 0:
                self._end(digest, run)

    def _beat(self, run: Run) -> Beat:
        """Returns the next beat of this process. Any thread may call this."""
        part, since = run.times.current
        if part == "input" and run.input is not None and run.input.waits_for_others:
            part = OTHERS_INPUT
        if run.waits_for_devices():
            part = DEVICES
        if multihost.waits_at():
            part = OTHERS
        phases = live.phases()
        return Beat(
            process=self._index,
            number=next(self._numbers),
            step=run.step,
            finished=self._finished,
            activity=run.activity[0],
            part=part,
            seconds=round(time.monotonic() - since, 3),
            phase="; ".join(phase.what for phase in phases),
            batches=sum(phase.batches or 0 for phase in phases),
            window=self._window(),
            stacks=self._stacks_if_behind(),
        )

    def _stacks_if_behind(self) -> str:
        """Returns this process's stacks if it is behind and half of the shorter limit has passed without progress; else ''."""
        latest = None if self._board is None else self._board.latest()
        limit = min(limit for limit in (self._seconds, self._hang_seconds) if limit)
        if self._count == 1 or latest is None or self._index not in latest.behind or latest.still < limit / 2:
            return ""
        return stacks(LONGEST)

    def _say(self, digest: Digest, run: Run, why: str) -> None:
        """Writes a report of the lack of progress to the log, and to a file in the run's directory."""
        first = f"no progress for {format_duration(digest.still)} ({why}): {digest.text}"
        lines = [first]
        for process in digest.behind:
            if process in digest.stacks:
                lines.append(f"Stacks of process {process}:\n{digest.stacks[process]}")
            else:
                lines.append(
                    f"Process {process} has told no stacks; if it can write, they are in {_file(run, process)}"
                )
        own = f"Stacks of this process:\n{stacks()}"
        if not digest.behind:
            lines.append(own)
        self._report("\n".join(lines))
        if digest.behind:
            lines.append(own)
        text = f"=== {time.strftime('%Y-%m-%d %H:%M:%S')} process {self._index}: " + "\n".join(lines) + "\n\n"
        # A file system that hangs may be why nothing moves.
        within(_LOGS_SECONDS, "writing the report of a hang", lambda: self._append(run, text))

    def _append(self, run: Run, text: str) -> None:
        file = open_append(_file(run, self._index), attempts=1)
        file.write(text.encode())
        file.flush()

    def _end(self, digest: Digest, run: Run) -> None:
        """Reports the hang, lets the run's callbacks handle the failure, and exits this process."""
        run.hangs = True
        self._job.begin_to_leave()
        limit = f"--hang_seconds={self._hang_seconds:g}"
        if not self._finished:
            limit += f", {_FIRST_STEP} times before the first step"
        self._say(digest, run, f"{limit}; this process ends")
        why = f"no progress for {digest.still:.0f} s ({limit}): {digest.text}"
        within(_LAST_SECONDS, "the last work of a run that hangs", lambda: run.fail(HangError(why)))
        time.sleep(_TURNS * self._period)
        self._job.leave(why, is_behind=not digest.behind or self._index in digest.behind)


def _file(run: Run, process: int) -> epath.Path:
    return run.job_log_dir / LOGS / f"stuck.process_{process}.txt"
