"""Python stacks of this process."""

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

# What another process is told of a process's stacks: more would not fit a log either.
LONGEST = 12_000
# Beginnings of the names of the trainer's threads that only watch and wait.
_WATCHING = ("watchdog", "beats", "heartbeat", "phase:", "lock", "peer-watch", "run-log")


def stacks(longest: int | None = None) -> str:
    """Returns where each Python thread is, the innermost call first: the main thread, then those that read input, then others.

    Only names and line numbers: reading source files could hang too.

    Args:
      longest: the number of characters at most; None for all.
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
    """Writes this process's stacks into a file when its Python threads can't run, because C code holds the interpreter's lock.

    A thread of faulthandler's, which needs no lock, writes unless `alive` was called in time. There is only one in a process:
    whoever else calls `faulthandler.dump_traceback_later` takes it over.
    """

    def __init__(self, path: epath.Path, seconds: float):
        """Opens the file. In an object store nothing can be appended to: then it is a file in the machine's folder for such.

        Args:
          path: the file; its directory is made.
          seconds: the time without a call of `alive` after which the stacks are written.

        Raises:
          OSError: the file can't be made.
        """
        self._seconds = seconds
        self._path = path
        self._made_directory = False
        self._file: IO[str]
        if is_remote(path):
            self._file = tempfile.NamedTemporaryFile("a", prefix=f"{path.stem}.", suffix=path.suffix, delete=False)  # noqa: SIM115
            self._path = epath.Path(self._file.name)
        else:
            self._made_directory = not path.parent.exists()
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a", opener=reading.opened)  # noqa: SIM115

    def alive(self) -> None:
        """Begins the time anew. Called by a Python thread now and then."""
        faulthandler.dump_traceback_later(self._seconds, file=self._file)

    def close(self) -> None:
        """Stops, and removes the file, and the directory that was made for it, if nothing was written."""
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
        with contextlib.suppress(OSError):
            if not self._path.stat().length:
                self._path.unlink()
                if self._made_directory:
                    os.rmdir(self._path.parent)  # if nothing else is in it
