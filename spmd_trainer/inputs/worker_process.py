"""Processes beside the trainer that answer its requests: they tokenise, decode images, render chat templates.

Requests and answers are bytes in a pipe. A process ends with the trainer, because the pipe does.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

# How long a process may take to end once it has closed its pipe.
_GRACE_SECONDS = 5


class EndedError(Exception):
    """A process ended instead of answering. The message says how: 'ended with status 1'.

    Attributes:
      status: its exit status, negative for a signal; None if it could not be started, or closed its pipe and went on.
    """

    def __init__(self, how: str, status: int | None = None):
        self.status = status
        super().__init__(how)

    @classmethod
    def of_status(cls, status: int) -> EndedError:
        """Returns the error of a process that has ended by itself."""
        if status >= 0:
            return cls(f"ended with status {status}", status)
        name = next((one.name for one in signal.Signals if one == -status), f"signal {-status}")
        hint = ", perhaps for want of memory" if status == -signal.SIGKILL else ""
        return cls(f"was ended by {name}{hint}", status)


class WorkerProcess:
    """A process that starts with its first request, and after its end with another one.

    It is in a session of its own: Ctrl-C in a terminal is the trainer's to handle.
    """

    def __init__(self, command: Sequence[str], arguments: Sequence[str] = (), *, first: bytes = b"", **settings: Any):
        """Prepares it.

        Args:
          command: the program, which gets the number of its pipe's file descriptor.
          arguments: what the program gets behind it, as they are when it starts.
          first: what it reads before the requests, if anything.
          **settings: arguments of `subprocess.Popen`.
        """
        self._command, self._arguments, self._first, self._settings = command, arguments, first, settings
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._is_over = False
        self._lock = threading.Lock()

    @classmethod
    def of_module(
        cls, module: str, first: bytes, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> WorkerProcess:
        """Prepares one that runs a module, see `pipe_of_trainer`.

        It imports what this process can import, because it may get objects of the user's classes, and leaves the devices alone.
        """
        own = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), "JAX_PLATFORMS": "cpu"}
        env = {**os.environ, **own, **(environment or {})}
        return cls([sys.executable, "-P", "-m", module], arguments, first=first, env=env)

    def ask(self, request: bytes) -> bytes:
        """Returns the answer to a request. Raises EndedError if the process ends. Threads wait for each other."""
        with self._lock:
            try:
                if self._pipe is None:
                    self._pipe = self._start()
                self._pipe.send_bytes(request)
                return self._pipe.recv_bytes()
            except (EOFError, OSError) as error:
                raise self._ended(error) from error
            except BaseException:  # Ctrl-C between a request and its answer
                self._end()
                raise

    def stop(self) -> None:
        """Ends the process at once, and for good. Any thread may call it."""
        self._is_over = True
        if (process := self._process) is not None:
            process.kill()
            process.wait()

    def _start(self) -> Connection:
        if self._is_over:
            raise EndedError("was stopped")
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            number = theirs.fileno()
            command = [*self._command, str(number), *self._arguments]
            pipes: dict[str, Any] = {"pass_fds": [number], "stdin": subprocess.DEVNULL}
            self._process = subprocess.Popen(command, start_new_session=True, **pipes, **self._settings)
        if self._is_over:  # since a moment ago, by another thread
            self._process.kill()
        if self._first:
            ours.send_bytes(self._first)
        return ours

    def _ended(self, error: Exception) -> EndedError:
        """Returns how the process ended that has closed its pipe. `error`: of the pipe, or of the process' start."""
        status, has_started = None, self._process is not None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self._process.wait(_GRACE_SECONDS)  # it is ending by itself, with a status that says why
        self._end()
        if status is not None:
            return EndedError.of_status(status)
        return EndedError("closed its pipe and went on" if has_started else f"could not be started ({error})")

    def _end(self) -> None:
        """Ends the process, if there is one."""
        process, pipe, self._process, self._pipe = self._process, self._pipe, None, None
        if pipe is not None:
            pipe.close()
        if process is not None:
            process.kill()
            process.wait()


def pipe_of_trainer() -> Connection:
    """Returns the pipe to the trainer, in a process of `WorkerProcess.of_module`. Reads raise EOFError once the trainer ends."""
    return Connection(int(sys.argv[1]))
