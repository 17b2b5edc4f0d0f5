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

import numpy as np
from etils import epath
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.histogram import metadata as histogram_metadata
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
from tensorboard.plugins.hparams import metadata as hparams_metadata
from tensorboard.plugins.hparams import summary_v2 as hparams_v2
from tensorboard.plugins.image import metadata as image_metadata
from tensorboard.plugins.scalar import summary_v2
from tensorboard.plugins.text import summary_v2 as text_v2
from tensorboard.summary.writer import record_writer
from tensorboard.util import tensor_util

from spmd_trainer.storage.append import open_append

# Numbers this process's event files, so that names of files opened within a second differ and sort by time.
_FILE_NUMBERS = itertools.count()


class EventFile:
    """One event file; TensorBoard shows it as part of the run named after its directory.

    On a file system, the file is opened and closed for every write, without buffering, so TensorBoard sees each step at once. On
    an object store, TensorBoard sees a step after a few seconds, or after `flush`.
    """

    def __init__(self, directory: epath.Path, *, replaces_from: int | None = None):
        """Chooses a file name that no other process uses. The first write creates the file.

        Args:
          replaces_from: TensorBoard discards this step and later ones from the directory's earlier event files, because a run
            that was killed repeats the steps after its last checkpoint. None discards nothing.
        """
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_FILE_NUMBERS):06d}.v2"
        header = event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2")
        self._file = open_append(directory / name, header=_record(header), separate_files=True)
        self._begin = b""  # not in the header, which every part of the file repeats in an object store
        if replaces_from is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._begin = _record(event_pb2.Event(wall_time=time.time(), step=replaces_from, session_log=start))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Appends the scalars of one step, {tag: value}, as float32.

        Raises:
          OSError: the file cannot be written.
        """
        summary = summary_pb2.Summary()
        for tag, value in scalars.items():
            summary.MergeFrom(summary_v2.scalar_pb(tag, value))
        self.add(step, summary)

    def add(self, step: int, summary: summary_pb2.Summary) -> None:
        """Appends a summary that was made by a function of this module, e.g. by `image`.

        Raises:
          OSError: the file cannot be written.
        """
        self._file.write(self._begin + _record(event_pb2.Event(wall_time=time.time(), step=step, summary=summary)))
        self._begin = b""

    def flush(self) -> None:
        """Makes all summaries written so far visible to TensorBoard.

        Raises:
          OSError: the file cannot be written.
        """
        self._file.flush()


def _record(event: event_pb2.Event) -> bytes:
    content = io.BytesIO()
    record_writer.RecordWriter(content).write(event.SerializeToString())
    return content.getvalue()


_STATUSES = {"finished": api_pb2.STATUS_SUCCESS, "failed": api_pb2.STATUS_FAILURE, "stopped": api_pb2.STATUS_UNKNOWN}


def text(tag: str, content: str) -> summary_pb2.Summary:
    summary: summary_pb2.Summary = text_v2.text_pb(tag, content)
    return summary


def image(tag: str, png: bytes, size: tuple[int, ...]) -> summary_pb2.Summary:
    """Makes an image summary. `png` is the content of a PNG file; `size` is (height, width)."""
    height, width = size
    content = np.array([str(width).encode(), str(height).encode(), png], dtype=object)
    metadata = image_metadata.create_summary_metadata(display_name=None, description="")
    return _of_tensor(tag, content, metadata)


def histogram(tag: str, counts: np.ndarray, edges: np.ndarray) -> summary_pb2.Summary:
    """Makes a histogram summary of `counts` [bins] with ascending `edges` [bins + 1]."""
    buckets = np.stack([edges[:-1], edges[1:], counts], axis=1).astype(np.float64)
    metadata = histogram_metadata.create_summary_metadata(display_name=None, description="")
    return _of_tensor(tag, buckets, metadata)


def hparams(values: Mapping[str, bool | int | float | str | None], *, trial: str, began: float) -> summary_pb2.Summary:
    """Makes the summary of a run's hyperparameters. TensorBoard shows the value None as 'None'.

    Args:
      trial: ID of the trial in TensorBoard's HParams dashboard.
      began: start of the run, in seconds since 1970.
    """
    shown = {name: "None" if value is None else value for name, value in values.items()}
    summary: summary_pb2.Summary = hparams_v2.hparams_pb(shown, trial_id=trial, start_time_secs=began)
    return summary


def hparams_end(status: str) -> summary_pb2.Summary:
    """Makes the hyperparameter summary that marks the end of the run; `status` is 'finished', 'failed' or 'stopped'."""
    end = plugin_data_pb2.SessionEndInfo(status=_STATUSES[status], end_time_secs=time.time())
    metadata = hparams_metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(session_end_info=end))
    tag = hparams_metadata.SESSION_END_INFO_TAG
    value = summary_pb2.Summary.Value(tag=tag, metadata=metadata, tensor=hparams_metadata.NULL_TENSOR)
    return summary_pb2.Summary(value=[value])


def _of_tensor(tag: str, values: np.ndarray, metadata: summary_pb2.SummaryMetadata) -> summary_pb2.Summary:
    tensor = tensor_util.make_tensor_proto(values)
    return summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)])
