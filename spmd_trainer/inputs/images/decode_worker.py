"""Decodes images in processes beside the trainer: `augment` in Python would hold its interpreter's lock.

    python -m spmd_trainer.inputs.images.decode_worker FILE_DESCRIPTOR

Threads of the trainer read the files and send their content. Grain's own worker processes aren't used: they open every
source again, start again at each `reset`, and live on if the trainer is killed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import queue
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy as np

from spmd_trainer.errors import UserError
from spmd_trainer.inputs.corpus.part_worker import start_module
from spmd_trainer.inputs.images.decode import Decoder, DecodingError
from spmd_trainer.inputs.tensorflow_bridge import import_tensorflow

# First byte of an answer: pixels, or the message of a UserError or of a DecodingError.
_PIXELS, _BAD, _FAILED = range(3)
_INDEX_BYTES = 8
# How long a process may take to end once it has closed its pipe.
_GRACE_SECONDS = 5


class DecodeWorkers:
    """Processes that decode images as `decoder` does. Each starts with its first image, and after its death with another one."""

    def __init__(self, count: int, decoder: Decoder):
        """Prepares `count` processes. Raises UserError if `augment` can't be sent to them."""
        import cloudpickle  # installed with Grain; it also sends lambdas, and functions of notebooks and scripts

        try:
            task = cloudpickle.dumps(decoder)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise UserError(f"augment can't be sent to other processes: {error}; set workers=0") from error
        self._shape = decoder.shape
        workers = [_Worker(task) for _ in range(count)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in workers:
            self._idle.put(worker)
        # Index of the image at which a process died, and how.
        self._death: tuple[int, str] | None = None
        weakref.finalize(self, _stop, workers)

    def revive(self) -> None:
        """Lets images be decoded again after the death of a process."""
        self._death = None

    def decode(self, content: bytes, index: int) -> np.ndarray:
        """As `Decoder.decode`. Several threads may call it. Also raises DecodingError if a process ends, until `revive`."""
        worker = self._idle.get()
        try:
            # Threads have later images ahead, which may be as deadly.
            if self._death is not None and index > self._death[0]:
                raise DecodingError(f"was not decoded, because at an earlier image {self._death[1]}")
            answer = worker.ask(index.to_bytes(_INDEX_BYTES, "little") + content)
        except DecodingError as error:
            if self._death is None or index < self._death[0]:
                self._death = index, str(error)
            raise
        finally:
            self._idle.put(worker)
        if answer[0] == _PIXELS:
            return np.frombuffer(answer, np.uint8, offset=1).reshape(self._shape)
        raise (UserError if answer[0] == _BAD else DecodingError)(answer[1:].decode())


class _Worker:
    """One process, used by one thread at a time."""

    def __init__(self, task: bytes):
        self._task = task
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    def ask(self, request: bytes) -> bytes:
        """Returns the answer to a request. Raises DecodingError if the process ends."""
        try:
            if self._pipe is None:
                self._start()
            assert self._pipe is not None
            self._pipe.send_bytes(request)
            return self._pipe.recv_bytes()
        except (EOFError, OSError) as error:
            raise DecodingError(f"the process that decoded this image {self._end()}") from error
        except BaseException:  # Ctrl-C between a request and its answer
            self.stop()
            raise

    def _start(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        with theirs:
            number = theirs.fileno()
            self._process = start_module(__name__, [str(number)], {}, pass_fds=[number], stdin=subprocess.DEVNULL)
        self._pipe.send_bytes(self._task)

    def stop(self) -> int | None:
        """Ends the process; returns its status, None if there is no process."""
        process, pipe, self._process, self._pipe = self._process, self._pipe, None, None
        if pipe is not None:
            pipe.close()
        if process is None:
            return None
        process.kill()
        return process.wait()

    def _end(self) -> str:
        """Ends the process, whose pipe is closed, and returns how it ended: 'ended with status 1'."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_SECONDS)  # it is ending by itself, with a status that says why
        status = self.stop()
        if status is None:
            return "could not be started"
        if status >= 0:
            return f"ended with status {status}; its messages are above"
        hint = ", perhaps for want of memory" if status == -signal.SIGKILL else ""
        return f"was ended by {signal.Signals(-status).name}{hint}"


def _stop(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.stop()


def main(pipe: Connection) -> None:
    """Answers the trainer's requests until it closes the pipe or ends."""
    tf = import_tensorflow()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    task = pipe.recv_bytes()
    decoder: Decoder | None = None
    try:
        decoder = pickle.loads(task)
        problem = ""
    except (AttributeError, ImportError) as error:
        problem = f"another process can't import augment ({error}); define it in a module, or set workers=0"
    while True:
        request = pipe.recv_bytes()
        index, content = int.from_bytes(request[:_INDEX_BYTES], "little"), request[_INDEX_BYTES:]
        try:
            if decoder is None:
                raise DecodingError(problem)
            answer = bytes([_PIXELS]) + decoder.decode(content, index).tobytes()
        except UserError as error:
            kind = _FAILED if isinstance(error, DecodingError) else _BAD
            answer = bytes([kind]) + str(error).encode(errors="replace")
        pipe.send_bytes(answer)


if __name__ == "__main__":
    with Connection(int(sys.argv[1])) as opened, contextlib.suppress(EOFError, ConnectionError):
        main(opened)
