"""Locks the token stores in a local folder while they are used, and removes unused stores to limit their total size.

A process that uses a store holds a shared lock (flock) on a file in the store until the process exits. To remove a store, a
process needs an exclusive lock on this file, and renames the store while it holds the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from typing import BinaryIO

from absl import logging

from spmd_trainer.sharding.messages import bytes_text

# File that the processes using a store have locked. Its modification time is when the last of them began to use the store.
_IN_USE = "in-use"
_STORE = re.compile(r"corpus-[0-9a-f]{24}")
_OWN = re.compile(r"tokens-\d+-of-\d+\.(arrow|json)|(corpus|making|failed)\.json|\.making-.*|\..*\.writing|lock|in-use")
# Prefix of the name of a store that is being removed. A process that is killed meanwhile leaves such a folder behind.
_REMOVED = ".removed-"


def hold(folder: str) -> BinaryIO | None:
    """Keeps a store from being removed until the returned file is closed, or this process exits. Creates the folder if missing.

    Returns:
      The locked file. None if this process can't write to the folder, or the folder's file system has no locks; another process
      may then remove the store.

    Raises:
      OSError: the folder can't be created.
    """
    path = os.path.join(folder, _IN_USE)
    while True:
        file, held = None, False
        try:
            os.makedirs(folder, exist_ok=True)
            file = open(path, "a+b")  # noqa: SIM115  # NFS gives a shared lock only on what can be read
            fcntl.flock(file, fcntl.LOCK_SH)
            if held := _is_at(file, path):
                os.utime(path)
                return file
        except (FileNotFoundError, FileExistsError):  # another process has just removed the folder
            if os.path.lexists(folder) and not os.path.isdir(folder):
                raise
        except OSError as error:
            if not os.path.isdir(folder):
                raise
            logging.log_first_n(
                logging.WARNING, "%s can't be locked, so another run may remove it: %s", 1, folder, error
            )
            return None
        finally:
            if file is not None and not held:
                file.close()


def make_room(root: str, limit: int, needed: int = 0) -> None:
    """Removes unused stores, the longest unused first, until all stores together have at most `limit - needed` bytes.

    Removes neither other folders nor stores that have files of other programs. Does not follow links.

    Args:
      root: the local folder of the stores.
      limit: maximum total size of the stores, in bytes.
      needed: bytes to leave free below the limit.
    """
    with os.scandir(root) as entries:
        for entry in entries:
            if entry.name.startswith(_REMOVED) and entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
    stores = sorted(_stores(root))
    total, room = sum(size for _, _, size in stores), max(0, limit - needed)
    for _, path, size in stores:
        if total <= room:
            return
        if _remove(path):
            total -= size
            logging.info("removed %s (%s): --data_cache_limit=%s", path, *map(bytes_text, (size, limit)))
    if total > room:
        logging.warning(
            "the token stores in %s that are in use have %s, and %s are needed beside them: more than --data_cache_limit=%s",
            *(root, bytes_text(total), bytes_text(needed), bytes_text(limit)),
        )


def _stores(root: str) -> Iterator[tuple[float, str, int]]:
    """Yields (time of last use in seconds since 1970, folder, size in bytes) of the stores without files of other programs."""
    with os.scandir(root) as entries:
        folders = [one.path for one in entries if _STORE.fullmatch(one.name) and one.is_dir(follow_symlinks=False)]
    for folder in folders:
        try:
            names = os.listdir(folder)
            used = os.lstat(os.path.join(folder, _IN_USE) if _IN_USE in names else folder).st_mtime
        except OSError as error:  # another process has just removed it, or it is another user's
            logging.log_first_n(logging.WARNING, "%s is not removed: %s", 1, folder, error)
            continue
        if foreign := [name for name in names if not _OWN.fullmatch(name)]:
            logging.warning("%s is not removed, because it holds %s", folder, min(foreign))
            continue
        size = 0
        for at, _, files in os.walk(folder):
            for name in files:
                with contextlib.suppress(FileNotFoundError):  # a worker has finished its part
                    size += os.lstat(os.path.join(at, name)).st_size
        yield used, folder, size


def _remove(folder: str) -> bool:
    """Removes a store unless it is in use. Returns True if the store is gone."""
    path = os.path.join(folder, _IN_USE)
    try:
        with open(path, "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_at(file, path):
                return False
            aside = os.path.join(os.path.dirname(folder), f"{_REMOVED}{uuid.uuid4().hex}")
            os.rename(folder, aside)
    except FileNotFoundError:
        return True
    except OSError:  # it is in use, or the file system has no locks
        return False
    shutil.rmtree(aside, ignore_errors=True)
    return True


def _is_at(file: BinaryIO, path: str) -> bool:
    """Returns True if an open file is still the file at `path`."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False
