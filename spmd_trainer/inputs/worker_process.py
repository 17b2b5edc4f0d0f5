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
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

# How long a process may take to end once it has closed its pipe.
_GRACE_SECONDS = 5


class EndedError(Exception):
    """A process ended instead of answering. The message says how: 'ended with status 1'.

    Attributes:
      status: its exit status, negative for a signal; None if it could not be started.
    """

    def __init__(self, status: int | None):
        self.status = status
        how = "could not be started" if status is None else f"ended with status {status}"
        if status is not None and status < 0:
            hint = ", perhaps for want of memory" if status == -signal.SIGKILL else ""
            how = f"was ended by {signal.Signals(-status).name}{hint}"
        super().__init__(how)


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
                raise EndedError(self._end(_GRACE_SECONDS)) from error  # its own status says why
            except BaseException:  # Ctrl-C between a request and its answer
                self._end(0)
                raise

    def stop(self) -> None:
        """Ends the process at once, and for good. Any thread may call it."""
        self._is_over = True
        if (process := self._process) is not None:
            process.kill()
            process.wait()

    def _start(self) -> Connection:
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            number = theirs.fileno()
            command = [*self._command, str(number), *self._arguments]
            pipes: dict[str, Any] = {"pass_fds": [number], "stdin": subprocess.DEVNULL}
            self._process = subprocess.Popen(command, start_new_session=True, **pipes, **self._settings)
        if self._is_over:
            self._process.kill()
        if self._first:
            ours.send_bytes(self._first)
        return ours

    def _end(self, seconds: float) -> int | None:
        """Ends the process after so many seconds; returns its status, None if there is no process."""
        process, pipe, self._process, self._pipe = self._process, self._pipe, None, None
        if pipe is not None:
            pipe.close()
        if process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        process.kill()
        return process.wait()


@contextlib.contextmanager
def pipe_of_trainer() -> Iterator[Connection]:
    """Yields the pipe of a process that `WorkerProcess.of_module` started, and ends when the trainer has closed it."""
    with Connection(int(sys.argv[1])) as pipe, contextlib.suppress(EOFError, ConnectionError):
        yield pipe
