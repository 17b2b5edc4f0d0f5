"""The cache folder, which contains indices of input files, and copies of remote files for libraries that read only local ones.

The folder is `$SPMD_TRAINER_CACHE`, or `spmd-trainer` in the user's cache folder. It can be deleted at any time.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable

import numpy as np
from absl import logging
from etils import epath

from spmd_trainer.sharding.messages import short_hash
from spmd_trainer.storage import is_remote, reading
from spmd_trainer.storage.files import replacing

VARIABLE = "SPMD_TRAINER_CACHE"
_COPY_BYTES = 2**24
# Indices of up to this many bytes are read into memory; larger ones are memory-mapped.
_HELD_BYTES = 2**23


def cache_folder() -> pathlib.Path:
    """Returns the path of the cache folder, which may not exist yet."""
    given = os.environ.get(VARIABLE)
    if given:
        return pathlib.Path(given)
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "spmd-trainer"


def local_copy(path: str) -> str:
    """Returns a local path for a file: `path` itself if it is local, otherwise a copy in the cache folder.

    Raises:
      OSError: the file can't be read, or the cache folder is full.
    """
    if not is_remote(path):
        return path
    target = cache_folder() / "copies" / f"{_key(path)}-{os.path.basename(path)}"
    if not target.exists():
        logging.info("copying %s to %s", path, target)
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            replacing(epath.Path(target)) as temporary,
            open(temporary, "wb", opener=_private) as file,
            epath.Path(path).open("rb") as remote,
        ):
            while block := remote.read(_COPY_BYTES):
                file.write(block)
    return str(target)


def cached_index(path: str, kind: str, make: Callable[[], np.ndarray], *, version: str | None = None) -> np.ndarray:
    """Returns the index of a file: an array that `make` computes. It is cached until the file's `reading.version` changes.

    A large index is memory-mapped from the cache folder. If the folder can't be written, logs a warning and keeps the index in
    memory.

    Args:
      path: the file.
      kind: kind of index, e.g. 'lines'; part of the index's file name in the cache.
      make: function that computes the index.
      version: the file's `reading.version`, if it is known; otherwise None.
    """
    target = cache_folder() / "index" / f"{_key(path, version)}-{kind}.npy"
    with contextlib.suppress(OSError, ValueError, EOFError):  # it is missing, or a machine stopped while it was written
        return _mapped(target)
    index = make()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(epath.Path(target)) as temporary, open(temporary, "wb", opener=_private) as file:
            np.save(file, index)
        return _mapped(target)
    except OSError as error:
        logging.log_first_n(
            logging.WARNING,
            "indices of files, e.g. of %s, can't be kept in %s, so they will be made at every start: %s",
            1,
            path,
            target.parent,
            error,
        )
        return index


def _mapped(path: pathlib.Path) -> np.ndarray:
    """Loads a stored array. Small arrays are read into memory, because a memory map keeps its file open."""
    found: np.ndarray = np.load(path, mmap_mode="r")
    return found if found.nbytes > _HELD_BYTES else np.array(found)


def _private(path: str, flags: int) -> int:
    """Opens a file with permissions for this user only, because the cache folder may be shared and the data private."""
    return os.open(path, flags, 0o600)


def _key(path: str, version: str | None = None) -> str:
    """Returns the name of a file's version in the cache. `version`: the file's `reading.version`; None if it isn't known."""
    name = path if is_remote(path) else os.path.abspath(path)
    return short_hash(f"{name}:{version or reading.version(path)}", 24)
