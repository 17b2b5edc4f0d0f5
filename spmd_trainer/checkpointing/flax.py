"""Reads checkpoints that plain Flax programs wrote with Orbax, as sources of warm starts. Never writes to them.

This module finds the trees of arrays that Orbax's interfaces write:

- `StandardCheckpointer` and `PyTreeCheckpointer` write a tree.
- `CheckpointManager` writes steps (`3`, `checkpoint_3`). A step has one item (`default`) or several (`state`, `batch_stats`);
  each item is a tree.

The rules of a warm start name arrays as the checkpoint does, e.g. 'params/up/kernel' or 'ema_params/up/kernel'. The model's own
names work too if they are unambiguous: those of a collection ('params') mean the arrays below the prefix where most of them are
found (on a tie, the shortest prefix). So `LOAD_ALL` works with a whole `TrainState`, an `nnx.State` and a tree of parameters.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import jax
from absl import logging
from etils import epath
from jax.sharding import Mesh

from spmd_trainer.checkpointing import manifest, records, step_files
from spmd_trainer.checkpointing.agreement import agreed_problem, decided_by_process_0
from spmd_trainer.checkpointing.errors import CheckpointError, CheckpointNotFoundError
from spmd_trainer.checkpointing.records import SavedVariable
from spmd_trainer.checkpointing.sources import CheckpointSource
from spmd_trainer.errors import UserError
from spmd_trainer.sharding.variables import VariableSpec
from spmd_trainer.storage import is_remote
from spmd_trainer.train_states import TrainState

_VARS = "mdl_vars/"
# NNX saves each variable as an object with this one entry.
_NNX_VALUE = "value"
_TREE_FILE = "_METADATA"
# '3' and 'checkpoint_3'; not 'deleting-3', 'refused-3' and '3.orbax-checkpoint-tmp-1700000000'.
_STEP = re.compile(r"(?:.*_)?(\d+)")
_UNFINISHED = ".orbax-checkpoint-tmp"
# ([the step], {name of the item: directory of its tree}); or (the existing steps, {}) if the requested step is missing.
_Found: TypeAlias = tuple[list[int], dict[str, str]]


class FlaxCheckpointError(CheckpointError, UserError):
    """A checkpoint of plain Flax can't be read. The message says which one and why."""


class FlaxNotFoundError(FlaxCheckpointError, CheckpointNotFoundError):
    """The directory does not contain the requested step."""


@dataclasses.dataclass(frozen=True)
class FlaxSource(CheckpointSource):
    """A plain Flax checkpoint. The keys of `saved` are 'mdl_vars/' + path in the checkpoint, and also paths in the model.

    Attributes:
      trees: {path in `saved`: directory of the Orbax tree that holds the array}.
    """

    trees: Mapping[str, epath.Path]

    def read(self, wanted: Mapping[str, VariableSpec], mesh: Mesh, source: Mapping[str, str]) -> dict[str, jax.Array]:
        """Reads variables onto a mesh; see `CheckpointSource.read`."""
        # Importing Orbax takes 0.4 s: not before arrays are read.
        from spmd_trainer.checkpointing import orbax_io

        by_tree: dict[epath.Path, dict[str, VariableSpec]] = collections.defaultdict(dict)
        for path, spec in wanted.items():
            by_tree[self.trees[source[path]]][path] = spec
        arrays: dict[str, jax.Array] = {}
        for tree, specs in by_tree.items():
            arrays |= orbax_io.read_arrays(tree, self.saved, specs, mesh, source)
        return {path: arrays[path] for path in wanted}


def open_source(directory: epath.Path, step: int | None, variables: TrainState) -> FlaxSource | None:
    """Opens a checkpoint of plain Flax. All processes must call it.

    Args:
      directory: a directory that Orbax wrote: a tree, a directory of items, or a directory of steps.
      step: the step; None for the newest.
      variables: the model's variables, a TrainState of VariableSpecs.

    Returns:
      The source, or None if the directory holds no such checkpoint.

    Raises:
      FlaxNotFoundError: there is no such step.
      FlaxCheckpointError: Orbax can't read the metadata of a tree.
    """
    found = decided_by_process_0(
        lambda: step_files.read(f"looking for checkpoints in {directory}", lambda: _look(directory, step))
    )
    if found is None:
        return None
    numbers, items = found
    if not items:
        raise FlaxNotFoundError(
            f"init_from_checkpoint_rules: {directory} has no step {step}; it has {', '.join(map(str, numbers))}."
        )
    trees = {name: epath.Path(tree) for name, tree in items.items()}
    first = next(iter(trees.values()))
    raw: dict[str, tuple[SavedVariable, epath.Path]] = {}
    agreed_problem(lambda: raw.update(_describe(trees)))
    own = _model_names(raw, [spec.path for spec in jax.tree.leaves(variables.mdl_vars)], first)
    every = {_VARS + path: entry for path, entry in raw.items()} | {path: raw[there] for path, there in own.items()}
    return FlaxSource(
        f"the checkpoint {first}",
        numbers[0],
        {path: variable for path, (variable, _) in every.items()},
        {},
        {path: tree for path, (_, tree) in every.items()},
    )


def _look(directory: epath.Path, step: int | None) -> _Found | None:
    """Finds the trees of a step in a directory. Returns None if there is no Orbax checkpoint, or if this trainer wrote it."""
    if not directory.is_dir() or _is_own(directory):
        return None
    if trees := _trees(directory):
        return [0], trees
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
    chosen = max(steps) if step is None else step
    return ([chosen], steps[chosen]) if chosen in steps else (sorted(steps), {})


def _trees(directory: epath.Path) -> dict[str, str]:
    """Returns {name of the item: directory of its tree}. The name is '' for a tree without items, or with one item."""
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
    """Returns False for an unfinished save on an object store. On a file system, an unfinished save has a temporary name."""
    return not is_remote(directory) or bool((directory / manifest.COMMIT_FILE).exists())


def _describe(trees: Mapping[str, epath.Path]) -> dict[str, tuple[SavedVariable, epath.Path]]:
    """Returns {path in the checkpoint: (the array, directory of its tree)}."""
    from spmd_trainer.checkpointing import orbax_io

    result = {}
    for item, tree in trees.items():
        try:
            arrays = step_files.read(f"reading {tree}", lambda tree=tree: orbax_io.describe(tree))  # type: ignore[misc]
        except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
            raise FlaxCheckpointError(
                f"init_from_checkpoint_rules: Orbax can't read {tree}: {type(error).__name__}: {error}"
            ) from error
        entries = collections.Counter(keys[:i] for keys in arrays for i in range(1, len(keys)))
        for keys, (shape, dtype) in arrays.items():
            in_nnx = len(keys) > 1 and keys[-1] == _NNX_VALUE and entries[keys[:-1]] == 1
            path = "/".join(map(str, [*([item] if item else []), *(keys[:-1] if in_nnx else keys)]))
            result[path] = (SavedVariable(shape, dtype, shape, "", keys), tree)
    return result


def _model_names(raw: Iterable[str], model: Sequence[str], where: epath.Path) -> dict[str, str]:
    """Returns {path in the model: path in the checkpoint} for the collections that are found unambiguously.

    For each collection, e.g. 'params', takes the prefix in the checkpoint below which most of the collection's variables are
    found; on a tie, the shortest prefix. A collection with several shortest prefixes is left out, with a warning.
    """
    there, result = set(raw), {}
    by_collection: dict[str, list[str]] = collections.defaultdict(list)
    for path in model:
        by_collection["/".join(path.split("/")[:2])].append(path)
    for collection, paths in by_collection.items():
        if any(path.removeprefix(_VARS) in there for path in paths):
            continue  # these names are the checkpoint's own
        counts: collections.Counter[str] = collections.Counter()
        for path in paths:
            name = path.removeprefix(f"{collection}/")
            counts.update(found.removesuffix(name) for found in there if found == name or found.endswith(f"/{name}"))
        if not counts:
            continue
        most = max(counts.values())
        prefixes = sorted((p for p, n in counts.items() if n == most), key=lambda p: (p.count("/"), p))
        nearest = [prefix for prefix in prefixes if prefix.count("/") == prefixes[0].count("/")]
        if len(nearest) > 1:
            logging.warning(
                "init_from_checkpoint_rules: %s are in %s below each of %s; name one in load_rules, e.g. ('%s/(.*)', '%s{}').",
                collection.removeprefix(_VARS), where, ", ".join(nearest), collection.removeprefix(_VARS), nearest[0],
            )  # fmt: skip
            continue
        for path in paths:
            found = nearest[0] + path.removeprefix(f"{collection}/")
            if found in there:
                result[path] = found
    return result
