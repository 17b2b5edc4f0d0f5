"""Writes scalars to TensorBoard event files and JSON lines, on a background thread.

The thread is needed because writing sixty scalars takes milliseconds, and importing TensorBoard's modules takes 0.1 s.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from etils import epath

from spmd_trainer.errors import UserError
from spmd_trainer.storage import access, is_remote, json_values
from spmd_trainer.storage import retry as retry_lib
from spmd_trainer.storage.append import GrowingFile, open_append, read_joined
from spmd_trainer.storage.retry import retry

if TYPE_CHECKING:
    from spmd_trainer.training.event_files import EventFile

METRICS_FILE = "metrics.jsonl"
# (name, step, scalars, notes): the arguments of `SummaryWriters.write`.
Listener: TypeAlias = Callable[[str, int, Mapping[str, float], Mapping[str, str]], None]
# Number of attempts to write to a file system, at 0, 1, 3, 7 and 15 seconds. Object stores have their own retries.
_ATTEMPTS = 5


class SummaryError(UserError):
    """Summaries can't be written: the disk is full, a permission was withdrawn, or storage stays unavailable.

    No training steps are lost, because the training loop saves the state before it ends the run.
    """


class SummaryWriters:
    """Writes a TensorBoard event file and a `metrics.jsonl` to `job_log_dir/summaries/NAME`, e.g. NAME 'eval_heldout'."""

    def __init__(self, job_log_dir: epath.PathLike, *, enabled: bool = True, raises_at_end: bool = False):
        """Prepares the writers. The first write of a name creates its files.

        Args:
          enabled: False disables writing; only one process of a job writes.
          raises_at_end: if a write fails, False raises an error at the next call. True, for several processes, postpones it until
            `raise_failure` is called, so that the processes can save together first; see `take_failure`.
        """
        self._root = epath.Path(job_log_dir) / "summaries"
        self._enabled = enabled
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._files: dict[str, tuple[EventFile, GrowingFile]] = {}
        self._error: BaseException | None = None
        self._has_failed = False
        self._raises_at_end = raises_at_end
        self._failure_taken = False
        self._listeners: list[Listener] = []
        self._replaced: dict[str, int] = {}

    def listen(self, listener: Listener) -> None:
        """Registers a function that each later `write` calls in its caller's thread if writing is enabled. It must be fast."""
        self._listeners.append(listener)

    def replace_from(self, name: str, step: int) -> None:
        """Makes TensorBoard discard a name's values of `step` and later steps, as soon as this name has new scalars.

        `metrics.jsonl` needs no change, because `read_metrics` takes the last record of each step.
        """
        self._replaced[name] = step

    def write(self, name: str, step: int, scalars: Mapping[str, float], notes: Mapping[str, str] | None = None) -> None:
        """Queues scalars of one step.

        Args:
          name: the directory below `summaries`.
          notes: texts by name, written to `metrics.jsonl` only.

        Raises:
          SummaryError: an earlier write failed permanently. Raised once; later scalars are dropped.
        """
        self._raise_earlier_error()
        if self._has_failed or not self._enabled or not scalars:
            return
        values, texts = dict(scalars), dict(notes or {})
        for listener in self._listeners:
            listener(name, step, values, texts)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="summary-writer", daemon=True)
            self._thread.start()
        self._queue.put(lambda: self._write_now(name, step, values, texts))

    def flush(self) -> None:
        """Waits until all queued scalars are written, so that no checkpoint exists without the scalars before it.

        Raises:
          SummaryError: a write failed permanently, and the error has not been raised before.
        """
        if self._thread is not None:
            self._queue.put(self._flush_now)
            self._queue.join()
        self._raise_earlier_error()

    def take_failure(self) -> bool:
        """Returns True once, after a write has failed permanently, if the error is postponed to `raise_failure`; else False."""
        if self._failure_taken or not (self._raises_at_end and self._has_failed):
            return False
        self._failure_taken = True
        return True

    def raise_failure(self, *, in_order: bool) -> None:
        """Raises the postponed error of a failed write, if there is one.

        Args:
          in_order: True if all processes of the job exit at this point. Then this process needn't report a failure to them.

        Raises:
          SummaryError: a write failed permanently.
        """
        self._raises_at_end = False
        try:
            self._raise_earlier_error()
        except SummaryError as error:
            error.leaves_in_order = in_order
            raise

    def close(self) -> None:
        """Writes all queued scalars and stops the writing thread.

        Raises:
          SummaryError: a write failed permanently, and the error has not been raised before.
        """
        if self._thread is not None:
            self._queue.put(self._flush_now)
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        self._raise_earlier_error()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                if not self._has_failed:
                    job()
            except BaseException as error:  # raised in the caller's thread, at its next call
                self._has_failed, self._error = True, error
            finally:
                self._queue.task_done()

    def _write_now(self, name: str, step: int, scalars: dict[str, float], notes: dict[str, str]) -> None:
        if name not in self._files:
            self._files[name] = self._open(name)
        event_file, lines = self._files[name]
        line = json.dumps({"step": step, **scalars, **notes}) + "\n"
        what = f"writing summaries below {self._root / name}"
        attempts = 1 if is_remote(self._root) else _ATTEMPTS
        retry(lambda: event_file.write(step, scalars), what=what, attempts=attempts)
        retry(lambda: lines.write(line.encode()), what=what, attempts=attempts)

    def _open(self, name: str) -> tuple[EventFile, GrowingFile]:
        from spmd_trainer.training.event_files import EventFile

        directory = self._root / name
        path = directory / METRICS_FILE
        # A process that was killed may have left the last line incomplete.
        if not is_remote(path) and path.exists() and (text := path.read_text()) and not text.endswith("\n"):
            with path.open("a") as file:
                file.write("\n")
        return EventFile(directory, replaces_from=self._replaced.get(name)), open_append(path)

    def _flush_now(self) -> None:
        for event_file, lines in self._files.values():
            event_file.flush()
            lines.flush()

    def _raise_earlier_error(self) -> None:
        if self._error is None or self._raises_at_end:
            return
        error, self._error = self._error, None
        if not isinstance(error, OSError) and access.explain(self._root, error) is None:
            raise error
        problem = access.explain(self._root, error) or retry_lib.summary(error)
        raise SummaryError(
            f"writing summaries failed: {self._root} {problem}. When that is mended, the same command continues from the last "
            "checkpoint"
        ) from error


def read_metrics(job_log_dir: epath.PathLike, name: str) -> dict[int, dict[str, Any]]:
    """Reads the scalars and notes in `summaries/NAME/metrics.jsonl`.

    Returns:
      {step: {'step': step, scalar: value, note: text}} with the last record of each step. Skips a line that a killed process
      has left incomplete.
    """
    found = {}
    for line in read_joined(epath.Path(job_log_dir) / "summaries" / name / METRICS_FILE).splitlines():
        try:
            record = json_values.parse_object(line, finite=False)
            found[json_values.integer(record.get("step"), "step")] = record
        except ValueError:
            continue
    return found
