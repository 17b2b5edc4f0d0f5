"""A tracker's queue and thread, so that the tracker's errors and delays don't affect the run; and the file `tracking.json`,
which stores the run's id in each tracker, so that a restart continues the same tracked run.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from absl import logging
from etils import epath

from spmd_trainer.callbacks import Status
from spmd_trainer.storage import json_values
from spmd_trainer.storage.files import write_atomically
from spmd_trainer.watch.tracking import THREADS
from spmd_trainer.watch.tracking.base import Histogram, RunFacts, StepScalars, Tracker

FILE = "tracking.json"


# For `tracking.json`: trackers write it from their own threads, and a run may have several tracking callbacks.
_LOCK = threading.Lock()


class RunIds:
    """The run's ids in the trackers, by tracker name, stored in `tracking.json`."""

    def __init__(self, job_log_dir: epath.Path):
        """Reads the ids that were stored before the run was restarted, if any."""
        self._path = job_log_dir / FILE
        self._ids = self._read()

    def get(self, tracker: str) -> str | None:
        return self._ids.get(tracker)

    def set(self, tracker: str, run_id: str) -> None:
        """Stores an id. Raises OSError if the file can't be written."""
        with _LOCK:
            self._ids = self._read()
            if self._ids.get(tracker) != run_id:
                self._ids[tracker] = run_id
                write_atomically(self._path, [json.dumps(self._ids, indent=2, sort_keys=True)])

    def _read(self) -> dict[str, str]:
        try:
            return {
                str(name): str(run_id)
                for name, run_id in json_values.parse_object(json_values.content_of(self._path)).items()
            }
        except FileNotFoundError:
            return {}
        except ValueError as error:
            logging.warning("%s can't be read (%s); trackers begin new runs", self._path, error)
            return {}


# Maximum number of queued records. A record of 60 scalars takes 8 KB, so a hanging tracker costs at most 40 MB, and a
# tracker whose server is down for a while catches up on 5000 summaries.
CAPACITY = 5000
# How many seconds a run waits at its end for all its trackers together: a minute of an idle machine is cheap compared with
# lost records, and a server that does not answer for a minute is down. The last checkpoint has been saved before.
CLOSE_SECONDS = 60.0
# The wait for a tracker is logged after this many seconds, because most trackers end sooner.
_SILENT_SECONDS = 2.0


@dataclasses.dataclass(frozen=True)
class _Call:
    """A queued call of a tracker's method. The tracker's thread makes it.

    Attributes:
      method: name of the method.
      records: number of records that are lost if the call fails.
      make: function that makes the call.
    """

    method: str
    records: int
    make: Callable[[], object]


class Feed:
    """Sends a run's records to one tracker, on the tracker's own thread."""

    def __init__(self, name: str, tracker: Tracker, *, capacity: int = CAPACITY):
        """`capacity`: maximum number of queued records. Records that don't fit into the queue are dropped and counted."""
        self.name = name
        self._tracker = tracker
        self._capacity = capacity
        self._queue: queue.SimpleQueue[StepScalars | _Call] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"{THREADS}{name}", daemon=True)
        self._given = 0
        self._overflowed = 0
        self._failed: collections.Counter[str] = collections.Counter()
        self._has_failed = False
        self._is_open = False
        self._is_left = False
        self._busy_with = "open"
        self._done = 0

    def start(self, facts: RunFacts, ids: RunIds) -> None:
        """Starts the thread, which opens the tracker. Does not wait for it."""
        self._facts = dataclasses.replace(facts, resume_id=ids.get(self.name))
        self._ids = ids
        self._thread.start()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Queues the scalars of a step without blocking."""
        self._put(StepScalars(step, dict(values), time.time()))

    def samples(self, step: int, dataset: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Queues decoded examples without blocking."""
        self._put(_Call("samples", 1, lambda: self._tracker.samples(step, dataset, rows)))

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Queues histograms without blocking."""
        self._put(_Call("histograms", 1, lambda: self._tracker.histograms(step, histograms)))

    def end(self, status: Status, page: epath.Path | None) -> None:
        """Queues the run's page, if there is one, and the run's status. Does not block; `join` waits for the tracker."""
        if page is not None:
            self._given += 1
            self._queue.put(_Call("page", 1, lambda: self._tracker.page(page)))
        self._queue.put(_Call("close", 0, lambda: self._tracker.close(status)))

    def join(self, seconds: float) -> None:
        """Waits at most `seconds` seconds for the tracker to end, and logs the number of lost records."""
        self._thread.join(min(max(0.0, seconds), _SILENT_SECONDS))
        if self._thread.is_alive() and seconds > _SILENT_SECONDS:
            logging.info("waiting for tracker %s, %.0f s at most ...", self.name, seconds)
            self._thread.join(seconds - _SILENT_SECONDS)
        waiting = self._given - self._overflowed - self._done
        self._is_left = self._thread.is_alive()
        if self._is_left:
            logging.warning("tracker %s hangs in %s; the run ends without it", self.name, self._busy_with)
        lost = self._overflowed + self._failed.total() + waiting
        if lost:
            why = [f"{number} failed in {method}" for method, number in sorted(self._failed.items()) if number]
            why += [f"{self._overflowed} came when its queue was full"] if self._overflowed else []
            why += [f"{waiting} still waited"] if waiting else []
            logging.warning("tracker %s lost %d of %d records: %s", self.name, lost, self._given, ", ".join(why))

    def _put(self, item: StepScalars | _Call) -> None:
        self._given += 1
        if self._queue.qsize() < self._capacity:
            self._queue.put(item)
            return
        self._overflowed += 1
        if self._overflowed == 1:
            logging.warning(
                "tracker %s is too slow: %d records wait for it; it loses records until they are fewer",
                self.name,
                self._capacity,
            )

    def _work(self) -> None:
        self._is_open = self._try(_Call("open", 0, self._open))
        left: StepScalars | _Call | None = None
        while True:
            item = left or self._queue.get()
            left = None
            if isinstance(item, StepScalars):
                records, left = self._more(item)
                call = _Call("scalars", len(records), functools.partial(self._tracker.scalars, records))
            else:
                call = item
            self._try(call)
            self._done += call.records
            if call.method == "close":
                return

    def _more(self, first: StepScalars) -> tuple[list[StepScalars], _Call | None]:
        """Returns `first` and the next queued scalars, up to the tracker's batch size, and the call that ended them or None."""
        records = [first]
        while len(records) < self._tracker.batch:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                break
            if isinstance(item, _Call):
                return records, item
            records.append(item)
        return records, None

    def _open(self) -> None:
        run_id = self._tracker.open(self._facts)
        try:
            self._ids.set(self.name, run_id)
        except OSError as error:
            logging.warning(
                "tracker %s: a restart will begin a new run, because its id can't be written: %s", self.name, error
            )
        logging.info("tracker %s: %s", self.name, self._tracker.where or run_id)

    def _try(self, call: _Call) -> bool:
        """Makes a call. Returns False if it failed. If `open` failed, other calls aren't made, and count as failed."""
        if call.method != "open" and not self._is_open:
            self._failed[call.method] += call.records
            return False
        self._busy_with = call.method
        try:
            call.make()
        except BaseException as error:  # a library may raise SystemExit, too
            self._failed[call.method] += call.records
            if not (self._has_failed or self._is_left):
                self._has_failed = True
                logging.warning(
                    "tracker %s failed in %s: %s: %s. The run continues; further failures are counted",
                    self.name,
                    call.method,
                    type(error).__name__,
                    error,
                )
                logging.debug("tracker %s failed", self.name, exc_info=error)
            return False
        return True
