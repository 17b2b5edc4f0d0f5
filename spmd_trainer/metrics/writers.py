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

    def write(self, name: str, step: int, scalars: Mapping[str, float]) -> None:
        """Queues scalars of one step.

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
        self._queue.put(lambda: self._write_now(name, step, values))

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

    def _write_now(self, name: str, step: int, scalars: dict[str, float]) -> None:
        directory = self._root / name
        if name not in self._writers:
            from clu import metric_writers

            directory.mkdir(parents=True, exist_ok=True)
            self._writers[name] = metric_writers.SummaryWriter(str(directory))
        self._writers[name].write_scalars(step, scalars)
        self._writers[name].flush()
        with (directory / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, **scalars}) + "\n")

    def _raise_earlier_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise RuntimeError(f"writing summaries below {self._root} failed: {error}") from error
