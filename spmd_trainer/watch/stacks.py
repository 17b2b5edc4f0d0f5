"""Python stacks of this process, also while C code holds the interpreter."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import tempfile
import threading
import types
from typing import IO

from etils import epath

from spmd_trainer.storage import is_remote, reading

# Maximum number of characters of stacks that a process sends to other processes: more would not fit a log either.
LONGEST = 12_000
# Beginnings of the names of the trainer's threads that only watch and wait.
_WATCHING = ("watchdog", "beats", "heartbeat", "phase:", "lock", "peer-watch", "device-watch", "run-log")


def stacks(longest: int | None = None) -> str:
    """Returns the stacks of this process's Python threads: first the main thread, then threads that read input, then others.

    Each stack begins with the innermost call. It has file names, line numbers and function names, but no source lines, because
    reading source files could hang. The trainer's threads that only watch and wait are left out.

    Args:
      longest: maximum number of characters; None for no limit.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = [item for item in sys._current_frames().items() if not names.get(item[0], "").startswith(_WATCHING)]
    frames.sort(key=lambda item: (item[0] != main, not names.get(item[0], "").startswith("prefetch"), item[0]))
    text = "\n".join(f"Thread 0x{ident:x} ({names.get(ident, '?')}):\n{_calls(frame)}" for ident, frame in frames)
    return text if longest is None or len(text) <= longest else f"{text[:longest]}\n  ... cut short"


def _calls(frame: types.FrameType | None) -> str:
    lines = []
    while frame is not None:
        lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
        frame = frame.f_back
    return "\n".join(lines)


class HeldInterpreter:
    """Writes this process's stacks into a file when its Python threads can't run, because C code holds the GIL.

    A faulthandler thread, which doesn't need the GIL, writes the stacks if `alive` isn't called in time. A process has only one
    such thread. Any other call of `faulthandler.dump_traceback_later` takes this thread over.
    """

    def __init__(self, path: epath.Path, seconds: float):
        """Opens the file. If it is in an object store, where files can't be appended to, opens a local temporary file instead.

        Args:
          path: the file; its directory is created.
          seconds: seconds without a call of `alive` after which the stacks are written.

        Raises:
          OSError: the file can't be created.
        """
        self._seconds = seconds
        self._path = path
        self._made_directory = False
        self._file: IO[str]
        if is_remote(path):
            self._file = tempfile.NamedTemporaryFile("a", prefix=f"{path.stem}.", suffix=path.suffix, delete=False)  # noqa:SIM115
            self._path = epath.Path(self._file.name)
        else:
            self._made_directory = not path.parent.exists()
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a", opener=reading.opened)  # noqa: SIM115

    def alive(self) -> None:
        """Restarts the timeout. Called regularly by a Python thread."""
        faulthandler.dump_traceback_later(self._seconds, file=self._file)

    def close(self) -> None:
        """Stops the timeout. If nothing was written, removes the file, and also its directory if `__init__` created it."""
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
        with contextlib.suppress(OSError):
            if not self._path.stat().length:
                self._path.unlink()
                if self._made_directory:
                    os.rmdir(self._path.parent)  # if nothing else is in it
