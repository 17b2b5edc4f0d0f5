"""Summaries of TensorBoard beside scalars: texts, pictures, histograms, hyperparameters. Without TensorFlow."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
from tensorboard.compat.proto import summary_pb2
from tensorboard.plugins.histogram import metadata as histogram_metadata
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
from tensorboard.plugins.hparams import metadata as hparams_metadata
from tensorboard.plugins.hparams import summary_v2 as hparams_v2
from tensorboard.plugins.image import metadata as image_metadata
from tensorboard.plugins.text import summary_v2 as text_v2
from tensorboard.util import tensor_util

_STATUSES = {
    "finished": api_pb2.STATUS_SUCCESS,
    "failed": api_pb2.STATUS_FAILURE,
    "stopped": api_pb2.STATUS_UNKNOWN,
}


def text(tag: str, content: str) -> summary_pb2.Summary:
    """Returns a text, which TensorBoard shows as Markdown."""
    summary: summary_pb2.Summary = text_v2.text_pb(tag, content)
    return summary


def image(tag: str, png: bytes, size: tuple[int, ...]) -> summary_pb2.Summary:
    """Returns a picture.

    Args:
      tag: its name.
      png: the PNG file.
      size: (height, width).
    """
    height, width = size
    content = np.array([str(width).encode(), str(height).encode(), png], dtype=object)
    metadata = image_metadata.create_summary_metadata(display_name=None, description="")
    return _of_tensor(tag, content, metadata)


def histogram(tag: str, counts: np.ndarray, edges: np.ndarray) -> summary_pb2.Summary:
    """Returns a histogram.

    Args:
      tag: its name.
      counts: [bins].
      edges: [bins + 1], rising.
    """
    buckets = np.stack([edges[:-1], edges[1:], counts], axis=1).astype(np.float64)
    metadata = histogram_metadata.create_summary_metadata(display_name=None, description="")
    return _of_tensor(tag, buckets, metadata)


def hparams(values: Mapping[str, bool | int | float | str | None], *, trial: str, began: float) -> summary_pb2.Summary:
    """Returns a run's hyperparameters; None is shown as 'None'.

    Args:
      values: by name.
      trial: the trial that the run belongs to.
      began: when the run began, in seconds since 1970.
    """
    shown = {name: "None" if value is None else value for name, value in values.items()}
    summary: summary_pb2.Summary = hparams_v2.hparams_pb(shown, trial_id=trial, start_time_secs=began)
    return summary


def hparams_end(status: str) -> summary_pb2.Summary:
    """Returns the end of the run whose hyperparameters are in the same directory.

    Args:
      status: 'finished', 'failed' or 'stopped'.
    """
    end = plugin_data_pb2.SessionEndInfo(status=_STATUSES[status], end_time_secs=time.time())
    metadata = hparams_metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(session_end_info=end))
    tag = hparams_metadata.SESSION_END_INFO_TAG
    value = summary_pb2.Summary.Value(tag=tag, metadata=metadata, tensor=hparams_metadata.NULL_TENSOR)
    return summary_pb2.Summary(value=[value])


def _of_tensor(tag: str, values: np.ndarray, metadata: summary_pb2.SummaryMetadata) -> summary_pb2.Summary:
    tensor = tensor_util.make_tensor_proto(values)
    return summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)])
