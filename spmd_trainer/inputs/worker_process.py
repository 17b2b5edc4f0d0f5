"""Worker processes, which tokenize, decode images or render chat templates for the trainer.

Requests and answers are bytes in a pipe. When the trainer exits, the pipe closes, and the worker process exits too.
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

# Seconds that a worker process may take to exit after it has closed its pipe.
_GRACE_SECONDS = 5


class EndedError(Exception):
    """A worker process exited instead of answering. The message says how: 'ended with status 1'.

    Attributes:
      status: the process's exit status (negative for a signal). None if the process could not be started, was stopped before
        its start, or closed its pipe but kept running.
    """

    def __init__(self, how: str, status: int | None = None):
        self.status = status
        super().__init__(how)

    @classmethod
    def of_status(cls, status: int) -> EndedError:
        """Returns the error for a process that exited with this status. A negative status means a signal."""
        if status >= 0:
            return cls(f"ended with status {status}", status)
        name = next((one.name for one in signal.Signals if one == -status), f"signal {-status}")
        hint = ", perhaps for want of memory" if status == -signal.SIGKILL else ""
        return cls(f"was ended by {name}{hint}", status)


class WorkerProcess:
    """A worker process. It starts at the first request, and if it exits, it is started again at the next request.

    The process runs in a separate session, so that Ctrl-C in a terminal reaches only the trainer.
    """

    def __init__(self, command: Sequence[str], arguments: Sequence[str] = (), *, first: bytes = b"", **settings: Any):
        """Prepares the process without starting it.

        Args:
          command: the program to run. The number of the pipe's file descriptor is appended to it as an argument.
          arguments: further arguments, appended after that number. The list is read when the process starts.
          first: bytes to send to each new process before its first request; empty sends nothing.
          **settings: further arguments of `subprocess.Popen`.
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
        """Prepares a process that runs a Python module, which gets its requests from `pipe_of_trainer()`.

        The process can import all modules that this process can, because it may unpickle objects of the user's classes. In the
        new process, JAX uses only the CPU.

        Args:
          module: name of the module.
          first, arguments: see `WorkerProcess`.
          environment: further environment variables for the process.
        """
        own = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), "JAX_PLATFORMS": "cpu"}
        env = {**os.environ, **own, **(environment or {})}
        return cls([sys.executable, "-P", "-m", module], arguments, first=first, env=env)

    def ask(self, request: bytes) -> bytes:
        """Sends a request and returns the answer. Concurrent calls take turns. Raises EndedError if the process exits."""
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
        """Kills the process at once, and makes sure that it doesn't start again. Any thread may call this."""
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
        if self._is_over:  # another thread called `stop` in the meantime
            self._process.kill()
        if self._first:
            ours.send_bytes(self._first)
        return ours

    def _ended(self, error: Exception) -> EndedError:
        """Returns the error for a process that could not start or has closed its pipe. `error`: the exception it caused."""
        status, has_started = None, self._process is not None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self._process.wait(_GRACE_SECONDS)  # it is ending by itself, with a status that says why
        self._end()
        if status is not None:
            return EndedError.of_status(status)
        return EndedError("closed its pipe and went on" if has_started else f"could not be started ({error})")

    def _end(self) -> None:
        process, pipe, self._process, self._pipe = self._process, self._pipe, None, None
        if pipe is not None:
            pipe.close()
        if process is not None:
            process.kill()
            process.wait()


def pipe_of_trainer() -> Connection:
    """Returns this worker process's pipe to the trainer. Reading from it raises EOFError once the trainer has exited.

    The trainer must have started this process by `WorkerProcess.of_module`.
    """
    return Connection(int(sys.argv[1]))
