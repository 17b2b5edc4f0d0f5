"""Kept steps on disk: two files each, what they were made from and the step itself. The oldest leave when there are too many."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import stat
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from absl import logging
from etils import epath

from spmd_trainer.storage import is_remote
from spmd_trainer.storage.files import UNFINISHED_SUFFIX, files_below

# What a description has.
_PARTS = {"settings", "reads", "sha256"}
# Of one process. A step of a large model takes tens of megabytes.
MOST_BYTES = 4 * 2**30
# A file that is left over from a process that was killed while it wrote it.
_LEFT_OVER_SECONDS = 3600.0


class Entries:
    """The kept steps of one experiment and process."""

    def __init__(self, root: epath.Path, experiment: str, process: int):
        """Reads nothing.

        Args:
          root: the directory of all experiments'. What is read from it is executed, so it must belong to the user.
          experiment: the experiment's name.
          process: the process' number in the job.
        """
        self._root = root
        self._directory = root / experiment
        self._suffix = f".process_{process}"

    def refusal(self) -> str:
        """Returns why nothing may be read from the directory: others can write there. Empty if it is the user's alone.

        Who can write into an object store is for its owner to say.
        """
        for folder in (self._root, self._directory):
            if not is_remote(folder) and folder.exists():
                found = os.stat(folder)
                if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                    return f"others than you can write into {folder}"
        return ""

    def read(self, key: str) -> Iterator[tuple[dict[str, Any], Callable[[], bytes]]]:
        """Yields (what it was made from, a function that reads the step) of all steps under a key, the newest first.

        The function raises OSError or ValueError if the step isn't whole.

        Args:
          key: names settings; steps of different code may share it.
        """
        for name in self._descriptions(f"{key}-"):
            description = self._description(name)
            if description is not None:
                digest = description.pop("sha256", "")
                yield description, functools.partial(self._content, name.removesuffix(".json") + ".step", digest)

    def write(self, key: str, description: Mapping[str, Any], content: bytes) -> None:
        """Keeps a step, and removes the oldest ones if there are too many.

        Args:
          key: names its settings.
          description: what it was made from, of JSON.
          content: the step.

        Raises:
          OSError: it can't be written.
        """
        made_from = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:8]
        stem = f"{key}-{made_from}{self._suffix}"
        # Each by itself: `parents` would leave it to the umask who can write there.
        for folder in (self._root, self._directory):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write(self._directory / f"{stem}.step", content)
        described = {**description, "sha256": hashlib.sha256(content).hexdigest()}
        _write(self._directory / f"{stem}.json", json.dumps(described).encode())
        self._remove_oldest()

    def newest(self) -> dict[str, Any] | None:
        """Returns what the newest step of this process was made from; None if there is none."""
        found = map(self._description, self._descriptions(""))
        return next((description for description in found if description is not None), None)

    def _descriptions(self, start: str) -> list[str]:
        """Returns the names of the files that describe this process' steps, the newest first."""
        ending, files = f"{self._suffix}.json", files_below(self._directory)
        names = [name for name in files if name.startswith(start) and name.endswith(ending)]
        return sorted(names, key=lambda name: files[name].modified, reverse=True)

    def _description(self, name: str) -> dict[str, Any] | None:
        try:
            description = json.loads((self._directory / name).read_text())
        except (OSError, ValueError):  # removed meanwhile, or damaged
            return None
        return description if isinstance(description, dict) and description.keys() >= _PARTS else None

    def _content(self, name: str, digest: str) -> bytes:
        path = self._directory / name
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != digest:
            raise ValueError(f"{path} is damaged")
        if not is_remote(path):
            os.utime(path)  # those that were not used for longest leave first
        return content

    def _remove_oldest(self) -> None:
        """Removes this process' steps that were not used for longest until the rest fits: those of a job's others must stay."""
        files, ending = files_below(self._root), f"{self._suffix}.step"
        steps = sorted((n for n in files if n.endswith(ending)), key=lambda n: files[n].modified, reverse=True)
        total = 0
        for name in steps:
            total += files[name].size
            if total > MOST_BYTES:
                logging.info("the kept step %s is the oldest of too many, and is removed", name)
                for path in (name.removesuffix(".step") + ".json", name):
                    (self._root / path).unlink(missing_ok=True)
        for name, info in files.items():
            if name.endswith(UNFINISHED_SUFFIX) and time.time() - info.modified.timestamp() > _LEFT_OVER_SECONDS:
                (self._root / name).unlink(missing_ok=True)


def _write(path: epath.Path, content: bytes) -> None:
    """Writes a file that is seen whole or not at all."""
    if is_remote(path):
        path.write_bytes(content)
        return
    # Containers on a shared file system may all have the same process id.
    unfinished = path.parent / f"{path.name}.{uuid.uuid4().hex}{UNFINISHED_SUFFIX}"
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
