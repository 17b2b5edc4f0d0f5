"""Sharding by path: a strategy is a list of (regex, tactic), and the first regex found in a leaf's path decides it.

    strategy = [
        ('embedding', 'shard_dim(0, "mdl", allow_uneven=True)'),
        ('kernel', ['shard_dim(-1, "mdl")', 'fsdp(axis="data")']),   # tensor parallel, then the rest over data
        ('.*', 'fsdp(axis="data")'),
    ]

A path is a leaf's keys joined by '/', e.g. `params/layers/0/kernel`, so optimizer and EMA leaves, whose paths contain
their variable's, follow its rule. A tactic is text, a callable (see `tactics`), or a list of these, each on the result
of the one before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from spmd_trainer.sharding.planning import plan_leaves
from spmd_trainer.sharding.specs import AnyMesh
from spmd_trainer.sharding.tactics import BuiltinTactic, Tactic, parse_tactic
from spmd_trainer.sharding.variables import named_shardings

Strategy = Sequence[tuple[str, str | Tactic | Sequence[str | Tactic]]]


def infer_sharding(state: Any, strategy: Strategy, mesh: AnyMesh) -> Any:
    """A NamedSharding for every leaf, by the first rule whose regex is found in its path.

    Args:
      state: any pytree: an NNX state, a Flax dict, a praxis NestedMap, an optax state, ShapeDtypeStructs.
      strategy: see the module. A leaf that no rule matches stays as it lies on this mesh, else is replicated.
      mesh: the mesh.

    Returns:
      A tree like `state`. With `allow_uneven` a sharding may be for the padded shape: `plan_sharding` has the paddings.

    Raises:
      ValueError: see `plan_sharding`.
    """
    return named_shardings(plan_sharding(state, strategy, mesh), mesh)


def plan_sharding(state: Any, strategy: Strategy, mesh: AnyMesh, *, declared: Any = None) -> Any:
    """What `infer_sharding` decides, as records with the paddings and the reason.

    Args:
      state: any pytree of arrays, ShapeDtypeStructs or Python numbers.
      strategy: see the module.
      mesh: the mesh.
      declared: a prefix tree of `state` whose specs stand, whatever the rules say; None in it leaves a leaf to the
        rules.

    Returns:
      A tree like `state` of VariableSpecs. Their reasons read `declared`, `rule 2 ('kernel', fsdp(axis='data'))`,
      `replicated: no dimension of (7, 13) divides by data=4; rule 2 (...)`, `replicated: no rule matched`, ...

    Raises:
      ValueError: a strategy that is no list of (regex, tactic), a regex that does not compile, an unknown tactic, an
        axis that the mesh does not have, a leaf that is split already and is to be replicated or split by the same
        axis, a scalar that is to be split, or a tactic's spec that does not fit.
    """
    rules = [_Rule(number, entry) for number, entry in enumerate(_checked(strategy), start=1)]

    def decide(path: str, shape: tuple[int, ...], leaf: Any, spec: PartitionSpec) -> tuple[PartitionSpec, str]:
        for rule in rules:
            if rule.regex.search(path):
                return rule.decide(spec, mesh, path, leaf)
        return spec, "kept as it lies on this mesh: no rule matched" if any(spec) else "replicated: no rule matched"

    return plan_leaves(state, mesh, decide, declared)


class _Rule:
    """One compiled entry of a strategy."""

    def __init__(self, number: int, entry: tuple[str, Any]):
        pattern, tactics = entry
        try:
            self.regex = re.compile(pattern)
        except re.error as error:
            mark = f" at character {error.pos}" if error.pos is not None else ""
            raise ValueError(
                f"Sharding rule {number}: the regex {pattern!r} does not compile: {error.msg}{mark}. "
                "Escape special characters with a backslash."
            ) from error
        tactics = list(tactics) if isinstance(tactics, list | tuple) else [tactics]
        self._tactics: list[Tactic] = []
        for tactic in tactics:
            if not isinstance(tactic, str) and not callable(tactic):
                raise ValueError(
                    f"Sharding rule {number} ({pattern!r}): {tactic!r} is no tactic. Write text such as "
                    "'fsdp(axis=\"data\")', or a callable (spec, mesh, path, leaf) -> spec, or a list of them."
                )
            try:
                self._tactics.append(parse_tactic(tactic) if isinstance(tactic, str) else tactic)
            except ValueError as error:
                raise ValueError(f"Sharding rule {number} ({pattern!r}): {error}") from error
        texts = [_tactic_text(tactic) for tactic in self._tactics]
        self._text = f"rule {number} ({pattern!r}, {texts[0] if len(texts) == 1 else '[' + ', '.join(texts) + ']'})"

    def decide(self, spec: PartitionSpec, mesh: AnyMesh, path: str, leaf: Any) -> tuple[PartitionSpec, str]:
        """Applies the tactics one after the other, and collects what they could not do."""
        notes = []
        for tactic in self._tactics:
            if isinstance(tactic, BuiltinTactic):
                try:
                    spec, note = tactic.decide(spec, mesh, path, leaf)
                except ValueError as error:
                    raise ValueError(f"{error} This is sharding {self._text}.") from error
                notes += [note] if note else []
            else:
                entries = tuple(tactic(spec, mesh, path, leaf) or ())
                # A spec may stop early; the next tactic sees one entry per dimension.
                spec = PartitionSpec(*entries, *(None,) * (len(spec) - len(entries)))
        if not notes:
            return spec, self._text
        missed = "; ".join(notes)
        return spec, f"{self._text}, but {missed}" if any(spec) else f"replicated: {missed}; {self._text}"


def _tactic_text(tactic: Tactic) -> str:
    return str(tactic) if isinstance(tactic, BuiltinTactic) else getattr(tactic, "__name__", repr(tactic))


def _checked(strategy: Any) -> list[tuple[str, Any]]:
    example = "[('.*', 'fsdp(axis=\"data\")')]"
    if isinstance(strategy, str | Mapping) or not isinstance(strategy, Sequence):
        raise ValueError(
            f"A sharding strategy is a list of (regex, tactic), e.g. {example}, and this is a "
            f"{type(strategy).__name__}: {strategy!r}."
        )
    for number, entry in enumerate(strategy, start=1):
        if (
            isinstance(entry, str)
            or not isinstance(entry, Sequence)
            or len(entry) != 2
            or not isinstance(entry[0], str)
        ):
            raise ValueError(f"Sharding rule {number} is {entry!r}, and must be (regex, tactic), e.g. {example[1:-1]}.")
    return list(strategy)
