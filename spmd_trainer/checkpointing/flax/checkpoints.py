"""Finds the trees of arrays that Orbax wrote in a directory, whichever of Orbax's interfaces a program used.

- `StandardCheckpointer` and `PyTreeCheckpointer` write a tree.
- `CheckpointManager` writes steps (`3`, `checkpoint_3`), in each an item (`default`) or several (`state`, `batch_stats`); each
  item is a tree.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TypeAlias

from etils import epath

from spmd_trainer.checkpointing import manifest, records, step_files
from spmd_trainer.checkpointing.agreement import decided_by_process_0
from spmd_trainer.storage import is_remote

_TREE_FILE = "_METADATA"
# '3' and 'checkpoint_3'; not 'deleting-3', 'refused-3' and '3.orbax-checkpoint-tmp-1700000000'.
_STEP = re.compile(r"(?:.*_)?(\d+)")
_UNFINISHED = ".orbax-checkpoint-tmp"
# {name of the item: directory of its tree}; the steps that are there instead of the one asked for; None: no such checkpoint.
_Found: TypeAlias = dict[str, str] | list[int] | None


@dataclasses.dataclass(frozen=True)
class FlaxCheckpoint:
    """A checkpoint of a program in plain Flax.

    Attributes:
      path: the directory of its first tree, for messages.
      trees: {name of the item: directory of its tree}; one tree without items has the name ''.
    """

    path: epath.Path
    trees: dict[str, epath.Path]


def find(directory: epath.Path, step: int | None) -> FlaxCheckpoint | list[int] | None:
    """Finds the trees of a checkpoint as process 0 sees them. Called by every process.

    Args:
      directory: a tree, a directory of items, or a directory of steps.
      step: the step; None for the newest.

    Returns:
      The checkpoint; the steps that are there if `step` is none of them; None if Orbax wrote nothing here, or if this trainer
      did.

    Raises:
      CheckpointReadError: storage does not answer, or refuses.
    """

    def look() -> _Found:
        return step_files.read(f"looking for checkpoints in {directory}", lambda: _look(directory, step))

    found = decided_by_process_0(look)
    if not isinstance(found, dict):
        return found
    return FlaxCheckpoint(
        epath.Path(next(iter(found.values()))), {name: epath.Path(tree) for name, tree in found.items()}
    )


def _look(directory: epath.Path, step: int | None) -> _Found:
    """Returns what is in a directory; see `find`."""
    if not directory.is_dir() or _is_own(directory):
        return None
    if trees := _trees(directory):
        return trees
    steps = {}
    for below in directory.iterdir():
        named = _STEP.fullmatch(below.name)
        if not named or not below.is_dir():
            continue
        if _is_own(below):
            return None
        if _is_committed(below) and (trees := _trees(below)):
            steps[int(named[1])] = trees
    if not steps:
        return None
    return steps.get(max(steps) if step is None else step, sorted(steps))


def _trees(directory: epath.Path) -> dict[str, str]:
    """Returns {name of the item: directory of its tree}. A tree by itself, and an item that stands alone, have the name ''."""
    if _is_tree(directory):
        return {"": str(directory)}
    items = {below.name: str(below) for below in sorted(directory.iterdir()) if below.is_dir() and _is_tree(below)}
    return items if len(items) != 1 else {"": next(iter(items.values()))}


def _is_tree(directory: epath.Path) -> bool:
    return _UNFINISHED not in directory.name and bool((directory / _TREE_FILE).exists())


def _is_own(directory: epath.Path) -> bool:
    own = (directory / records.RECORD_ITEM / records.RECORD_FILE, directory / manifest.MANIFEST)
    return any(path.exists() for path in own)


def _is_committed(directory: epath.Path) -> bool:
    """Returns False for a save on an object store that did not finish. On a file system it has a temporary name."""
    return not is_remote(directory) or bool((directory / manifest.COMMIT_FILE).exists())
