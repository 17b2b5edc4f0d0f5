"""Finds the Pax checkpoints in a directory: finished steps, and saves that were interrupted."""

from __future__ import annotations

import dataclasses
import re

from etils import epath

from spmd_trainer.checkpointing import records, step_files
from spmd_trainer.checkpointing.agreement import decided_by_process_0
from spmd_trainer.pax.errors import PaxDamagedError, PaxNotFoundError
from spmd_trainer.storage import is_remote

STATE, METADATA, INPUT = "state", "metadata", "train_input"
_STEP = re.compile(r"checkpoint_(\d+)")
_NUMBER = re.compile(r"\d+")
# Names of temporary directories of Orbax, and of Pax before it used Orbax.
_UNFINISHED = re.compile(r"checkpoint_(\d+)\.orbax-checkpoint-tmp.*|tmp_\d+\.checkpoint_(\d+)")
# On gs://, where a directory can't be renamed, Orbax writes this file last.
_COMMIT_FILE = "commit_success.txt"


@dataclasses.dataclass(frozen=True)
class PaxDirectory:
    """A directory with Pax checkpoints.

    Attributes:
      path: the directory with `checkpoint_00000020` and the like.
      step: the step number, if the user gave the directory of one step; otherwise None.
    """

    path: epath.Path
    step: int | None = None


@dataclasses.dataclass(frozen=True)
class Listing:
    """The steps in a directory of Pax checkpoints.

    Attributes:
      finished: {step: its directories or files}; normally one per step.
      unfinished: {step: name of the partial directory that an interrupted save left}.
    """

    finished: dict[int, list[epath.Path]]
    unfinished: dict[int, str]

    def steps(self) -> list[int]:
        """Returns the finished steps, oldest first."""
        return sorted(self.finished)


def find(directory: epath.Path) -> PaxDirectory | None:
    """Finds the directory of Pax checkpoints that a path refers to; returns None if there is none.

    Args:
      directory: a directory of checkpoints, the run's directory above it, or the directory (or file) of one step.
    """
    directory = epath.Path(directory)
    step = _step_of(directory)
    if step is not None and step_files.read(f"looking for {directory}", directory.exists):
        return PaxDirectory(directory.parent, step)
    for candidate in (directory, directory / "checkpoints"):
        found = listing(candidate)
        if found.finished or found.unfinished:
            return PaxDirectory(candidate)
    return None


def listing(directory: epath.Path) -> Listing:
    """Lists the steps in a directory of Pax checkpoints; the listing is empty if the directory is missing."""
    finished: dict[int, list[epath.Path]] = {}
    unfinished: dict[int, str] = {}
    names = names_in(directory)
    # Directories named by a number alone are normally this trainer's steps. Only two are looked at: each costs a request.
    numbers = [name for name in names if _NUMBER.fullmatch(name)]
    numbers_are_pax = any(_step_of(directory / name) is not None for name in {*numbers[:1], *numbers[-1:]})
    for name in names:
        path = directory / name
        cut_off = _UNFINISHED.fullmatch(name)
        if cut_off is not None:
            unfinished[int(cut_off[1] or cut_off[2])] = name
        elif _STEP.fullmatch(name) or (numbers_are_pax and _NUMBER.fullmatch(name)):
            step = int(name.removeprefix("checkpoint_"))
            if _is_committed(path):
                finished.setdefault(step, []).append(path)
            else:
                unfinished[step] = f"{name} (without {_COMMIT_FILE}, which is written last on gs://)"
    return Listing(finished, {step: name for step, name in unfinished.items() if step not in finished})


def finished_steps(found: PaxDirectory, wanted: int | None = None) -> list[int]:
    """Returns all finished steps of a directory, oldest first. If `found` is the directory of one step, returns only this step.

    Raises:
      PaxDamagedError: the save of step `wanted` was interrupted. (The argument has no other effect.)
      PaxNotFoundError: the directory has no finished step.
    """
    if found.step is not None:
        return [found.step]
    listed = listing(found.path)
    if not listed.finished or wanted in listed.unfinished:
        require(found.path, wanted)
    return listed.steps()


def find_agreed(directory: epath.Path) -> PaxDirectory | None:
    """Calls `find` on process 0, and returns its result on every process. Every process must call this function."""

    def decide() -> list[str | int | None] | None:
        found = find(directory)
        return None if found is None else [str(found.path), found.step]

    answer = decided_by_process_0(decide)
    if answer is None:
        return None
    path, step = answer
    return PaxDirectory(epath.Path(str(path)), None if step is None else int(step))


def require(directory: epath.Path, step: int | None) -> tuple[int, epath.Path]:
    """Returns a step and its directory or file. If `step` is None, takes the newest finished step.

    Raises:
      PaxNotFoundError: there is no such step.
      PaxDamagedError: the step's save was interrupted, or two directories are named for this step.
    """
    found = listing(directory)
    there = ", ".join(map(str, found.steps()))
    have = f"there are {there}" if there else "there is none that is finished"
    if step is None:
        if not found.finished:
            names = ", ".join(sorted(found.unfinished.values()))
            cut_off = f": {names} is left of a save that was cut off" if names else ""
            raise PaxNotFoundError(f"no finished Pax checkpoint in {directory}{cut_off}")
        step = found.steps()[-1]
    if step in found.unfinished:
        raise PaxDamagedError(
            f"step {step} of the Pax checkpoints in {directory} is not complete: {found.unfinished[step]} is left of a save that "
            f"was cut off; {have}"
        )
    if step not in found.finished:
        raise PaxNotFoundError(f"no step {step} in {directory}, which holds Pax checkpoints; {have}")
    paths = found.finished[step]
    if len(paths) > 1:
        raise PaxDamagedError(
            f"step {step} is twice in {directory}: {' and '.join(path.name for path in paths)}; move one of them away"
        )
    return step, paths[0]


def names_in(directory: epath.Path) -> list[str]:
    """Returns the sorted names in a directory; an empty list if the directory is missing."""
    try:
        return step_files.read(f"listing {directory}", lambda: sorted(path.name for path in directory.iterdir()))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _step_of(path: epath.Path) -> int | None:
    """Returns the step number of a Pax step's directory or file; None for other paths, including this trainer's steps."""
    if match := _STEP.fullmatch(path.name):
        return int(match[1])
    # Pax also reads directories named by the number alone. Those of this trainer contain a record.
    if _NUMBER.fullmatch(path.name) and {STATE, METADATA} <= (names := set(names_in(path))):
        return None if records.RECORD_ITEM in names else int(path.name)
    return None


def _is_committed(path: epath.Path) -> bool:
    """Returns False for a step on gs:// without the file that Orbax writes last."""
    if not is_remote(path) or not str(path).startswith("gs://"):
        return True
    names = names_in(path)
    return not names or _COMMIT_FILE in names  # no names: a msgpack file
