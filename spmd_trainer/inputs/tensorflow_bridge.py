"""Imports TensorFlow on first use, and keeps it quiet."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import sys
from typing import Any

from spmd_trainer.errors import UserError, installation

# At log levels below 2, TensorFlow lists CPU instructions it was not built for. It writes the oneDNN notice at every level
# unless oneDNN is off, which costs nothing here: TensorFlow only reads data.
_ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_ENABLE_ONEDNN_OPTS": "0"}


_LEVEL_OF_JAX = "1"


def keep_quiet() -> None:
    """Sets TensorFlow's environment variables unless the user has set them. Call it before TensorFlow is imported."""
    # Importing JAX sets a lower level. If JAX was imported first, as in notebooks, the user did not ask for it.
    if "jax" in sys.modules and os.environ.get("TF_CPP_MIN_LOG_LEVEL") == _LEVEL_OF_JAX:
        del os.environ["TF_CPP_MIN_LOG_LEVEL"]
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def check_tensorflow_installed() -> None:
    """Raises UserError with the install command if TensorFlow can't be imported. Does not import it."""
    if importlib.util.find_spec("tensorflow") is None:
        raise UserError(
            "this input needs TensorFlow, which is not installed. Install it with: "
            f"{installation.pip_install()} tensorflow-cpu"
        )


@functools.cache  # hiding the GPUs again would take as long as parsing a small batch
def import_tensorflow() -> Any:
    """Imports TensorFlow without its log messages, and hides the GPUs from it, because JAX uses them.

    Raises:
      UserError: TensorFlow is not installed.
    """
    check_tensorflow_installed()
    keep_quiet()
    import tensorflow as tf

    with contextlib.suppress(RuntimeError):  # already initialised; its devices can't be changed
        tf.config.set_visible_devices([], "GPU")
    return tf


def plain(error: Any) -> str:
    """Returns TensorFlow's message without the names of operations."""
    return re.sub(r"^\{\{.*?\}\} |Name: <unknown>, | \[Op:\w+\]$| name: *$", "", error.message).strip()
