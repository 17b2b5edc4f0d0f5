"""Runs with adapters (`task.lora`): a checkpoint holds what is trained, and names the frozen base with a checksum per variable.

Everything in `mdl_vars` but the adapters is the base. It never changes, so each start loads it again from where it came from.
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
    """Returns True for a variable of the model that is not an adapter's; `path` begins with 'mdl_vars/' there."""
    return path.startswith(_VARS) and not is_adapter(path)


def has_adapters(variables: TrainState) -> bool:
    """Returns True if a state has adapters. `variables` has VariableSpecs as leaves."""
    return any(is_adapter(spec.path) for spec in jax.tree.leaves(variables))


def lacking_kind(paths: Iterable[str], saved: Iterable[str]) -> Callable[[str], bool] | None:
    """Returns the test for variables of which a checkpoint has none: adapters, or the base below them. None if it has both.

    Args:
      paths: the variables to load. Without adapters among them, the result is None.
      saved: the checkpoint's variables.
    """
    saved = list(saved)
    if any(map(is_adapter, paths)):
        for is_kind in (is_adapter, is_base):
            if not any(map(is_kind, saved)):
                return is_kind
    return None


def lack_text(path: str) -> str:
    """Returns what messages say of a checkpoint without variables of this one's kind."""
    return "no adapters" if is_adapter(path) else "adapters alone"


def trained_part(tree: TrainState, variables: TrainState) -> TrainState:
    """Returns what a checkpoint holds of a state: without the base if the state has adapters, otherwise all of it.

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
    """Returns the VariableSpecs of the base by path."""
    return {path: spec for path, spec in records.by_path(variables).items() if is_base(path)}


def joined(trained: TrainState, base: Mapping[str, jax.Array], variables: TrainState) -> TrainState:
    """Returns the whole state of a trained part and the arrays of its base by path."""
    specs = records.by_path(variables)
    rest = iter(jax.tree.leaves(trained))
    leaves = [base[path] if is_base(path) else next(rest) for path in specs]
    state: TrainState = jax.tree.unflatten(jax.tree.structure(variables), leaves)
    return state


def lacks_base_text(metadata: Mapping[str, Any]) -> str:
    """Returns what messages say of a checkpoint that this trainer saved without the base of its adapters; '' for another one.

    Args:
      metadata: what the checkpoint notes of its run.
    """
    if BASE_KEY not in metadata:
        return ""
    base = BaseRecord.from_json(metadata[BASE_KEY])
    return f"holds adapters alone; the {len(base.checksums)} variables of their base ({base.origin()}) are not in it"


def settings(lora: Lora) -> dict[str, Any]:
    """Returns the settings without which adapters are another model: rank, alpha, rslora, dora."""
    return {
        "rank": int(lora.rank),
        "alpha": float(lora.alpha),
        "rslora": bool(lora.rslora),
        "dora": bool(lora.dora),
    }


def require_settings(saved: Mapping[str, Any], lora: Lora, source: str) -> None:
    """Makes sure that adapters are used with the settings with which they were trained.

    Raises:
      CheckpointMismatchError: they differ; says which, and what to set.
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
    """The base of a run with adapters, as its checkpoints name it.

    Attributes:
      paths: the checkpoints that it was loaded from: keys of `init_from_checkpoint_rules`, or the Hugging Face folder of
        `--restore_checkpoint_dir`. Variables that none of them has are initialised from `task.train.random_seed`.
      sources: what was read of these, e.g. 'step 100 in runs/pretrained/checkpoints'.
      checksums: {path of a variable: its checksum}, see `checksums`.
      dtypes: {path of a variable: the name of its dtype}.
      restored_from: the Hugging Face folder that it was loaded from because of `--restore_checkpoint_dir`, instead of by
        `init_from_checkpoint_rules`; None without.
    """

    paths: tuple[str, ...]
    sources: tuple[str, ...]
    checksums: Mapping[str, str]
    dtypes: Mapping[str, str]
    restored_from: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the record's entry in the metadata of a checkpoint."""
        return {
            "path": list(self.paths),
            "source": list(self.sources),
            "checksum": dict(self.checksums),
            "dtype": dict(self.dtypes),
            "restored_from": self.restored_from,
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> BaseRecord:
        """Returns the record of an entry that `to_json` made."""
        paths, sources = tuple(entry["path"]), tuple(entry["source"])
        return cls(paths, sources, entry["checksum"], entry["dtype"], entry["restored_from"])

    def require_same(self, found: BaseRecord, checkpoint: str) -> None:
        """Makes sure that a base is this one, bit for bit.

        Args:
          found: the base that was loaded.
          checkpoint: the checkpoint that holds this record, for the message.

        Raises:
          CheckpointMismatchError: variables differ. Names them, and what each base was loaded from.
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
        """Returns what the base was loaded from, for messages."""
        names = self.sources or ("initialised from task.train.random_seed",)
        return ", ".join(names)
