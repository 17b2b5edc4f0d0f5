"""Writes scalars to TensorBoard event files (through clu) and to JSON lines, on a thread of its own.

clu's writers bring in TensorFlow, and a summary of sixty scalars costs milliseconds: both happen on the writing thread.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from etils import epath

METRICS_FILE = "metrics.jsonl"


class SummaryWriters:
    """One TensorBoard directory and one `metrics.jsonl` per name ('train', 'eval_heldout', ...) below a job's directory."""

    def __init__(self, job_log_dir: epath.PathLike, *, enabled: bool = True):
        """Nothing is opened before the first scalar is written; `enabled=False` (all but one process) writes nothing."""
        self._root = epath.Path(job_log_dir) / "summaries"
        self._enabled = enabled
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._writers: dict[str, Any] = {}
        self._error: BaseException | None = None

    def write(self, name: str, step: int, scalars: Mapping[str, float], notes: Mapping[str, str] | None = None) -> None:
        """Queues scalars of one step.

        Args:
          name: the directory below `summaries`.
          step: the training step.
          scalars: values by name.
          notes: texts that stand beside them in `metrics.jsonl` alone.

        Raises:
          RuntimeError: an earlier write failed; its cause is attached.
        """
        self._raise_earlier_error()
        if not self._enabled or not scalars:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="summary-writer", daemon=True)
            self._thread.start()
        values = dict(scalars)
        texts = dict(notes or {})
        self._queue.put(lambda: self._write_now(name, step, values, texts))

    def flush(self) -> None:
        """Returns when all that is queued is written, so that a checkpoint never outlives the scalars before it.

        Raises:
          RuntimeError: a write failed; its cause is attached.
        """
        if self._thread is not None:
            self._queue.join()
        self._raise_earlier_error()

    def close(self) -> None:
        """Writes all that is queued, closes the files, and raises the error of a failed write."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        self._raise_earlier_error()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                if self._error is None:
                    job()
            except BaseException as error:  # it belongs to the caller, who gets it at the next write
                self._error = error
            finally:
                self._queue.task_done()
        for writer in self._writers.values():
            writer.close()

    def _write_now(self, name: str, step: int, scalars: dict[str, float], notes: dict[str, str]) -> None:
        directory = self._root / name
        if name not in self._writers:
            from clu import metric_writers

            directory.mkdir(parents=True, exist_ok=True)
            _end_last_line(directory / METRICS_FILE)
            self._writers[name] = metric_writers.SummaryWriter(str(directory))
        self._writers[name].write_scalars(step, scalars)
        self._writers[name].flush()
        with (directory / METRICS_FILE).open("a") as file:
            file.write(json.dumps({"step": step, **scalars, **notes}) + "\n")

    def _raise_earlier_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise RuntimeError(f"writing summaries below {self._root} failed: {error}") from error


def read_metrics(job_log_dir: epath.PathLike, name: str) -> dict[int, dict[str, Any]]:
    """Reads back what was written under a name.

    Returns:
      {step: {'step': step, scalar: value, note: text}}, the last record of each step. A line that a kill cut off doesn't
      count. Empty where nothing was written.
    """
    path = epath.Path(job_log_dir) / "summaries" / name / METRICS_FILE
    if not path.exists():
        return {}
    found = {}
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[record["step"]] = record
    return found


def _end_last_line(path: epath.Path) -> None:
    """A line that a kill cut off stays alone: the next one begins a line of its own."""
    if path.exists() and (text := path.read_text()) and not text.endswith("\n"):
        with path.open("a") as file:
            file.write("\n")
