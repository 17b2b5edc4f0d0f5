"""Keeps a second trainer out of a directory.

A lock is a file in `DIRECTORY/lock/`: 000001.json, 000002.json, ... The file with the highest number is the lock in effect. A
process takes the lock by creating the file with the next number, which only one process can do: with a hard link on a file
system, and a conditional put in an object store. It keeps the lock by writing a new heartbeat into the file every few seconds.
If the heartbeat has stopped, the lock is stale, and a different process can take it over with the next number. Clocks of
different hosts are never compared. Instead, a waiting process watches whether the heartbeat changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator

from absl import logging
from etils import epath

from spmd_trainer.errors import UserError
from spmd_trainer.storage import backends, json_values
from spmd_trainer.storage.files import write_atomically

_HEARTBEAT_SECONDS = 10.0
# A heartbeat unchanged for this long has stopped: several were missed.
_STALE_SECONDS = 45.0


class LockedError(UserError):
    """Another process is training in this directory."""


@dataclasses.dataclass(frozen=True)
class Owner:
    """The process that holds a lock.

    Attributes:
      host: its host's name.
      pid: its process id.
      started: time at which it took the lock, as text.
      machine: identifies the machine and container in which the process id is valid.
      process_start: its start time in clock ticks since boot, which distinguishes it from a later process with the same id.
      token: random text that identifies the lock.
      heartbeat: number of heartbeats so far.
    """

    host: str
    pid: int
    started: str
    machine: str
    process_start: str
    token: str
    heartbeat: int = 0

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.started}"


@contextlib.contextmanager
def locked(
    directory: epath.Path,
    *,
    name: str = "--job_log_dir",
    heartbeat_seconds: float = _HEARTBEAT_SECONDS,
    stale_seconds: float = _STALE_SECONDS,
) -> Iterator[Callable[[], None]]:
    """Context manager that holds the lock of a directory. Only one process of a job uses it.

    Enters at once if the directory is unlocked, or if the lock's owner is known to be dead. Otherwise watches the lock for up
    to `stale_seconds`, to see whether the owner is alive.

    Args:
      directory: the directory to lock, created if missing.
      name: the flag or argument that gave the path, for messages.
      heartbeat_seconds: time between two heartbeats.
      stale_seconds: seconds without a heartbeat after which the lock is taken over.

    Yields:
      A function that raises `LockedError` if another process has taken the lock over, because this process was stopped for
      longer than `stale_seconds`. The function is cheap; call it before each save.

    Raises:
      LockedError: another process holds the lock.
      OSError: the lock can't be read or written.
    """
    lock = _take(directory / "lock", f"{name}={directory}", stale_seconds)
    ends = threading.Event()
    beat = threading.Thread(target=lock.beat, args=(ends, heartbeat_seconds), name="lock", daemon=True)
    beat.start()
    try:
        yield lock.check
    finally:
        ends.set()
        beat.join()
        lock.release()


class _Lock:
    """The lock held by this process."""

    def __init__(self, folder: epath.Path, number: int, owner: Owner, what: str):
        self._folder, self._number, self._owner, self._what = folder, number, owner, what
        self._taken_by: Owner | None = None

    def check(self) -> None:
        """Raises LockedError if another process has taken the lock over."""
        if self._taken_by is not None:
            raise LockedError(
                f"{self._what} was taken over by {self._taken_by}, because this process did not run for a while; "
                "what it trained since is discarded"
            )

    def beat(self, ends: threading.Event, seconds: float) -> None:
        """Writes heartbeats until `ends` is set, or another process holds the lock."""
        while not ends.wait(seconds):
            try:
                newer = [number for number in _numbers(self._folder) if number > self._number]
                if newer:
                    self._taken_by = _read(_path(self._folder, newer[-1])) or self._owner
                    return
                self._owner = dataclasses.replace(self._owner, heartbeat=self._owner.heartbeat + 1)
                write_atomically(_path(self._folder, self._number), [_text(self._owner)])
            except Exception as error:  # object stores have errors of their own
                logging.warning("can't write the lock of %s: %s", self._what, error)

    def release(self) -> None:
        """Removes the lock, unless another process has taken it over."""
        try:
            if self._taken_by is None:
                _path(self._folder, self._number).unlink(missing_ok=True)
        except Exception as error:  # the lock becomes stale by itself
            logging.warning("can't remove the lock of %s: %s", self._what, error)


def _take(folder: epath.Path, what: str, stale_seconds: float) -> _Lock:
    # Most directories are not locked, so try the first number without listing the folder.
    numbers: list[int] = []
    while True:
        if numbers and not _wait_until_stale(_path(folder, numbers[-1]), what, stale_seconds):
            numbers = _numbers(folder)  # the lock is gone, or has another owner
            continue
        number, me = max(numbers, default=0) + 1, _myself()
        if _create(_path(folder, number), me):
            # Another process may hold an unseen number: the folder was not listed before the first attempt, or
            # a lock was taken meanwhile.
            if set(_numbers(folder)) <= {number, *numbers}:
                for old in numbers:
                    _path(folder, old).unlink(missing_ok=True)
                return _Lock(folder, number, me, what)
            _path(folder, number).unlink(missing_ok=True)
        numbers = _numbers(folder)


def _wait_until_stale(path: epath.Path, what: str, stale_seconds: float) -> bool:
    """Watches a lock file. Returns True once the lock is known to be stale; False if it disappears or gets a new owner.

    If the file can't be read, its owner may be writing it at this moment (on a mount without hard links).

    Raises:
      LockedError: the lock's owner is alive.
    """
    first = _read(path)
    if first is None and not path.exists():
        return False
    alive = None if first is None else _is_alive(first)
    owner = "a process that has not written its name" if first is None else str(first)
    waited, pause = 0.0, min(1.0, stale_seconds / 10)
    while alive is None and waited < stale_seconds:
        if waited == 0.0:
            logging.info("%s is locked by %s; watching for %.0f s whether it is alive", what, owner, stale_seconds)
        time.sleep(pause)
        waited += pause
        now = _read(path)
        if (now and now.token) != (first and first.token) or (now is None and not path.exists()):
            return False
        alive = True if now != first else None
    if alive:
        raise LockedError(
            f"{what} is in use by {owner}; wait until it has ended, end it, or give another directory. Two trainers would "
            "delete each other's checkpoints"
        )
    logging.warning("%s was locked by %s, which is gone; taking it over", what, owner)
    return True


def _is_alive(owner: Owner) -> bool | None:
    """Returns whether a lock's owner runs; None if unknown, because the owner is on another machine or in another container."""
    if owner.machine != _machine() or not owner.machine:
        return None
    return _process_start(owner.pid) == owner.process_start


def _myself() -> Owner:
    return Owner(
        host=socket.gethostname(),
        pid=os.getpid(),
        started=time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        machine=_machine(),
        process_start=_process_start(os.getpid()),
        token=uuid.uuid4().hex,
    )


def _machine() -> str:
    """Returns the boot id of the machine and the PID namespace of this process, as one text; '' if unknown."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _process_start(pid: int) -> str:
    """Returns the start time of a process, in clock ticks since boot; '' if the process does not exist or is a zombie."""
    try:
        # The name, in brackets, may have spaces.
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _path(folder: epath.Path, number: int) -> epath.Path:
    return folder / f"{number:06}.json"


def _numbers(folder: epath.Path) -> list[int]:
    try:
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    return sorted(int(name.removesuffix(".json")) for name in names if name.removesuffix(".json").isdigit())


def _read(path: epath.Path) -> Owner | None:
    """Returns the owner that a lock file names. Returns None if the file is missing, or damaged by a kill or a full disk."""
    try:
        return Owner(**json_values.parse_object(json_values.content_of(path)))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _text(owner: Owner) -> str:
    return json.dumps(dataclasses.asdict(owner))


def _create(path: epath.Path, owner: Owner) -> bool:
    """Creates the lock file `path` atomically. Returns False if the file already exists."""
    scheme = backends.scheme_of(path)
    if scheme is not None:
        return backends.object_store(scheme).create(path, _text(owner).encode())
    path.parent.mkdir(parents=True, exist_ok=True)
    # The file is written first, then linked, so that readers never see an incomplete lock.
    unfinished = path.parent / f".{path.name}.{owner.token}.writing"
    unfinished.write_text(_text(owner))
    try:
        os.link(unfinished, path)
    except FileExistsError:
        return False
    except OSError:
        return _create_without_links(path, owner)  # e.g. a mounted bucket
    finally:
        unfinished.unlink()
    return True


def _create_without_links(path: epath.Path, owner: Owner) -> bool:
    try:
        with open(path, "x") as file:
            file.write(_text(owner))
    except FileExistsError:
        return False
    return True
