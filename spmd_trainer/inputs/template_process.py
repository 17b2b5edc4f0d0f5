"""The process that renders chat templates: started when it is first needed, and again after a template has ended it."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from typing import Any, BinaryIO, cast

from spmd_trainer.inputs import template_worker
from spmd_trainer.inputs.template_worker import LENGTH_BYTES, Request

# Kinds of failures that the worker can't tell itself.
TIME, ENDED = "time", "ended"
# How long a worker may take to end once its input has ended.
_GRACE_SECONDS = 5


class _Worker:
    """The process, and the lock of those who use it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: Request) -> dict[str, Any]:
        """Returns the worker's answer, see `template_worker`; or a failure of the kinds `TIME` and `ENDED`.

        Raises:
          TypeError, AttributeError, pickle.PicklingError: a variable is a function or something else that can't be sent.
        """
        content = pickle.dumps(tuple(request))
        if self._process is None:
            self._process = _start()
        try:
            answer = _exchange(self._process, content)
        except BaseException:  # Ctrl-C between a request and its answer too
            self.stop(kill=True)
            raise
        if answer is not None:
            return cast(dict[str, Any], json.loads(answer))
        status = self._process.wait()
        self.stop()
        if status == -signal.SIGPROF:
            return {"failure": TIME, "reason": ""}
        return {"failure": ENDED, "reason": f"signal {-status}" if status < 0 else f"status {status}"}

    def stop(self, *, kill: bool = False) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is None:
            return
        if kill:
            process.kill()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(BrokenPipeError):  # half a request may be left
                cast(BinaryIO, pipe).close()
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()


def _start() -> subprocess.Popen[bytes]:
    # Without site-packages' start-up code and environment variables of Python. A session of its own: Ctrl-C is for the trainer.
    command = [sys.executable, "-I", "-S", template_worker.__file__, *sys.path]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True)


def _exchange(process: subprocess.Popen[bytes], content: bytes) -> bytes | None:
    """Sends a request and returns its answer; None if the process ended."""
    requests, answers = cast(BinaryIO, process.stdin), cast(BinaryIO, process.stdout)
    try:
        requests.write(len(content).to_bytes(LENGTH_BYTES, "little") + content)
        requests.flush()
    except BrokenPipeError:
        return None
    head = answers.read(LENGTH_BYTES)
    size = int.from_bytes(head, "little")
    answer = answers.read(size) if len(head) == LENGTH_BYTES else b""
    return answer if answer and len(answer) == size else None


_worker = _Worker()


def ask(request: Request) -> dict[str, Any]:
    """Sends a request to the worker and returns its answer, see `_Worker.ask`."""
    with _worker.lock:
        return _worker.ask(request)


def _forget() -> None:
    """A forked process starts a worker of its own."""
    global _worker
    _worker = _Worker()


os.register_at_fork(after_in_child=_forget)
atexit.register(lambda: _worker.stop())
