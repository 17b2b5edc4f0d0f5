"""A checkpoint of a program in plain Flax in `init_from_checkpoint_rules`.

Rules find its arrays by the names that they have there, e.g. 'params/up/kernel' or 'ema_params/up/kernel'. Besides, the
model's own names lead to them where it is clear which are meant: the arrays of the smallest part of the checkpoint whose
paths end like the model's. So `LOAD_ALL` works with a whole `TrainState`, with an `nnx.State` and with a tree of parameters.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import jax
from absl import logging
from etils import epath
from jax.sharding import Mesh

from spmd_trainer.checkpointing import step_files
from spmd_trainer.checkpointing.agreement import agreed_problem
from spmd_trainer.checkpointing.errors import CheckpointError, CheckpointNotFoundError
from spmd_trainer.checkpointing.flax import checkpoints
from spmd_trainer.checkpointing.records import SavedVariable
from spmd_trainer.errors import UserError
from spmd_trainer.sharding.variables import VariableSpec
from spmd_trainer.train_states import TrainState

_VARS = "mdl_vars/"
# NNX saves each variable as an object with this one entry.
_NNX_VALUE = "value"


class FlaxCheckpointError(CheckpointError, UserError):
    """A checkpoint of plain Flax can't be read. The message says which one and why."""


class FlaxNotFoundError(FlaxCheckpointError, CheckpointNotFoundError):
    """The directory has no such step."""


@dataclasses.dataclass(frozen=True)
class FlaxSource:
    """The arrays of a checkpoint; see `checkpointing.sources.Source`.

    Attributes:
      name: names the checkpoint in messages.
      saved: its arrays: by their names in the checkpoint below 'mdl_vars/', and by the model's names.
      trees: {path: directory of its tree}, for the same paths.
    """

    name: str
    saved: dict[str, SavedVariable]
    trees: dict[str, epath.Path]

    def fits(self, path: str, shape: Sequence[int]) -> bool:
        """Returns True if a saved array has this shape."""
        return self.saved[path].shape == tuple(shape)

    def read(self, wanted: Mapping[str, VariableSpec], mesh: Mesh, source: Mapping[str, str]) -> dict[str, jax.Array]:
        """Reads variables onto a mesh: {wanted path: array}. `source` maps wanted paths to saved ones."""
        # Importing Orbax takes 0.4 s: not before arrays are read.
        from spmd_trainer.checkpointing import orbax_io

        by_tree: dict[epath.Path, dict[str, VariableSpec]] = collections.defaultdict(dict)
        for path, spec in wanted.items():
            by_tree[self.trees[source[path]]][path] = spec
        arrays: dict[str, jax.Array] = {}
        for tree, specs in by_tree.items():
            arrays |= orbax_io.read_arrays(tree, self.saved, specs, mesh, source=source)
        return {path: arrays[path] for path in wanted}


def open_source(directory: epath.Path, step: int | None, variables: TrainState) -> FlaxSource | None:
    """Opens a checkpoint of plain Flax. Called by every process.

    Args:
      directory: what Orbax wrote: a tree, a directory of items, or a directory of steps.
      step: the step; None for the newest.
      variables: a TrainState of VariableSpecs: the model.

    Returns:
      The source, or None if the directory holds no such checkpoint.

    Raises:
      FlaxNotFoundError: there is no such step.
      FlaxCheckpointError: Orbax can't read its description.
      CheckpointReadError: storage does not answer, or refuses.
    """
    found = checkpoints.find(directory, step)
    if found is None:
        return None
    if isinstance(found, list):
        raise FlaxNotFoundError(
            f"init_from_checkpoint_rules: {directory} has no step {step}; it has {', '.join(map(str, found))}."
        )
    raw: dict[str, tuple[SavedVariable, epath.Path]] = {}
    agreed_problem(lambda: raw.update(_describe(found)))
    own = _model_names(raw, [spec.path for spec in jax.tree.leaves(variables.mdl_vars)], found.path)
    every = {_VARS + path: entry for path, entry in raw.items()} | {path: raw[there] for path, there in own.items()}
    return FlaxSource(
        f"the checkpoint {found.path}",
        {path: variable for path, (variable, _) in every.items()},
        {path: tree for path, (_, tree) in every.items()},
    )


def _describe(found: checkpoints.FlaxCheckpoint) -> dict[str, tuple[SavedVariable, epath.Path]]:
    """Returns {path in the checkpoint: (the array, directory of its tree)}."""
    from spmd_trainer.checkpointing import orbax_io

    result = {}
    for item, tree in found.trees.items():
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
    """Returns {the model's path: path in the checkpoint}, where it is clear which part of the checkpoint is meant.

    Of the prefixes that lead to variables of a collection, those count that lead to the most; of these, the shortest.
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
