"""Sharding by path: a strategy is a list of (regex, tactic); the first rule whose regex matches a leaf's path decides.

    strategy = [
        ('embedding', 'shard_dim(0, "mdl", allow_uneven=True)'),
        ('kernel', ['shard_dim(-1, "mdl")', 'fsdp(axis="data")']),   # tensor parallel over mdl, then FSDP over data
        ('.*', 'fsdp(axis="data")'),
    ]

Regular expressions are searched for anywhere in the path (`re.search`): 'bias' matches `params/bias/b`, and '^params/' or
'/b$' anchors the match. A path is a leaf's keys joined by '/', e.g. `params/layers/0/kernel`. The paths of optimizer and EMA
leaves contain their variable's path, so they follow its rule. A tactic is a text, a callable (see `tactics`), or a list of
these, each of which is applied to the result of the previous one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from spmd_trainer.sharding.specs import AnyMesh, PyTree
from spmd_trainer.sharding.tactics import BuiltinTactic, Tactic, parse_tactic
from spmd_trainer.sharding.variables import named_shardings, plan_leaves

Rule = tuple[str, str | Tactic | Sequence[str | Tactic]]
Strategy = Sequence[Rule]


def infer_sharding(state: PyTree, strategy: Strategy, mesh: AnyMesh) -> PyTree:
    """Returns a NamedSharding for every leaf, from the first rule whose regex matches its path (`re.search`).

    Args:
      state: any pytree: an NNX state, a Flax dict, a praxis NestedMap, an optax state, ShapeDtypeStructs.
      strategy: [(regex, tactic), ...], see the module `path_rules`. A leaf that no rule matches keeps its current spec on this
        mesh; if it has none, it is replicated.
      mesh: the mesh.

    Returns:
      A tree like `state`. With `allow_uneven`, a sharding may need a padded shape: `plan_sharding` gives the paddings.

    Raises:
      ValueError: see `plan_sharding`.
    """
    return named_shardings(plan_sharding(state, strategy, mesh), mesh)


def plan_sharding(state: PyTree, strategy: Strategy, mesh: AnyMesh) -> PyTree:
    """Returns the decisions of `infer_sharding` as VariableSpecs, with paddings and reasons.

    Args:
      state: any pytree of arrays, ShapeDtypeStructs or Python numbers.
      strategy: [(regex, tactic), ...], see the module `path_rules`; regexes are matched with `re.search`.
      mesh: the mesh.

    Returns:
      A tree like `state` of VariableSpecs. Their reasons read `rule 2 ('kernel', fsdp(axis='data'))`,
      `replicated: no dimension of (7, 13) divides by data=4; rule 2 (...)`, `replicated: no rule matched`, ...

    Raises:
      ValueError: the strategy is not a list of (regex, tactic), a regex does not compile, or a tactic is unknown, names an
        axis that the mesh does not have, replicates a leaf that is already sharded, uses an axis twice for one leaf, shards
        a scalar, or returns a spec that does not fit.
    """
    rules = [_Rule(number, entry) for number, entry in enumerate(_checked(strategy), start=1)]

    def decide(path: str, shape: tuple[int, ...], leaf: Any, spec: PartitionSpec) -> tuple[PartitionSpec, str]:
        for rule in rules:
            if rule.regex.search(path):
                return rule.decide(spec, mesh, path, leaf)
        return spec, "keeps its spec on this mesh: no rule matched" if any(spec) else "replicated: no rule matched"

    return plan_leaves(state, mesh, decide)


class _Rule:
    def __init__(self, number: int, entry: Rule):
        pattern, given = entry
        try:
            self.regex = re.compile(pattern)
        except re.error as error:
            mark = f" at character {error.pos}" if error.pos is not None else ""
            raise ValueError(
                f"Sharding rule {number}: the regex {pattern!r} does not compile: {error.msg}{mark}. "
                "Escape special characters with a backslash."
            ) from error
        tactics = list(given) if isinstance(given, list | tuple) else [given]
        self._tactics: list[Tactic] = []
        for tactic in tactics:
            if not isinstance(tactic, str) and not callable(tactic):
                raise ValueError(
                    f"Sharding rule {number} ({pattern!r}): {tactic!r} is not a tactic. Write a text such as "
                    "'fsdp(axis=\"data\")', a callable (spec, mesh, path, leaf) -> spec, or a list of these."
                )
            try:
                self._tactics.append(parse_tactic(tactic) if isinstance(tactic, str) else tactic)
            except ValueError as error:
                raise ValueError(f"Sharding rule {number} ({pattern!r}): {error}") from error
        texts = [_tactic_text(tactic) for tactic in self._tactics]
        self._text = f"rule {number} ({pattern!r}, {texts[0] if len(texts) == 1 else '[' + ', '.join(texts) + ']'})"

    def decide(self, spec: PartitionSpec, mesh: AnyMesh, path: str, leaf: Any) -> tuple[PartitionSpec, str]:
        """Applies the rule's tactics in turn. Returns the spec and its reason, with notes on tactics that did not apply."""
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
                # A returned spec may have fewer entries; the next tactic expects one per dimension.
                spec = PartitionSpec(*entries, *(None,) * (len(spec) - len(entries)))
        if not notes:
            return spec, self._text
        missed = "; ".join(notes)
        return spec, f"{self._text}, but {missed}" if any(spec) else f"replicated: {missed}; {self._text}"


def _tactic_text(tactic: Tactic) -> str:
    return str(tactic) if isinstance(tactic, BuiltinTactic) else getattr(tactic, "__name__", repr(tactic))


def _checked(strategy: object) -> list[Rule]:
    example = "[('.*', 'fsdp(axis=\"data\")')]"
    if isinstance(strategy, str | Mapping) or not isinstance(strategy, Sequence):
        raise ValueError(
            f"A sharding strategy must be a list of (regex, tactic), e.g. {example}, not a "
            f"{type(strategy).__name__}: {strategy!r}."
        )
    for number, entry in enumerate(strategy, start=1):
        if (
            isinstance(entry, str)
            or not isinstance(entry, Sequence)
            or len(entry) != 2
            or not isinstance(entry[0], str)
        ):
            raise ValueError(f"Sharding rule {number} is {entry!r}; it must be (regex, tactic), e.g. {example[1:-1]}.")
    return list(strategy)
