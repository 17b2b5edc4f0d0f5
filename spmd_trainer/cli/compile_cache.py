"""Keeps what was compiled from one run to the next: JAX's persistent compilation cache, on unless it is switched off.

Several processes may share the folder: all read, and JAX lets only process 0 write. What JAX can't read back it compiles.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

from absl import logging

# Seconds. JAX's own threshold of 1 would leave out the steps of small models and most evaluation and decode steps.
_MIN_COMPILE_SECONDS = 0.1


def default_directory() -> pathlib.Path:
    """Returns the user's own folder: a cache holds code that will be run, so it is shared with no one else."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return pathlib.Path(base).expanduser() / "spmd-trainer" / "jax"


def enable(directory: str | None) -> str | None:
    """Switches the cache on for this process. Before anything is compiled; touches no device.

    What JAX was told itself (JAX_COMPILATION_CACHE_DIR, jax_enable_compilation_cache) comes before the default folder, and
    its thresholds, where they are set, before the ones here. A folder that can't be written is a warning.

    Args:
      directory: where to; None for JAX's own setting or else the default; '' for no cache at all.

    Returns:
      The folder in use, or None.
    """
    import jax

    config: Any = jax.config  # its fields are made at run time
    if directory == "":
        config.update("jax_compilation_cache_dir", None)
        return None
    if directory is None and (config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache):
        return config.jax_compilation_cache_dir
    path = directory if directory and "://" in directory else _local(directory)
    if path is None:
        return None
    config.update("jax_compilation_cache_dir", path)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_SECONDS)
    return path


def _local(directory: str | None) -> str | None:
    """Makes the folder; None, with a warning, where nothing can be written."""
    path = pathlib.Path(directory).expanduser().absolute() if directory else default_directory()
    try:
        # For this user alone: whoever can write here can have this user run their code.
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        writable = os.access(path, os.W_OK | os.X_OK)
        reason = "not writable"
    except (OSError, RuntimeError) as error:  # RuntimeError: a home folder that nothing names
        writable, reason = False, str(error)
    if writable:
        return str(path)
    logging.warning(
        "compiled programs are not kept: %s (%s); give --jax_cache_dir=DIR, or --jax_cache_dir= for none", path, reason
    )
    return None
