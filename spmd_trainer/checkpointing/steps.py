"""Finds the steps (checkpoints) in a directory, checks whether they are damaged, waits for new ones, and deletes old ones.

Functions that list a directory or read a file of a step raise CheckpointReadError if storage does not respond or denies access.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from absl import logging
from etils import epath

from spmd_trainer.checkpointing import manifest, step_files
from spmd_trainer.checkpointing.agreement import decided_by_process_0
from spmd_trainer.checkpointing.errors import CheckpointNotFoundError
from spmd_trainer.storage import is_remote
from spmd_trainer.storage.files import files_below
from spmd_trainer.storage.listing import Entry

# Marks a step that is being deleted. On a file system, the step is renamed to this first, so that no half-deleted step is ever
# seen. An object store cannot rename, and gets a marker object with this name.
DELETING_PREFIX = "deleting-"
_STEP = re.compile(r"0|[1-9]\d*")
_NOTHING_NEW, _STOP = -1, -2


def step_dir(directory: epath.Path, step: int) -> epath.Path:
    return directory / str(step)


def present(directory: epath.Path) -> list[int]:
    """Returns the checkpoint steps, damaged or not, that this process sees, ascending; [] for a missing directory."""
    return _steps_among(directory, _names(directory))


def _steps_among(directory: epath.Path, names: Iterable[str]) -> list[int]:
    found = set(names)
    if is_remote(directory):
        found -= {name.removeprefix(DELETING_PREFIX) for name in found if name.startswith(DELETING_PREFIX)}
    return sorted(int(name) for name in found if _STEP.fullmatch(name))


def problems(directory: epath.Path) -> dict[int, str | None]:
    """Returns {checkpoint step: the problem with the names or sizes of its files, or None}, newest first.

    An object store is listed once for all steps; steps that look damaged in this listing are checked again one by one. It may
    contain remains of a killed save, which are not treated as a step. Different processes may see different files.
    """
    listed: dict[int, dict[str, Entry]]
    listed = _listed(directory) if is_remote(directory) else {step: {} for step in present(directory)}
    found: dict[int, str | None] = {}
    for step, files in sorted(listed.items(), reverse=True):
        if files and not _is_finished(files):
            continue
        if manifest.has_digest_of(_sizes(files)):
            found[step] = None
            continue
        with contextlib.suppress(CheckpointNotFoundError):  # deleted since it was listed
            found[step] = manifest.quick_problem(step_dir(directory, step), step)
    return found


def commit_times(directory: epath.Path) -> dict[int, datetime.datetime]:
    """Returns {checkpoint step: time of its commit} of a directory on an object store, in ascending order, by one listing."""
    listed = sorted(_listed(directory).items())
    return {step: files[manifest.COMMIT_FILE].modified for step, files in listed if manifest.COMMIT_FILE in files}


def _listed(directory: epath.Path) -> dict[int, dict[str, Entry]]:
    """Returns {step: {path below the step: size and time}} of an object store, by one listing. Includes unfinished saves."""
    by_name = _by_name(directory)
    return {step: by_name[str(step)] for step in _steps_among(directory, by_name)}


def _by_name(directory: epath.Path) -> dict[str, dict[str, Entry]]:
    """Returns {name in the directory: {path below that name: size and time}} on an object store."""
    by_name: dict[str, dict[str, Entry]] = {}
    for path, info in step_files.read(f"listing {directory}", lambda: files_below(directory)).items():
        name, _, below = path.partition("/")
        by_name.setdefault(name, {})[below] = info
    return by_name


def agreed_newest_first(directory: epath.Path) -> list[int]:
    """Returns the checkpoint steps that process 0 sees, damaged or not, newest first. All processes must call it."""
    return decided_by_process_0(lambda: present(directory)[::-1])


def whole(directory: epath.Path) -> list[int]:
    """Returns the checkpoint steps for which `is_whole` is True, oldest first."""
    return sorted(step for step, problem in problems(directory).items() if problem is None)


def is_whole(directory: epath.Path, step: int) -> bool:
    """Returns True if a checkpoint exists and its files have the names and sizes that its manifest lists."""
    try:
        return manifest.quick_problem(step_dir(directory, step), step) is None
    except CheckpointNotFoundError:
        return False


def is_committed(directory: epath.Path, step: int) -> bool:
    """Returns False only for the remains of a killed save on an object store.

    On a file system, the remains of a killed save never have a step's name.
    """
    if not is_remote(directory):
        return True
    path = step_dir(directory, step)
    return _is_finished(step_files.read(f"listing {path}", lambda: files_below(path)))


def present_and_committed(directory: epath.Path) -> tuple[list[int], bool]:
    """Returns the checkpoint steps that this process sees, ascending, and whether `is_committed` is True for any of them."""
    there = present(directory)
    return there, any(is_committed(directory, step) for step in reversed(there))


def newest_whole(directory: epath.Path, newer_than: int = -1, *, log_damage: bool = False) -> int | None:
    """Returns the newest checkpoint step above `newer_than` for which `is_whole` is True, or None."""
    for step in reversed(present(directory)):
        if step <= newer_than:
            break
        try:
            problem = manifest.quick_problem(step_dir(directory, step), step)
        except CheckpointNotFoundError:
            continue  # deleted since it was listed
        if problem is None:
            return step
        if log_damage and problem != manifest.UNFINISHED:
            logging.warning("Checkpoint step %d in %s is not whole: %s.", step, directory, problem)
    return None


def iterate_checkpoints(
    directory: epath.PathLike,
    *,
    stop_fn: Callable[[int | None], bool] | None = None,
    poll_seconds: float = 10.0,
) -> Iterator[int]:
    """Yields the newest undamaged checkpoint step, and then newer ones as they appear. All processes must call it.

    If several appear while the caller works on one, only the newest of them is yielded. The directory need not exist yet. The
    training run may delete a step while the caller reads it, and a step's contents may be damaged: `Checkpointer.restore`
    then raises a CheckpointError, and the caller may continue with the next step.

    Args:
      directory: `job_log_dir/checkpoints` of the training run.
      stop_fn: called on process 0 before each poll with the last step seen (or None). If it returns True and the poll finds
        no newer step, iteration stops. If `stop_fn` is None, iteration never stops.
      poll_seconds: time between polls.
    """
    directory = epath.Path(directory)
    seen: int | None = None

    def poll() -> int:
        # Ask stop_fn before polling: a step saved between a poll and a later stop_fn would be missed.
        last_poll = stop_fn is not None and stop_fn(seen)
        newest = newest_whole(directory, newer_than=-1 if seen is None else seen)
        return newest if newest is not None else _STOP if last_poll else _NOTHING_NEW

    while True:
        answer = decided_by_process_0(poll)
        if answer == _STOP:
            return
        if answer == _NOTHING_NEW:
            logging.log_first_n(logging.INFO, "Waiting for checkpoints newer than step %s in %s.", 1, seen, directory)
            time.sleep(poll_seconds)
            continue
        seen = answer
        yield seen


def require(directory: epath.Path, step: int) -> None:
    """Checks that a checkpoint exists, damaged or not.

    Raises:
      CheckpointNotFoundError: the step does not exist; the message lists the undamaged steps.
    """
    path = step_dir(directory, step)
    if not step_files.read(f"looking for {path}", path.exists):
        there = whole(directory)
        have = f"Whole steps there: {', '.join(map(str, there))}." if there else "It has no whole step."
        raise CheckpointNotFoundError(f"No checkpoint of step {step} in {directory}. {have}")


def warn_of_newer(directory: epath.Path, step: int) -> None:
    """Logs a warning if there are newer checkpoints than the one at `step`, from which a run continues."""
    newer = [s for s in present(directory) if s > step]
    if newer:
        logging.warning(
            "Restoring step %d, but %s holds newer ones (%s). A run that continues from step %d keeps them, and its "
            "next restart takes the newest: use another job_log_dir, or move them away.",
            step,
            directory,
            ", ".join(map(str, newer)),
            step,
        )


def delete(directory: epath.Path, step: int) -> None:
    """Deletes a checkpoint. After a kill, the remains are not treated as a checkpoint, and `finish_deletions` deletes them.

    Raises:
      OSError: the checkpoint cannot be deleted. If the deletion had begun, the next `finish_deletions` tries again.
    """
    doomed = directory / f"{DELETING_PREFIX}{step}"
    if is_remote(directory):
        doomed.write_text("The step of this number is being deleted.")
    else:
        if doomed.exists():
            doomed.rmtree()
        step_dir(directory, step).rename(doomed)
    _finish_deletion(doomed)


def finish_deletions(directory: epath.Path) -> None:
    """Completes earlier deletions of checkpoints that failed or were killed; logs those that still cannot be deleted."""
    _finish_deletions_among(directory, _names(directory))


def _finish_deletions_among(directory: epath.Path, names: Iterable[str]) -> None:
    for name in names:
        if name.startswith(DELETING_PREFIX) and _STEP.fullmatch(name.removeprefix(DELETING_PREFIX)):
            try:
                _finish_deletion(directory / name)
            except OSError as error:
                warn_not_deleted(directory / name, error)


def clean_up(directory: epath.Path) -> list[int]:
    """Finishes what a killed process left: its deletions and, on an object store, its saves.

    A save with all its files is committed; an incomplete save is deleted. On a file system, Orbax deletes incomplete saves.

    Returns:
      The steps on an object store whose remains can't be deleted. A new save of such a step would mix with the remains.
    """
    if not is_remote(directory):
        finish_deletions(directory)
        return []
    by_name = _by_name(directory)
    if not by_name:
        return []
    _finish_deletions_among(directory, by_name)
    for step in _steps_among(directory, by_name):
        path, files = step_dir(directory, step), by_name[str(step)]
        if manifest.COMMIT_FILE in files:
            continue
        if _is_finished(files):
            (path / manifest.COMMIT_FILE).write_text(
                "All files of this step were written before its save was interrupted."
            )
            continue
        try:
            with contextlib.suppress(FileNotFoundError):
                path.rmtree()
        except OSError as error:
            warn_not_deleted(path, error)
    return _leftovers(directory)


def _leftovers(directory: epath.Path) -> list[int]:
    """Returns the steps on an object store that are marked as being deleted, or whose save was not finished."""
    by_name = _by_name(directory)
    marked = [name.removeprefix(DELETING_PREFIX) for name in by_name if name.startswith(DELETING_PREFIX)]
    unfinished = [step for step in _steps_among(directory, by_name) if not _is_finished(by_name[str(step)])]
    return sorted({*unfinished, *(int(name) for name in marked if _STEP.fullmatch(name))})


def _is_finished(files: Mapping[str, Entry]) -> bool:
    return manifest.is_finished(_sizes(files))


def _sizes(files: Mapping[str, Entry]) -> dict[str, int]:
    return {name: info.size for name, info in files.items()}


def warn_not_deleted(path: epath.Path, error: OSError) -> None:
    """Logs that an old checkpoint could not be deleted."""
    logging.warning("Cannot delete the old checkpoint %s (%s); it is tried again later.", path, error)


def _finish_deletion(doomed: epath.Path) -> None:
    if not is_remote(doomed.parent):
        doomed.rmtree()
        return
    step = doomed.parent / doomed.name.removeprefix(DELETING_PREFIX)
    with contextlib.suppress(FileNotFoundError):
        step.rmtree()
    if step.exists():
        # S3 only says how many of several objects were deleted. Without the marker, the rest would look like a damaged step.
        raise OSError(errno.EIO, "Objects of it are still there", str(step))
    doomed.unlink(missing_ok=True)


def _names(directory: epath.Path) -> list[str]:
    """Returns the names in a directory; none if it is missing."""
    try:
        return step_files.read(f"listing {directory}", lambda: [path.name for path in directory.iterdir()])
    except (FileNotFoundError, NotADirectoryError):
        return []
