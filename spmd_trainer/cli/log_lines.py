"""Sets up logging: stderr shows log lines of the trainer and the user, and libraries' warnings; a file gets everything."""

from __future__ import annotations

import atexit
import collections
import contextlib
import copy
import logging as std_logging
import sys
import threading
import time
from collections.abc import Iterator
from logging.handlers import MemoryHandler

from absl import logging
from etils import epath

from spmd_trainer.errors import disk_is_full, terminal, user_code
from spmd_trainer.storage import is_remote
from spmd_trainer.storage.append import open_append
from spmd_trainer.training import rooms
from spmd_trainer.training.live_status import SHOWN_LIVE, live

_tracking = rooms.find("watch.tracking")
# praxis warns about each variable without a split mapping; the sharding report gives each variable's layout, and its reason.
_SAID_BETTER_ELSEWHERE = ("tensor_split_dims_mapping missing for",)
# Files of Orbax that log an error in the thread of a save. Orbax raises the error again where the trainer waits for the save.
_RAISED_LATER = (
    "/_src/futures/future.py",
    "/_src/checkpointers/async_checkpointer.py",
    "/checkpoint/checkpoint_manager.py",
)
(_SHOWN_LIVE,) = SHOWN_LIVE
_FILE_ONLY = "spmd_trainer_file_only"
# Number of log records kept in memory until the run's directory is known to belong to this run.
_KEPT_RECORDS = 10_000
# For a log in an object store: seconds between writes, and attempts per write. Lines of a failed write go into the next write.
_REMOTE_SECONDS = 10.0
_REMOTE_ATTEMPTS = 2

# The shells' exit status for a program that SIGINT ended: 128 + 2.
STATUS_INTERRUPTED = 130
CONTINUES = "the same command continues from the newest checkpoint"


class _Visible(std_logging.Formatter):
    """Log formatter that escapes control characters, because logs are read on terminals."""

    def format(self, record: std_logging.LogRecord) -> str:
        return terminal.visible(super().format(record))


class _Format(_Visible):
    """Log formatter for stderr: 'HH:MM:SS message'. Of errors that users can fix, and of a full disk, shows only the message."""

    def format(self, record: std_logging.LogRecord) -> str:
        error = record.exc_info[1] if record.exc_info else None
        # Errors that users can fix have a status: `UserError`, and `CheckpointError`, whose module takes long to import.
        if hasattr(error, "exit_status") or disk_is_full(error):
            record = copy.copy(record)  # other handlers use the same record, and need its traceback
            record.msg, record.args = f"{record.getMessage().rstrip('.')}: {error}", None
            record.exc_info = record.exc_text = None
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno <= std_logging.INFO else f"{record.levelname}: "
        text = super().format(record)
        return f"{clock} {level}{text}"


class _Wanted:
    """Log filter for stderr. Drops INFO records and repeated warnings of libraries.

    It keeps errors of libraries, and their warnings with a traceback, unless the trainer reports the error itself. It keeps
    records of the trainer and the user, except those that are only for the log file, and those that the live line shows.
    """

    def __init__(self) -> None:
        self._warnings: set[tuple[str, int, str]] = set()

    def __call__(self, record: std_logging.LogRecord) -> bool:
        if getattr(record, _FILE_ONLY, False) or (live.display is not None and _SHOWN_LIVE in vars(record)):
            return False
        if not user_code.is_library(record.pathname):
            return True
        if _tracking and (record.threadName or "").startswith(_tracking.THREADS):
            return False  # the trainer says itself that a tracker has failed
        if record.exc_info and record.pathname.endswith(_RAISED_LATER):
            return False
        if record.levelno != std_logging.WARNING or record.exc_info:
            return record.levelno > std_logging.INFO
        if str(record.msg).startswith(_SAID_BETTER_ELSEWHERE):
            return False
        # Not `getMessage()`: it raises if the library's arguments don't fit its format, which the handler must report.
        warning = record.pathname, record.lineno, f"{record.msg} {record.args}"
        is_new = warning not in self._warnings
        self._warnings.add(warning)
        return is_new


class RunLog(MemoryHandler):
    """The full log of a process: every record at INFO and above, also from libraries. Kept in memory until `open` is called.

    Attributes:
      path: the log's file; None until `open` is called.
      is_shown: True if stderr also shows the records that pass `_Wanted`.
    """

    def __init__(self) -> None:
        super().__init__(_KEPT_RECORDS, flushLevel=std_logging.CRITICAL + 1)
        self.path: epath.Path | None = None
        self.is_shown = True

    def open(self, path: epath.PathLike) -> None:
        """Appends the records kept so far, and all later ones, to the file at `path`, which may be in an object store.

        If the file can't be written, logs a warning and continues; stderr shows the important records anyway.
        """
        if self.path is not None:
            return
        path = epath.Path(path)
        try:
            file = _LogFile(path)
        except OSError as error:
            logging.warning("can't write a log file for this run: %s", error)
            return
        file.setFormatter(_Visible("%(asctime)s %(levelname)s %(filename)s:%(lineno)d] %(message)s"))
        self.path = path
        self.setTarget(file)
        self.flush()

    def shouldFlush(self, record: std_logging.LogRecord) -> bool:
        """Returns True if the log has a file, so that each record is written at once. Otherwise drops the oldest records."""
        if self.target is None:
            del self.buffer[:-_KEPT_RECORDS]
            return False
        return True

    def close(self) -> None:
        file = self.target
        super().close()
        if file is not None:
            file.close()


class _LogFile(std_logging.Handler):
    """Log handler that writes to a local file at once, and to an object store every 10 s from a background thread.

    Only the first failed write is reported, and the run continues. The next write repeats the lines of a failed write.
    """

    def __init__(self, path: epath.Path) -> None:
        super().__init__()
        self._path = path
        self._file = open_append(path, attempts=_REMOTE_ATTEMPTS)
        self._lines: collections.deque[str] = collections.deque(maxlen=_KEPT_RECORDS)
        self._has_failed = False
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        if is_remote(path):
            self._thread = threading.Thread(target=self._work, name="run-log", daemon=True)
            self._thread.start()
        else:
            self._file.write(b"")  # raises if the file can't be written
        # `logging` closes its handlers after the libraries have closed their connections.
        atexit.register(self.close)

    def emit(self, record: std_logging.LogRecord) -> None:
        """Writes the record, or keeps it for the background thread."""
        try:
            self._lines.append(self.format(record) + "\n")
        except Exception:
            self.handleError(record)
        if self._thread is None:
            self._write()

    def close(self) -> None:
        """Stops the background thread and writes the remaining lines."""
        atexit.unregister(self.close)
        self._ends.set()
        if self._thread is not None:
            self._thread.join()
        self._write()
        super().close()

    def _work(self) -> None:
        while not self._ends.wait(_REMOTE_SECONDS):
            self._write()

    def _write(self) -> None:
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        try:
            if lines:
                self._file.write("".join(lines).encode())
            self._file.flush()
        except Exception as error:  # object stores have errors of their own
            self._lines.extendleft(reversed(lines))
            if not self._has_failed:
                self._has_failed = True
                logging.warning("can't write %s for now: %s", self._path, error)


def install() -> RunLog:
    """Sets up logging for the command line: 'HH:MM:SS message' on stderr. Also starts the full log, and returns it."""
    logging.use_absl_handler()
    logging.set_verbosity(logging.INFO)
    handler = logging.get_absl_handler()
    handler.setFormatter(_Format())
    handler.addFilter(_Wanted())
    run_log = RunLog()
    std_logging.getLogger().addHandler(run_log)
    return run_log


@contextlib.contextmanager
def shown(*, warnings_only: bool = False) -> Iterator[RunLog]:
    """Context manager for calls from a notebook or script: shows log lines on stderr, and yields the full log.

    If the program itself logs at INFO, only its own handlers show the log lines. `warnings_only=True` hides INFO lines.
    """
    root = std_logging.getLogger()
    before = logging.get_verbosity(), root.level, list(root.handlers)
    wants_own = root.level <= std_logging.INFO and any(h.level <= std_logging.INFO for h in root.handlers)
    handler = std_logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Format())
    handler.addFilter(_Wanted())
    logging.set_verbosity(logging.WARNING if warnings_only else logging.INFO)
    root.setLevel(min(root.level, std_logging.INFO))
    run_log = RunLog()
    root.addHandler(run_log)
    run_log.is_shown = not (wants_own or warnings_only)
    if not wants_own:
        root.addHandler(handler)
    try:
        yield run_log
    finally:
        root.removeHandler(handler)
        root.removeHandler(run_log)
        run_log.close()
        logging.set_verbosity(before[0])
        root.setLevel(before[1])


def log_traceback(error: BaseException) -> None:
    """Writes an error's traceback to the full log only."""
    std_logging.getLogger("spmd_trainer").error("traceback:", exc_info=error, extra={_FILE_ONLY: True})


def say_interrupted(what_next: str = CONTINUES) -> None:
    """Writes to stderr that Ctrl-C has interrupted the process, followed by `what_next`, a clause on what the user can do."""
    terminal.write_last(f"interrupted; {what_next}")
