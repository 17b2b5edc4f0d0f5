"""Reads files of checkpoint steps. Retries failed reads; distinguishes missing files from storage that does not respond."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TypeVar

from etils import epath

from spmd_trainer.checkpointing.errors import CheckpointNotFoundError, CheckpointReadError, DamagedCheckpointError
from spmd_trainer.storage import reading
from spmd_trainer.storage.retry import OUTAGE_ATTEMPTS, retry, summary

_Result = TypeVar("_Result")

# The errors for a name that no file can have, which comes from a damaged manifest.
_NO_SUCH_NAME = {errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP}


class MissingFileError(Exception):
    """A file is not a regular file, or is missing although its directory can be listed.

    Attributes:
      problem: the words after the file's name in messages, e.g. 'is missing'.
    """

    def __init__(self, name: str, problem: str = "is missing"):
        super().__init__(f"{name} {problem}")
        self.problem = problem


def read(what: str, fn: Callable[[], _Result]) -> _Result:
    """Calls `fn` with retries, and returns its result. `what` describes the call in messages, e.g. 'listing runs/a'.

    Raises:
      FileNotFoundError, NotADirectoryError: `fn` raised this error.
      DamagedCheckpointError: there is a named pipe, a socket or a device in place of a file.
      CheckpointReadError: storage still fails after the retries, or denies access.
    """
    try:
        return retry(fn, what=what, attempts=OUTAGE_ATTEMPTS)
    except (FileNotFoundError, NotADirectoryError, CheckpointReadError):
        raise
    except reading.NotRegularError as error:
        raise DamagedCheckpointError(f"{what} failed: {error.strerror}: {error.filename}. Copy it again.") from error
    except OSError as error:
        raise CheckpointReadError(
            f"{what} failed: {summary(error)}. Nothing was changed there. Check the storage and permissions, then start "
            "again."
        ) from error


def read_file(step_dir: epath.Path, name: str, fn: Callable[[epath.Path], _Result]) -> _Result:
    """Calls `fn` with the path of a checkpoint's file, and returns its result; retries if the read fails.

    `name` is the file's path below the checkpoint's directory, with slashes.

    Raises:
      MissingFileError: the checkpoint lacks the file.
      CheckpointNotFoundError: there is no such step, or it has been deleted.
      CheckpointReadError: storage fails or denies access.
    """
    path = step_dir / name

    def attempt() -> _Result:
        try:
            reading.require_regular(path)
            return fn(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            if not _is_listed(path, step_dir):
                require_step(step_dir)
                raise MissingFileError(name) from error
            # Listed, but not found: a network file system whose caches are out of date.
            raise OSError(errno.EIO, f"{path} is listed by its directory, but cannot be opened") from error
        except reading.NotRegularError as error:
            raise MissingFileError(name, f"can't be read: {error.strerror}") from error
        except OSError as error:
            if error.errno in _NO_SUCH_NAME:
                raise MissingFileError(name) from error
            raise

    return read(f"reading {path}", attempt)


def _is_listed(path: epath.Path, step_dir: epath.Path) -> bool:
    """Returns True if a file's directory lists it, or if this directory can't be found although its own parent lists it."""
    try:
        return any(entry.name == path.name for entry in path.parent.iterdir())
    except NotADirectoryError:
        return False
    except FileNotFoundError:
        return path.parent != step_dir and _is_listed(path.parent, step_dir)


def require_step(step_dir: epath.Path) -> None:
    """Checks that a checkpoint's directory exists.

    Raises:
      CheckpointNotFoundError: the directory does not exist.
      CheckpointReadError: storage fails or denies access.
    """
    if not read(f"looking for {step_dir}", step_dir.exists):
        raise CheckpointNotFoundError(
            f"Checkpoint step {step_dir.name} in {step_dir.parent} does not exist (any more)."
        )
