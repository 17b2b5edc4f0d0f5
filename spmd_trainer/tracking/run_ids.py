"""`tracking.json`: under which ids the trackers know a run, so that a restart continues the same one."""

from __future__ import annotations

import json
import threading

from absl import logging
from etils import epath

from spmd_trainer.storage.files import write_atomically

FILE = "tracking.json"


# Trackers write from their own threads, and a run may have several callbacks that track.
_LOCK = threading.Lock()


class RunIds:
    """Ids by the names of trackers."""

    def __init__(self, job_log_dir: epath.Path):
        """Reads what an earlier start of the run has written."""
        self._path = job_log_dir / FILE
        self._ids = self._read()

    def get(self, tracker: str) -> str | None:
        """Returns a tracker's id of this run; None if it has not tracked it yet."""
        return self._ids.get(tracker)

    def set(self, tracker: str, run_id: str) -> None:
        """Writes a tracker's id.

        Raises:
          OSError: the file can't be written.
        """
        with _LOCK:
            self._ids = self._read()
            if self._ids.get(tracker) != run_id:
                self._ids[tracker] = run_id
                write_atomically(self._path, [json.dumps(self._ids, indent=2, sort_keys=True)])

    def _read(self) -> dict[str, str]:
        try:
            return {str(name): str(run_id) for name, run_id in json.loads(self._path.read_text()).items()}
        except FileNotFoundError:
            return {}
        except (ValueError, AttributeError) as error:
            logging.warning("%s can't be read (%s); trackers begin new runs", self._path, error)
            return {}
