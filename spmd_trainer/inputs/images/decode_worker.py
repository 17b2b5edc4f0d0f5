"""Decodes images in worker processes, because an `augment` in Python would hold the trainer's interpreter lock (GIL).

Threads of the trainer read the files and send their content to the workers. Grain's own worker processes aren't used: they open
every source again, start again at each `reset`, and keep running if the trainer is killed.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy as np

from spmd_trainer.errors import UserError
from spmd_trainer.inputs.images.decode import Decoder, DecodingError
from spmd_trainer.inputs.tensorflow_bridge import import_tensorflow
from spmd_trainer.inputs.worker_process import EndedError, WorkerProcess, pipe_of_trainer

# First byte of an answer: pixels, or the message of a UserError or of a DecodingError.
_PIXELS, _BAD, _FAILED = range(3)
_INDEX_BYTES = 8


class DecodeWorkers:
    """Worker processes that decode images. A process is started at its first image, and again at the next one if it died."""

    def __init__(self, count: int, decoder: Decoder):
        """Prepares `count` processes. Raises UserError if `augment` can't be sent to them."""
        import cloudpickle  # installed with Grain; it also sends lambdas, and functions of notebooks and scripts

        try:
            task = cloudpickle.dumps(decoder)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise UserError(f"augment can't be sent to other processes: {error}; set workers=0") from error
        self._shape = decoder.shape
        workers = [WorkerProcess.of_module(__name__, task) for _ in range(count)]
        self._idle: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        for worker in workers:
            self._idle.put(worker)
        # Index of the image at which a process died, and a text that says how it died.
        self._death: tuple[int, str] | None = None
        weakref.finalize(self, _stop, workers)

    def revive(self) -> None:
        """Allows images to be decoded again after a process has died."""
        self._death = None

    def decode(self, content: bytes, index: int) -> np.ndarray:
        """Decodes an image as `Decoder.decode` does, with the same errors. Thread-safe.

        Also raises DecodingError if the process dies, and from then on for each image with a higher index, until `revive` is
        called.
        """
        worker = self._idle.get()
        try:
            # Other threads already wait with later images, which may kill a process too.
            if self._death is not None and index > self._death[0]:
                raise DecodingError(f"was not decoded, because at an earlier image {self._death[1]}")
            answer = worker.ask(index.to_bytes(_INDEX_BYTES, "little") + content)
        except EndedError as error:
            has_said = error.status is not None and error.status >= 0
            death = f"the process that decoded this image {error}{'; its messages are above' if has_said else ''}"
            if self._death is None or index < self._death[0]:
                self._death = index, death
            raise DecodingError(death) from error
        finally:
            self._idle.put(worker)
        if answer[0] == _PIXELS:
            return np.frombuffer(answer, np.uint8, offset=1).reshape(self._shape)
        raise (UserError if answer[0] == _BAD else DecodingError)(answer[1:].decode())


def _stop(workers: Sequence[WorkerProcess]) -> None:
    for worker in workers:
        worker.stop()


def main(pipe: Connection) -> None:
    """Runs the worker process: decodes the images that the trainer sends, until the trainer closes the pipe or exits."""
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
    with pipe_of_trainer() as opened, contextlib.suppress(EOFError, ConnectionError):
        main(opened)
