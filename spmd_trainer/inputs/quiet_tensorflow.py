"""Keeps TensorFlow's C++ code from writing notices to the terminal when it is imported."""

from __future__ import annotations

import os
import sys

# At log levels below 2, TensorFlow lists CPU instructions it was not built for. It writes the oneDNN notice at every level
# unless oneDNN is off, which costs nothing here: TensorFlow only reads data.
_ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_ENABLE_ONEDNN_OPTS": "0"}


_LEVEL_OF_JAX = "1"


def keep_quiet() -> None:
    """Sets TensorFlow's environment variables if the user has not set them. Call it before TensorFlow is imported."""
    # JAX sets a lower level when it is imported. Who imports JAX first, as notebooks do, has not asked for notices.
    if "jax" in sys.modules and os.environ.get("TF_CPP_MIN_LOG_LEVEL") == _LEVEL_OF_JAX:
        del os.environ["TF_CPP_MIN_LOG_LEVEL"]
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
