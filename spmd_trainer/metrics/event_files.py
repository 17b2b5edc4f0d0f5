"""TensorBoard event files, written by TensorBoard's own code without TensorFlow.

`tensorboard.summary.writer.event_file_writer` and clu's `SummaryWriter` import TensorFlow where it is installed, which takes
seconds and hundreds of MB. TensorBoard's record writer and its scalar summaries do not.
"""

from __future__ import annotations

import io
import itertools
import os
import socket
import time
from collections.abc import Mapping

from etils import epath
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.scalar import summary_v2
from tensorboard.summary.writer import record_writer

from spmd_trainer.storage.append import open_append

# Numbers the event files of this process: the names of two files opened within a second differ, and sort in order of time.
_FILE_NUMBERS = itertools.count()


class EventFile:
    """One event file, which TensorBoard shows as part of the run named after its directory.

    On a file system, the file is opened for every write and closed after it: nothing is buffered here, so TensorBoard sees each
    step at once. In an object store TensorBoard sees it after a few seconds, or after `flush`.
    """

    def __init__(self, directory: epath.Path, *, replaces_from: int | None = None):
        """Chooses a file name that no other process uses. The first write creates the file.

        Args:
          directory: where to write.
          replaces_from: TensorBoard forgets what earlier files of the directory have of this step and later ones: a run that
            was killed does the steps after its last checkpoint again. None forgets nothing.
        """
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_FILE_NUMBERS):06d}.v2"
        header = event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2")
        self._file = open_append(directory / name, header=_record(header), separate_files=True)
        self._begin = b""  # not in the header, which every part in an object store begins with
        if replaces_from is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._begin = _record(event_pb2.Event(wall_time=time.time(), step=replaces_from, session_log=start))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Appends the scalars of one step.

        Args:
          step: the training step.
          scalars: values by tag; stored as float32.

        Raises:
          OSError: the file cannot be written.
        """
        summary = summary_pb2.Summary()
        for tag, value in scalars.items():
            summary.MergeFrom(summary_v2.scalar_pb(tag, value))
        self.add(step, summary)

    def add(self, step: int, summary: summary_pb2.Summary) -> None:
        """Appends a summary of any kind; see `event_summaries`.

        Args:
          step: the training step.
          summary: TensorBoard's message.

        Raises:
          OSError: the file cannot be written.
        """
        self._file.write(self._begin + _record(event_pb2.Event(wall_time=time.time(), step=step, summary=summary)))
        self._begin = b""

    def flush(self) -> None:
        """Makes everything visible to TensorBoard.

        Raises:
          OSError: the file cannot be written.
        """
        self._file.flush()


def _record(event: event_pb2.Event) -> bytes:
    content = io.BytesIO()
    record_writer.RecordWriter(content).write(event.SerializeToString())
    return content.getvalue()
