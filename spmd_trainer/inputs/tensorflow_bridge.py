"""TensorFlow, for the inputs that need it: imported when they first do, never before."""

from __future__ import annotations

import contextlib
import os
from typing import Any


def import_tensorflow() -> Any:
    """TensorFlow, imported now, quiet, and away from the accelerators, which are JAX's."""
    for name, value in (("TF_CPP_MIN_LOG_LEVEL", "2"), ("TF_ENABLE_ONEDNN_OPTS", "0")):
        os.environ.setdefault(name, value)
    import tensorflow as tf

    with contextlib.suppress(RuntimeError):  # somebody else has already set TensorFlow up: then it is theirs
        tf.config.set_visible_devices([], "GPU")
    return tf
