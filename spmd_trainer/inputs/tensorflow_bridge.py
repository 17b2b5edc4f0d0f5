"""Imports TensorFlow when an input first needs it, and suppresses TensorFlow's log messages."""

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
    """Sets environment variables that suppress TensorFlow's log messages, unless the user has set these variables.

    It must be called before TensorFlow is imported.
    """
    # Importing JAX sets a lower log level. If JAX was imported first, as in notebooks, the user did not choose this level.
    if "jax" in sys.modules and os.environ.get("TF_CPP_MIN_LOG_LEVEL") == _LEVEL_OF_JAX:
        del os.environ["TF_CPP_MIN_LOG_LEVEL"]
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def check_tensorflow_installed() -> None:
    """Raises UserError with the install command if TensorFlow is not installed. Does not import TensorFlow."""
    if importlib.util.find_spec("tensorflow") is None:
        raise UserError(
            "this input needs TensorFlow, which is not installed. Install it with: "
            f"{installation.pip_install()} tensorflow-cpu"
        )


@functools.cache  # hiding the GPUs again would take as long as parsing a small batch
def import_tensorflow() -> Any:
    """Imports TensorFlow without its log messages, and hides the GPUs from it. Raises UserError if it is not installed."""
    check_tensorflow_installed()
    keep_quiet()
    import tensorflow as tf

    with contextlib.suppress(RuntimeError):  # already initialized; its devices can't be changed
        tf.config.set_visible_devices([], "GPU")
    return tf


def plain(error: Any) -> str:
    """Returns the message of a TensorFlow error without the names of operations."""
    return re.sub(r"^\{\{.*?\}\} |Name: <unknown>, | \[Op:\w+\]$| name: *$", "", error.message).strip()
