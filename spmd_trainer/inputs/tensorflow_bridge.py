"""Imports TensorFlow for the inputs that need it, when they first need it."""

from __future__ import annotations

import contextlib
import importlib.util
from typing import Any

from spmd_trainer.errors import UserError, installation
from spmd_trainer.inputs import quiet_tensorflow


def check_tensorflow_installed() -> None:
    """Checks that TensorFlow can be imported, without importing it.

    Raises:
      UserError: TensorFlow is not installed; the message has the command that installs it.
    """
    if importlib.util.find_spec("tensorflow") is None:
        raise UserError(
            "this input needs TensorFlow, which is not installed. Install it with: "
            f"{installation.pip_install()} tensorflow-cpu"
        )


def import_tensorflow() -> Any:
    """Imports TensorFlow without its log messages and hides the GPUs from it, because JAX uses them.

    Raises:
      UserError: TensorFlow is not installed.
    """
    check_tensorflow_installed()
    quiet_tensorflow.keep_quiet()
    import tensorflow as tf

    with contextlib.suppress(RuntimeError):  # TensorFlow is already initialised; its devices can no longer be changed
        tf.config.set_visible_devices([], "GPU")
    return tf
