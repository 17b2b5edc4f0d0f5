"""Renames damaged checkpoint steps, deletes old ones, and parses the setting `save_keep_interval_duration`.

Damaged steps are renamed only if the directory has an undamaged step.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence

import jax
from absl import logging
from etils import epath

from spmd_trainer.checkpointing import steps
from spmd_trainer.checkpointing.agreement import decided_by_process_0
from spmd_trainer.checkpointing.errors import CheckpointNotFoundError, CheckpointReadError, NoWholeCheckpointError
from spmd_trainer.errors import UserError

REFUSED_PREFIX = "refused-"

Duration = str | int | float | datetime.timedelta | None

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def move_all_aside(directory: epath.Path) -> None:
    """Renames the damaged checkpoints of a directory, judged by the names and sizes of files that process 0 sees.

    All processes must call it.

    Raises:
      NoWholeCheckpointError: there are checkpoints, and all of them are damaged. Nothing is renamed.
    """
    problems = dict(decided_by_process_0(lambda: list(steps.problems(directory).items())))
    damaged = {step: problem for step, problem in problems.items() if problem}
    if damaged and len(damaged) == len(problems):
        raise none_whole(directory, damaged, read_only=False)
    for step, problem in damaged.items():
        logging.warning("Checkpoint step %d in %s is not whole: %s.", step, directory, problem)
        move_aside(directory, step)


def move_aside(directory: epath.Path, step: int) -> None:
    """Renames a damaged checkpoint to `refused-STEP`, so that its step can be saved again. All processes must call it.

    Raises:
      OSError: on process 0, if it cannot rename the checkpoint. The other processes then raise a CheckpointError.
    """

    def rename() -> None:
        target = directory / f"{REFUSED_PREFIX}{step}"
        number = 1
        while target.exists():
            number += 1
            target = directory / f"{REFUSED_PREFIX}{step}-{number}"
        steps.step_dir(directory, step).rename(target)
        logging.warning("Renamed the damaged checkpoint step %d to %s. Delete it when nobody needs it.", step, target)

    decided_by_process_0(rename)


def none_whole(directory: epath.Path, refused: Mapping[int, str], *, read_only: bool) -> CheckpointNotFoundError:
    """Returns the error for a directory without an undamaged checkpoint.

    Args:
      directory: the directory.
      refused: {damaged step: its problem}.
      read_only: True if this job only reads the directory; then the message does not say how a run could start from scratch.
    """
    text = f"No whole checkpoint in {directory}."
    text += "".join(f"\n  step {step} is refused: {why}" for step, why in refused.items()) or " It holds no steps."
    if refused and not read_only:
        text += "\nNothing was changed there. To begin again at step 0, move these steps to another directory."
    return NoWholeCheckpointError(text) if refused else CheckpointNotFoundError(text)


class StepDeleter:
    """Deletes the old checkpoints that Orbax's retention policy selects. Implements Orbax's protocol for deleters.

    If a checkpoint cannot be deleted, a warning is logged, and the deletion is tried again at the next save. Orbax's own
    deleter would make the run fail, and leave half-deleted checkpoints that look damaged.
    """

    def __init__(self, directory: epath.Path) -> None:
        self._directory = directory
        self._pending: set[int] = set()

    def delete(self, step: int) -> None:
        self.delete_steps([step])

    def delete_steps(self, doomed: Sequence[int]) -> None:
        """Deletes the given checkpoint steps, and those whose earlier deletion failed. Only process 0 deletes."""
        if jax.process_index():
            return
        try:
            steps.finish_deletions(self._directory)
        except CheckpointReadError as error:
            logging.warning("%s", error)
        self._pending |= set(doomed)
        for step in sorted(self._pending):
            path = steps.step_dir(self._directory, step)
            try:
                if path.exists():
                    steps.delete(self._directory, step)
            except OSError as error:
                steps.warn_not_deleted(path, error)
            else:
                self._pending.discard(step)

    def keep(self, step: int) -> None:
        """Cancels the pending deletion of a step, because a new checkpoint is saved at this step."""
        self._pending.discard(step)

    def close(self) -> None:
        """Does nothing; Orbax's protocol requires this method."""


def parse_duration(duration: Duration) -> datetime.timedelta | None:
    """Parses the setting `save_keep_interval_duration`. Returns None if the setting is None or ''.

    Args:
      duration: '12h', '90m', '30s', '2d' or several of these ('1h30m'); a number of seconds (45 or '45'); a timedelta; None
        or '' for no duration.

    Raises:
      UserError: `duration` has none of these forms, or is not longer than 0 seconds; the message names the setting and its value.
    """
    if duration is None or (isinstance(duration, str) and not duration.strip()):
        return None
    try:
        parsed = (
            duration if isinstance(duration, datetime.timedelta) else datetime.timedelta(seconds=_seconds(duration))
        )
    except (ValueError, OverflowError) as error:
        raise UserError(
            f"save_keep_interval_duration: {duration!r} is not a duration; write e.g. '12h', '90m', '1d12h', 45 (seconds), or "
            "'' or None for none"
        ) from error
    if parsed <= datetime.timedelta(0):
        raise UserError(
            f"save_keep_interval_duration: {duration!r} is not longer than 0 seconds; write '' or None for none"
        )
    return parsed


def _seconds(duration: str | int | float) -> float:
    if isinstance(duration, int | float) and not isinstance(duration, bool):
        return duration
    text = duration.strip() if isinstance(duration, str) else ""
    if _NUMBER.fullmatch(text):
        return float(text)
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(text)
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)
