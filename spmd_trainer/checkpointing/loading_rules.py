"""Warm starts (`init_from_checkpoint_rules`), which initialize variables of a model from the checkpoints of other runs."""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from etils import epath
from jax.sharding import Mesh

from spmd_trainer import storage
from spmd_trainer.checkpointing import frozen_base, mismatch, own_steps, records, rule_matching
from spmd_trainer.checkpointing.agreement import agreed_problem
from spmd_trainer.checkpointing.errors import CheckpointMismatchError
from spmd_trainer.checkpointing.rule_matching import CheckpointLoadingRules, RulesByDirectory
from spmd_trainer.checkpointing.sources import CheckpointSource, OpenForeign
from spmd_trainer.sharding.messages import table_lines
from spmd_trainer.train_states import is_adapter

if TYPE_CHECKING:
    from spmd_trainer.sharding.variables import VariableSpec
    from spmd_trainer.train_states import TrainState


LOADED, SKIPPED, LEFT = "loaded", "skipped", "left at init"
_VARS, _OPT, _STEP = "mdl_vars/", "opt_states/", "step"
_EMA = "ema/"


@dataclasses.dataclass(frozen=True)
class LoadRow:
    """The effect of a warm start on one variable.

    Attributes:
      path: the variable's path, e.g. 'mdl_vars/params/lm/softmax/w'.
      status: `loaded`, `skipped` (by an ignore rule) or `left at init`.
      note: the source of a loaded variable, or why the variable is not loaded.
    """

    path: str
    status: str
    note: str


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """The effect of a warm start on every variable. Its `str` is a table, then the warnings.

    Attributes:
      rows: one per variable, in the model's order.
      opt_states_loaded: True if any optimizer state is loaded. If not, the caller must compute optimizer states that are
        copies of variables (EMA) from the loaded variables.
      warnings: one per rule that has no effect because earlier rules match all of its variables.
    """

    rows: tuple[LoadRow, ...]
    opt_states_loaded: bool
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        counts = collections.Counter(row.status for row in self.rows)
        adapters = [row for row in self.rows if is_adapter(row.path) and not row.path.startswith(_OPT)]
        # If some adapters are loaded, those that are not are shown one by one.
        are_new = all(row.status == LEFT for row in adapters)
        shown: list[tuple[str, str, str]] = []
        unshown: collections.Counter[str] = collections.Counter()
        for row in self.rows:
            is_state = row.path.startswith(_OPT)
            if is_state and row.status == LEFT and not row.note:
                unshown["optimizer states"] += 1
            elif are_new and is_adapter(row.path) and not is_state:
                unshown["variables of new adapters"] += 1
            else:
                shown.append((f"  {row.path}", row.status, row.note))
        lines = [", ".join(f"{counts[status]} {status}" for status in (LOADED, SKIPPED, LEFT))]
        lines += table_lines(shown)
        lines += [f"  and {count} {what} left at init" for what, count in unshown.items()]
        lines += [f"warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class ResolvedRules:
    """The variables that a warm start loads, determined from the records of the checkpoints; no array has been read.

    Attributes:
      report: the effect on every variable.
      parts: (source, {path in the model: path in the checkpoint}) for each checkpoint.
    """

    report: LoadReport
    parts: tuple[tuple[CheckpointSource, dict[str, str]], ...]

    def read(self, variables: TrainState, mesh: Mesh) -> dict[str, jax.Array]:
        """Reads the variables onto a mesh, in the model's dtypes; returns {path: array}. All processes must call it."""
        from spmd_trainer.checkpointing import opt_state_conversion  # imports praxis, which records don't need

        specs: dict[str, VariableSpec] = records.by_path(variables)
        arrays: dict[str, jax.Array] = {}
        for source, saved_paths in self.parts:
            wanted = {path: specs[path] for path in saved_paths}
            changed = opt_state_conversion.conversion(source.saved, wanted, saved_paths)
            arrays |= changed.made(source.read(changed.read, mesh, changed.source), mesh, source.step)
        return arrays

    def only(self, is_wanted: Callable[[str], bool]) -> ResolvedRules:
        """Returns a copy that loads only the wanted paths, and leaves out checkpoints that have none of them."""
        chosen = [(source, {p: q for p, q in paths.items() if is_wanted(p)}) for source, paths in self.parts]
        return dataclasses.replace(self, parts=tuple((source, paths) for source, paths in chosen if paths))


def resolve_rules(
    variables: TrainState, rules: RulesByDirectory, *, check_contents: bool, open_foreign: OpenForeign | None = None
) -> ResolvedRules:
    """Determines the variables that a warm start loads, from the records of the checkpoints. All processes must call it.

    Checkpoints are used in the mapping's order. A variable is loaded from the first checkpoint that has a rule for it. The
    step counter and the optimizer states are loaded from the first checkpoint whose rules request them.

    Args:
      variables: a TrainState (or another tree) of VariableSpecs.
      rules: {directory: rules or their Fiddle config}. A directory is a run's `job_log_dir`, its `checkpoints`, or a step in it.
      check_contents: True compares the checksums of files, which is needed before loading. False compares only their sizes.
      open_foreign: opens checkpoints of other trainers; None accepts only this trainer's.

    Raises:
      UserError: `rules` does not map directories to CheckpointLoadingRules.
      CheckpointNotFoundError: a directory has no undamaged checkpoint.
      DamagedCheckpointError: the step that the rules name is damaged.
      CheckpointMismatchError: a rule matches no variable of the model, or names a variable that the checkpoint lacks or
        that has a different logical shape there; the rules load nothing; or the optimizer states differ.
    """
    specs = records.by_path(variables)
    rows = {path: LoadRow(path, LEFT, "no rule matches" if path.startswith(_VARS) else "") for path in specs}
    parts: list[tuple[CheckpointSource, dict[str, str]]] = []
    warnings: list[str] = []
    for directory, rule in rule_matching.built(rules).items():
        path = storage.directory("init_from_checkpoint_rules", directory)
        foreign = open_foreign(path, rule.step, variables) if open_foreign is not None else None
        source = own_steps.find_step(path, rule.step, check_contents) if foreign is None else foreign
        # Each process has opened the source itself.
        agreed_problem(functools.partial(_resolve, rule, specs, source, rows, parts, warnings))
    loaded_opt = any(row.status == LOADED for path, row in rows.items() if path.startswith(_OPT))
    return ResolvedRules(LoadReport(tuple(rows.values()), loaded_opt, tuple(warnings)), tuple(parts))


def _resolve(
    rule: CheckpointLoadingRules,
    specs: Mapping[str, VariableSpec],
    source: CheckpointSource,
    rows: dict[str, LoadRow],
    parts: list[tuple[CheckpointSource, dict[str, str]]],
    warnings: list[str],
) -> None:
    """Applies the rules of one checkpoint, and adds the results to the rows, parts and warnings of a warm start."""
    _check_kind(specs, source)
    warnings += _check_rules(rule, specs, source)
    open_paths = {path: spec for path, spec in specs.items() if rows[path].status != LOADED}
    saved_paths = _resolve_variables(rule, open_paths, source, rows)
    saved_paths |= _resolve_opt_states(rule, open_paths, source, rows)
    if rule.load_step and _STEP in open_paths:
        if _STEP not in source.saved:
            raise CheckpointMismatchError(
                _explain(source, ["it has no step counter that load_step could load"], "set load_step=False")
            )
        saved_paths[_STEP] = _STEP
    if not saved_paths:
        raise CheckpointMismatchError(_nothing_loaded(source, rows))
    for path, saved_path in saved_paths.items():
        rows[path] = LoadRow(path, LOADED, _describe(source, saved_path, specs[path]))
    parts.append((source, saved_paths))


def _check_rules(
    rule: CheckpointLoadingRules, specs: Mapping[str, VariableSpec], source: CheckpointSource
) -> list[str]:
    """Raises an error for rules that match no variable of the model. Returns warnings about rules without effect."""
    names = [path.removeprefix(_VARS) for path in specs if path.startswith(_VARS)]
    if rule.partial_load_opt_states:
        names += [part.removeprefix(_OPT) for part in _opt_parts(specs)]
    saved = [path.removeprefix(_VARS) for path in source.saved if path.startswith(_VARS)]
    faults = rule_matching.without_match(rule.load_rules, rule.ignore_rules or (), names, saved)
    if faults:
        raise CheckpointMismatchError(
            _explain(source, faults, "correct these regexes; they are matched from the beginning of a name")
        )
    return [f"{fault} ({source.name})" for fault in rule_matching.shadowed(rule.load_rules, names)]


def _check_kind(specs: Mapping[str, VariableSpec], source: CheckpointSource) -> None:
    """Raises an error for a checkpoint that holds only adapters if the model has no adapters."""
    only_adapters = any(map(is_adapter, source.saved)) and not any(map(frozen_base.is_base, source.saved))
    if only_adapters and not any(map(is_adapter, specs)):
        raise CheckpointMismatchError(mismatch.adapters_alone(source.name))


def for_base(variables: TrainState, rules: RulesByDirectory) -> dict[epath.PathLike, CheckpointLoadingRules]:
    """Selects the rules that load the frozen base of a run with adapters, and makes them load no step or optimizer state.

    Args:
      variables: a TrainState of VariableSpecs.
      rules: as in `resolve_rules`.
    """
    names = [path.removeprefix(_VARS) for path in frozen_base.base_specs(variables)]
    found = {}
    for directory, rule in rule_matching.built(rules).items():
        ignored = rule.ignore_rules or ()
        matches = (rule_matching.first_match(rule.load_rules, ignored, name) for name in names)
        if any(match is not None and match.ignored_by is None for match in matches):
            found[directory] = dataclasses.replace(
                rule, load_step=False, load_opt_states=False, partial_load_opt_states=False
            )
    return found


def _explain(source: CheckpointSource, faults: Sequence[str], fix: str) -> str:
    lines = [f"init_from_checkpoint_rules cannot be applied to {source.name}:"]
    lines += mismatch.first_lines([f"  {fault}" for fault in faults])
    return "\n".join([*lines, f"Fix: {fix}."])


def _nothing_loaded(source: CheckpointSource, rows: Mapping[str, LoadRow]) -> str:
    counts = collections.Counter(row.status for row in rows.values())
    return _explain(
        source,
        [
            f"nothing would be loaded from it: {counts[LOADED]} variables of the model are loaded from checkpoints listed "
            f"before it, {counts[SKIPPED]} are excluded by ignore_rules, and no rule matches the other {counts[LEFT]}"
        ],
        "narrow ignore_rules or the rules of the checkpoints before it, or remove this checkpoint",
    )


def _describe(source: CheckpointSource, saved_path: str, spec: VariableSpec) -> str:
    saved, dtype = source.saved[saved_path], records.dtype_name(spec.dtype)
    converted = f", converted from {saved.dtype} to {dtype}" if saved.dtype != dtype else ""
    renamed = "" if saved_path == spec.path else f"{saved_path} of "
    return f"{renamed}{source.name}{converted}"


def _resolve_variables(
    rule: CheckpointLoadingRules,
    open_paths: Mapping[str, VariableSpec],
    source: CheckpointSource,
    rows: dict[str, LoadRow],
) -> dict[str, str]:
    """Returns {model path: saved path} of variables. Records in `rows` which variables are not loaded, and why.

    In a run with adapters, `LOAD_ALL` matches the frozen base and the adapters. If the checkpoint lacks all of the base or all
    adapters, these variables of the model keep their initial values; it is an error if a rule matches no other variables.
    """
    saved_paths, faults, skipped = {}, [], set()
    lacking = frozen_base.lacking_kind(open_paths, source.saved)
    for path, spec in open_paths.items():
        if not path.startswith(_VARS):
            continue
        match = rule_matching.first_match(rule.load_rules, rule.ignore_rules or (), path.removeprefix(_VARS))
        if match is None:
            continue
        if match.ignored_by is not None:
            rows[path] = LoadRow(path, SKIPPED, f"ignore rule {match.ignored_by!r}")
            continue
        saved_path = _saved_path(match.source, source, rule)
        if lacking is not None and lacking(path) and lacking(saved_path):
            rows[path] = LoadRow(path, LEFT, f"{source.name} has {frozen_base.lack_text(path)}")
            skipped.add(match.rule)
            continue
        fault = _fault(spec, saved_path, match.source, source)
        if fault:
            by = rule_matching.describe(match.rule, *rule.load_rules[match.rule])
            faults.append(f"{path}, by {by}: {fault}")
        else:
            saved_paths[path] = saved_path
    for index in sorted(skipped):
        matched = [path for path in open_paths if re.match(rule.load_rules[index][0], path.removeprefix(_VARS))]
        if lacking is not None and all(map(lacking, matched)):
            faults.append(
                f"{rule_matching.describe(index, *rule.load_rules[index])} matches variables such as {matched[0]}, and the "
                f"checkpoint has {frozen_base.lack_text(matched[0])}"
            )
    if faults:
        fix = "narrow load_rules, correct their templates, or add these variables to ignore_rules"
        raise CheckpointMismatchError(_explain(source, faults, fix))
    return saved_paths


def _resolve_opt_states(
    rule: CheckpointLoadingRules,
    open_paths: Mapping[str, VariableSpec],
    source: CheckpointSource,
    rows: dict[str, LoadRow],
) -> dict[str, str]:
    """Returns {model path: saved path} of the optimizer states to load: all of them, those that rules match, or none.

    An optimizer state consists of parts: a part is an array or, in 8 bits, a pair of arrays. A part that was saved in a
    different dtype (one of `opt_state_dtypes.DTYPES`) is converted. Its saved path may be that of either array of a pair.
    """
    from spmd_trainer.checkpointing import opt_state_conversion  # imports praxis, which records don't need

    parts = _opt_parts(open_paths)
    saved_paths: dict[str, str] = {}
    if rule.load_opt_states and not rule.partial_load_opt_states:
        if any(row.status == LOADED for path, row in rows.items() if path.startswith(_OPT)):
            return {}
        changed = opt_state_conversion.conversion(
            source.saved, {p: s for specs in parts.values() for p, s in specs.items()}
        )
        saved = {path: variable for path, variable in source.saved.items() if path.startswith(_OPT)}
        wanted = {path: records.SavedVariable.from_spec(spec) for path, spec in changed.read.items()}
        message = mismatch.explain(saved, wanted, f"init_from_checkpoint_rules.load_opt_states: {source.name}")
        if message:
            raise CheckpointMismatchError(message)
        named = {part: part for part in parts}
    elif rule.partial_load_opt_states:
        named = {}
        for part in parts:
            match = rule_matching.first_match(rule.load_rules, rule.ignore_rules or (), part.removeprefix(_OPT))
            if match is not None and match.ignored_by is None:
                named[part] = _OPT + match.source
    else:
        return {}
    for part, saved_part in named.items():
        specs = parts[part]
        paths = {path: saved_part + path.removeprefix(part) for path in specs}
        changed = opt_state_conversion.conversion(source.saved, specs, paths)
        faults = [
            _fault(spec, changed.source[path], changed.source[path].removeprefix(_OPT), source)
            for path, spec in changed.read.items()
        ]
        if fault := next(filter(None, faults), None):
            rows.update({path: LoadRow(path, LEFT, fault) for path in specs})
            continue
        some = next(iter(changed.source.values()))
        saved_paths |= {path: paths[path] if paths[path] in source.saved else some for path in specs}
    return saved_paths


def _opt_parts(specs: Mapping[str, VariableSpec]) -> dict[str, dict[str, VariableSpec]]:
    """Returns {part: {path: VariableSpec}} of the optimizer states. A part is an array or, in 8 bits, a pair of arrays."""
    from spmd_trainer.checkpointing import opt_state_conversion

    parts: dict[str, dict[str, VariableSpec]] = {}
    for path, spec in specs.items():
        if path.startswith(_OPT):
            parts.setdefault(opt_state_conversion.part_of(path), {})[path] = spec
    return parts


def _saved_path(name: str, source: CheckpointSource, rule: CheckpointLoadingRules) -> str:
    """Returns the path in the checkpoint for a filled template: below `mdl_vars`, or, for 'ema/...', in an optimizer state."""
    if name.startswith(_EMA) and rule.load_ema_states:
        averages = [path for path in source.saved if path.startswith(_OPT) and path.endswith(f"/{name}")]
        if len(averages) == 1:
            return averages[0]
    return _VARS + name


def _fault(spec: VariableSpec, saved_path: str, name: str, source: CheckpointSource) -> str | None:
    """Returns the reason why a variable cannot be loaded from a saved path; None if it can."""
    saved = source.saved.get(saved_path)
    if saved is None:
        return f"the checkpoint has no {name!r}; {_nearest_saved(name, saved_path, source)}"
    if not source.fits(saved_path, spec.logical_shape):
        return f"{name!r} is {saved.shape} in the checkpoint and {tuple(spec.logical_shape)} in the model"
    wanted = records.dtype_name(spec.dtype)
    if saved.dtype != wanted and not (_is_float(saved.dtype) and _is_float(wanted)):
        return f"{name!r} is {saved.dtype} in the checkpoint and {wanted} in the model"
    return None


def _nearest_saved(name: str, saved_path: str, source: CheckpointSource) -> str:
    """Returns a hint: the name in the checkpoint that is most like the missing `name`, written as templates write it."""
    if name.startswith(_EMA):
        return rule_matching.nearest(
            name, (f"{_EMA}{p.split(f'/{_EMA}', 1)[1]}" for p in source.saved if f"/{_EMA}" in p)
        )
    prefix = _OPT if saved_path.startswith(_OPT) else _VARS
    return rule_matching.nearest(name, (p.removeprefix(prefix) for p in source.saved if p.startswith(prefix)))


def _is_float(dtype: str) -> bool:
    return not dtype.startswith("key<") and jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
