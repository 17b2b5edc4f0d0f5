"""Checkpoints of runs with adapters (`task.lora`). They hold the trained variables, and checksums of the frozen base.

The base is everything in `mdl_vars` except the adapters. It never changes, so it isn't saved: each launch loads it again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax

from spmd_trainer.checkpointing import mismatch, records
from spmd_trainer.checkpointing.errors import CheckpointMismatchError
from spmd_trainer.sharding.variables import VariableSpec
from spmd_trainer.train_states import TrainState, is_adapter

if TYPE_CHECKING:
    from spmd_trainer.decoder.lora import Lora

BASE_KEY, SETTINGS_KEY = "base", "adapters"
_VARS = "mdl_vars/"


def is_base(path: str) -> bool:
    """Returns True if a path is that of a variable of the frozen base: below 'mdl_vars/', and not an adapter."""
    return path.startswith(_VARS) and not is_adapter(path)


def has_adapters(variables: TrainState) -> bool:
    """Returns True if a state has adapters. `variables` has VariableSpecs as leaves."""
    return any(is_adapter(spec.path) for spec in jax.tree.leaves(variables))


def lacking_kind(paths: Iterable[str], saved: Iterable[str]) -> Callable[[str], bool] | None:
    """Returns a predicate for the kind that a checkpoint lacks: `is_adapter` or `is_base`. Returns None if it has both kinds.

    Args:
      paths: the paths of the variables to load. If none of them is an adapter, the result is None.
      saved: the paths of the checkpoint's variables.
    """
    saved = list(saved)
    if any(map(is_adapter, paths)):
        for is_kind in (is_adapter, is_base):
            if not any(map(is_kind, saved)):
                return is_kind
    return None


def lack_text(path: str) -> str:
    """Describes a checkpoint that lacks the variable `path`: 'no adapters' if that is an adapter, else 'adapters alone'."""
    return "no adapters" if is_adapter(path) else "adapters alone"


def trained_part(tree: TrainState, variables: TrainState) -> TrainState:
    """Removes the frozen base from a state with adapters, because checkpoints lack it. Returns other states unchanged.

    Args:
      tree: arrays, VariableSpecs or anything else in the structure of the state.
      variables: the state's VariableSpecs.

    Returns:
      `tree` with None, a node without leaves, in place of each variable of the base.
    """
    if not has_adapters(variables):
        return tree
    part: TrainState = jax.tree.map(lambda spec, leaf: None if is_base(spec.path) else leaf, variables, tree)
    return part


def base_specs(variables: TrainState) -> dict[str, VariableSpec]:
    """Returns {path: VariableSpec} of the frozen base."""
    return {path: spec for path, spec in records.by_path(variables).items() if is_base(path)}


def joined(trained: TrainState, base: Mapping[str, jax.Array], variables: TrainState) -> TrainState:
    """Merges the trained part of a state with the arrays of its frozen base, {path: array}, into the whole state."""
    specs = records.by_path(variables)
    rest = iter(jax.tree.leaves(trained))
    leaves = [base[path] if is_base(path) else next(rest) for path in specs]
    state: TrainState = jax.tree.unflatten(jax.tree.structure(variables), leaves)
    return state


def lacks_base_text(metadata: Mapping[str, Any]) -> str:
    """Returns '' or, if a checkpoint has adapters without their frozen base, a phrase that says so and where the base came from.

    Args:
      metadata: the metadata in the checkpoint's record.
    """
    if BASE_KEY not in metadata:
        return ""
    base = BaseRecord.from_json(metadata[BASE_KEY])
    return f"holds adapters alone; the {len(base.checksums)} variables of their base ({base.origin()}) are not in it"


def settings(lora: Lora) -> dict[str, Any]:
    """Returns the LoRA settings on which the effect of the adapters depends: rank, alpha, rslora, dora."""
    return {
        "rank": int(lora.rank),
        "alpha": float(lora.alpha),
        "rslora": bool(lora.rslora),
        "dora": bool(lora.dora),
    }


def require_settings(saved: Mapping[str, Any], lora: Lora, source: str) -> None:
    """Checks that saved adapters are used with the settings with which they were trained.

    Raises:
      CheckpointMismatchError: settings differ or are not recorded. The message names those that differ, and the fix.
    """
    here = settings(lora)
    if not here.keys() <= saved.keys():
        raise CheckpointMismatchError(
            f"The checkpoint of {source} does not say with which settings its adapters were trained, such as alpha"
        )
    if differing := [name for name, value in here.items() if saved[name] != value]:
        there = ", ".join(f"{name}={saved[name]!r}" for name in differing)
        now = ", ".join(f"{name}={here[name]!r}" for name in differing)
        fix = "; ".join(f"task.lora.{name}={saved[name]!r}" for name in differing)
        raise CheckpointMismatchError(
            f"The adapters of {source} were trained with {there}, and task.lora has {now}: they would be another model. "
            f"Set {fix}."
        )


@dataclasses.dataclass(frozen=True)
class BaseRecord:
    """The record of the frozen base of a run's adapters, in the metadata of the run's checkpoints.

    Attributes:
      paths: the directories that the base was loaded from: keys of `init_from_checkpoint_rules`, or the Hugging Face folder
        of `--restore_checkpoint_dir`. Variables that are in none of them are initialized from `task.train.random_seed`.
      sources: the names of the checkpoints that were read there, e.g. 'step 100 in runs/pretrained/checkpoints'.
      checksums: {path of a variable: its checksum}, see `checksums`.
      dtypes: {path of a variable: the name of its dtype}.
      restored_from: the Hugging Face folder of `--restore_checkpoint_dir` if the base was loaded from it, instead of by
        `init_from_checkpoint_rules`; otherwise None.
    """

    paths: tuple[str, ...]
    sources: tuple[str, ...]
    checksums: Mapping[str, str]
    dtypes: Mapping[str, str]
    restored_from: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns this record as an entry for the metadata of a checkpoint."""
        return {
            "path": list(self.paths),
            "source": list(self.sources),
            "checksum": dict(self.checksums),
            "dtype": dict(self.dtypes),
            "restored_from": self.restored_from,
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> BaseRecord:
        """Returns the record from an entry that `to_json` returned."""
        paths, sources = tuple(entry["path"]), tuple(entry["source"])
        return cls(paths, sources, entry["checksum"], entry["dtype"], entry["restored_from"])

    def require_same(self, found: BaseRecord, checkpoint: str) -> None:
        """Checks that a loaded base is equal to the recorded one, bit for bit.

        Args:
          found: the record of the base that was loaded.
          checkpoint: the name of the checkpoint that holds this record.

        Raises:
          CheckpointMismatchError: variables differ. The message names them, and the sources of both bases.
        """
        common = self.checksums.keys() & found.checksums.keys()
        retyped = [path for path in sorted(common) if self.dtypes[path] != found.dtypes[path]]
        changed = [path for path in sorted(common) if self.checksums[path] != found.checksums[path]]
        lines = [f"  not in the model any more: {path}" for path in self.checksums if path not in common]
        lines += [f"  not in the base then: {path}" for path in found.checksums if path not in common]
        lines += [f"  other dtype: {path}, {self.dtypes[path]} then, {found.dtypes[path]} now" for path in retyped]
        lines += [f"  other values: {path}" for path in changed if path not in set(retyped)]
        if not lines:
            return
        fix = (
            "give the model's variables the dtype in which the adapters were trained"
            if retyped
            else "load the base that the adapters were trained on by task.train.init_from_checkpoint_rules; if that run went on "
            "since, name the step with CheckpointLoadingRules(step=N)"
        )
        differing = f"{len(lines)} of {len(self.checksums)} variables differ."
        head = f"The adapters of {checkpoint} were trained on another base: {differing}"
        origins = [f"  base of the adapters: {self.origin()}", f"  base of this job: {found.origin()}"]
        raise CheckpointMismatchError("\n".join([head, *origins, *mismatch.first_lines(lines), f"Fix: {fix}."]))

    def origin(self) -> str:
        """Returns the names of the sources of the base, joined by commas, for messages."""
        names = self.sources or ("initialised from task.train.random_seed",)
        return ", ".join(names)
