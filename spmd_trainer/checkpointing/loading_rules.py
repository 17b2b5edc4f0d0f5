"""Warm starts: which variables of another run's checkpoint a new model begins with (`init_from_checkpoint_rules`)."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import fiddle as fdl
import jax
import jax.numpy as jnp
from absl import logging
from etils import epath
from jax.sharding import Mesh

from spmd_trainer import multihost
from spmd_trainer.checkpointing import manifest, mismatch, records, rule_matching, steps
from spmd_trainer.checkpointing.errors import CheckpointMismatchError, CheckpointNotFoundError, DamagedCheckpointError
from spmd_trainer.errors import UserError

if TYPE_CHECKING:
    from spmd_trainer.sharding.variables import VariableSpec

LOAD_ALL = ("(.*)", "{}")
LOADED, SKIPPED, LEFT = "loaded", "skipped", "left at init"
_VARS, _OPT, _STEP = "mdl_vars/", "opt_states/", "step"
_EMA = "ema/"
_MAX_LISTED = 20


@dataclasses.dataclass(frozen=True)
class CheckpointLoadingRules:
    """What to take from one checkpoint. Field names and defaults are Pax's.

    A model variable is named by its path below `mdl_vars`, e.g. 'params/lm/softmax/w'. The first rule whose regex
    matches from the name's start decides; its template, filled with the regex's groups, names the variable to take from
    the checkpoint. Dots in templates stand for slashes. A rule that matches no variable of the model is refused, and so
    are rules that load nothing. A rule whose variables are all decided by earlier rules is told in the report.

    Example, a decoder that takes an LM's weights but not its biases:

        CheckpointLoadingRules(load_rules=[('params/decoder/lm/(.*)', 'params/lm/{}')], ignore_rules=['.*/b$'])

    Attributes:
      task_p: not needed, a checkpoint describes itself; accepted so that experiments written for Pax stay as they are.
      load_rules: pairs of regex and template. `LOAD_ALL` is the pair that takes everything under its own name. A
        template that starts with 'ema/' takes the variable's moving average out of the optimizer states.
      safe_load: Pax's name, without effect: a rule that matches no variable is always refused.
      ignore_rules: regexes of model variables to leave at their initial values; each must match one.
      step: which step of the checkpoint directory; None for the newest whole one.
      load_step: also continue the step counter.
      load_opt_states: also take the optimizer states, all of them; they must be the same.
      load_ema_states: whether 'ema/' templates are allowed.
      partial_load_opt_states: also take optimizer states by `load_rules`, with names below `opt_states`; those that are
        not in the checkpoint, or have another shape, stay at init.
      input_specs_provider_p: as `task_p`.
    """

    task_p: Any = None
    load_rules: Sequence[tuple[str, str]] = ()
    safe_load: bool = False
    ignore_rules: Sequence[str] | None = None
    step: int | None = None
    load_step: bool = False
    load_opt_states: bool = False
    load_ema_states: bool = True
    partial_load_opt_states: bool = False
    input_specs_provider_p: Any = None

    def __post_init__(self) -> None:
        for pattern in [pattern for pattern, _ in self.load_rules] + list(self.ignore_rules or ()):
            try:
                re.compile(pattern)
            except re.error as e:
                raise ValueError(f"init_from_checkpoint_rules: {pattern!r} is no regex: {e}.") from e
        for pattern, template in self.load_rules:
            problem = rule_matching.template_problem(pattern, template)
            if problem:
                raise ValueError(f"init_from_checkpoint_rules: {problem}.")
        if not self.load_rules and not self.load_step and not self.load_opt_states:
            raise ValueError("init_from_checkpoint_rules: these rules load nothing. Give load_rules, e.g. [LOAD_ALL].")


@dataclasses.dataclass(frozen=True)
class LoadRow:
    """What became of one variable: its path, a status (`loaded`, `skipped`, `left at init`), and from where or why."""

    path: str
    status: str
    note: str


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """What became of every variable of the model; as text, a table and the warnings.

    Attributes:
      rows: one per variable, in the model's order.
      opt_states_loaded: whether any optimizer state was loaded. If not, optimizer states that copy variables (EMA) must
        be made anew from the loaded ones.
      warnings: rules that have no effect because earlier ones decide all that they match.
    """

    rows: tuple[LoadRow, ...]
    opt_states_loaded: bool
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        counts = collections.Counter(row.status for row in self.rows)
        shown = [row for row in self.rows if row.note or not (row.path.startswith(_OPT) and row.status == LEFT)]
        unshown = len(self.rows) - len(shown)
        width = max((len(row.path) for row in shown), default=0)
        lines = [", ".join(f"{counts[status]} {status}" for status in (LOADED, SKIPPED, LEFT))]
        lines += [f"  {row.path:<{width}}  {row.status:<12}  {row.note}".rstrip() for row in shown]
        if unshown:
            lines.append(f"  and {unshown} optimizer states left at init")
        lines += [f"warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class _Source:
    """A step to load from."""

    name: str
    step_dir: epath.Path
    saved: dict[str, records.SavedVariable]


@dataclasses.dataclass(frozen=True)
class LoadPlan:
    """What a warm start loads, worked out from the records of the checkpoints; no array has been read.

    Attributes:
      report: what becomes of every variable.
      parts: for each checkpoint, {path in the model: path in the checkpoint}.
    """

    report: LoadReport
    parts: tuple[tuple[_Source, dict[str, str]], ...]

    def load(self, state: Any, variables: Any, mesh: Mesh) -> Any:
        """Returns the initialised `state` with the planned variables replaced; arguments as of `init_from_rules`."""
        from spmd_trainer.checkpointing import orbax_io

        specs = records.by_path(variables)
        leaves = dict(zip(specs, jax.tree.leaves(state), strict=True))
        for source, plan in self.parts:
            wanted = {path: specs[path] for path in plan}
            leaves.update(orbax_io.read_arrays(source.step_dir, source.saved, wanted, mesh, source=plan))
        return jax.tree.unflatten(jax.tree.structure(state), leaves.values())


def init_from_rules(
    state: Any, variables: Any, mesh: Mesh, rules: Mapping[epath.PathLike, CheckpointLoadingRules]
) -> tuple[Any, LoadReport]:
    """Replaces variables of an initialised state by those of other checkpoints.

    Checkpoints are taken in the mapping's order; a variable is loaded from the first that has a rule for it, the step
    and the optimizer states from the first that says so. Floating-point dtypes are converted to the model's.

    Args:
      state: the initialised state at padded shapes on `mesh`, a TrainState.
      variables: the same tree with VariableSpecs.
      mesh: the mesh.
      rules: {directory: rules}; a directory is a run's `job_log_dir`, its `checkpoints`, or one step in it.

    Returns:
      The state with loaded variables replaced, and the report.

    Raises:
      As `plan_loading`, before an array is read.
    """
    plan = plan_loading(variables, rules, check_contents=True)
    return plan.load(state, variables, mesh), plan.report


def plan_loading(
    variables: Any, rules: Mapping[epath.PathLike, CheckpointLoadingRules], *, check_contents: bool
) -> LoadPlan:
    """Works out what `init_from_rules` loads, from the records of the checkpoints alone. Called by every process.

    Args:
      variables: the model's tree of VariableSpecs.
      rules: as of `init_from_rules`.
      check_contents: also compare the files' checksums, as is needed before loading. False compares their sizes alone.

    Returns:
      The plan.

    Raises:
      UserError: `rules` is no mapping of directories to CheckpointLoadingRules.
      CheckpointNotFoundError: no whole checkpoint there.
      DamagedCheckpointError: the step that the rules name is damaged.
      CheckpointMismatchError: a rule matches no variable of the model, names a variable that the checkpoint lacks or has
        at another logical shape; the rules load nothing; or the optimizer states differ.
    """
    specs = records.by_path(variables)
    rows = {path: LoadRow(path, LEFT, "no rule matches" if path.startswith(_VARS) else "") for path in specs}
    parts, warnings = [], []
    for directory, rule in _built(rules).items():
        source = _open_source(epath.Path(directory), rule.step, check_contents)
        warnings += _check_rules(rule, specs, source)
        open_paths = {path: spec for path, spec in specs.items() if rows[path].status != LOADED}
        plan = _plan_variables(rule, open_paths, source, rows)
        plan |= _plan_opt_states(rule, open_paths, source, rows)
        if rule.load_step and _STEP in open_paths:
            plan[_STEP] = _STEP
        if not plan:
            raise CheckpointMismatchError(_nothing_loaded(source, rows))
        for path, saved_path in plan.items():
            rows[path] = LoadRow(path, LOADED, _describe(source, saved_path, specs[path]))
        parts.append((source, plan))
    loaded_opt = any(row.status == LOADED for path, row in rows.items() if path.startswith(_OPT))
    return LoadPlan(LoadReport(tuple(rows.values()), loaded_opt, tuple(warnings)), tuple(parts))


def _built(rules: Any) -> dict[epath.PathLike, CheckpointLoadingRules]:
    """The rules by directory, configs built."""
    wanted = "give {checkpoint directory: CheckpointLoadingRules(load_rules=[...])}"
    if not isinstance(rules, Mapping):
        raise UserError(f"task.train.init_from_checkpoint_rules is {rules!r:.200}; {wanted}")
    built = {}
    for directory, rule in rules.items():
        name = f"task.train.init_from_checkpoint_rules[{str(directory)!r}]"
        if isinstance(rule, fdl.Buildable) and fdl.get_callable(rule) is CheckpointLoadingRules:
            try:
                # Not `fdl.build`: it would build the source's whole task, which nothing reads.
                rule = CheckpointLoadingRules(**fdl.ordered_arguments(rule))
            except ValueError as error:
                raise UserError(f"{name}: {error}") from error
        if not isinstance(rule, CheckpointLoadingRules):
            raise UserError(f"{name} is {rule!r:.200}; {wanted}")
        built[directory] = rule
    return built


def _check_rules(rule: CheckpointLoadingRules, specs: Mapping[str, VariableSpec], source: _Source) -> list[str]:
    """Refuses rules that match nothing in the model: mistyped, or meant for another. Returns warnings of those without effect."""
    names = [path.removeprefix(_VARS) for path in specs if path.startswith(_VARS)]
    if rule.partial_load_opt_states:
        names += [path.removeprefix(_OPT) for path in specs if path.startswith(_OPT)]
    saved = [path.removeprefix(_VARS) for path in source.saved if path.startswith(_VARS)]
    faults = rule_matching.without_match(rule.load_rules, rule.ignore_rules or (), names, saved)
    if faults:
        raise CheckpointMismatchError(_explain(source, faults, "correct these regexes; they match from a name's start"))
    return [f"{fault} ({source.name})" for fault in rule_matching.shadowed(rule.load_rules, names)]


def _explain(source: _Source, faults: Sequence[str], fix: str) -> str:
    lines = [f"init_from_checkpoint_rules cannot be carried out with {source.name}:"]
    lines += [f"  {fault}" for fault in faults[:_MAX_LISTED]]
    if len(faults) > _MAX_LISTED:
        lines.append(f"  ... and {len(faults) - _MAX_LISTED} more")
    return "\n".join([*lines, f"Fix: {fix}."])


def _nothing_loaded(source: _Source, rows: Mapping[str, LoadRow]) -> str:
    counts = collections.Counter(row.status for row in rows.values())
    return _explain(
        source,
        [
            f"nothing would be loaded from it: {counts[LOADED]} variables of the model come from checkpoints listed before "
            f"it, {counts[SKIPPED]} are kept out by ignore_rules, and no rule matches the other {counts[LEFT]}"
        ],
        "narrow ignore_rules or the rules of the checkpoints before it, or leave this checkpoint out",
    )


def _describe(source: _Source, saved_path: str, spec: VariableSpec) -> str:
    saved, dtype = source.saved[saved_path], records.dtype_name(spec.dtype)
    converted = f", converted from {saved.dtype} to {dtype}" if saved.dtype != dtype else ""
    return f"{saved_path} of {source.name}{converted}"


def _open_source(directory: epath.Path, step: int | None, check_contents: bool) -> _Source:
    """Finds the step to load from: one that is whole, contents included if asked. Called by every process."""
    if directory.name.isdigit() and (directory / records.RECORD_ITEM).exists():
        directory, step = directory.parent, int(directory.name)
    elif (directory / "checkpoints").exists():
        directory = directory / "checkpoints"
    candidates = steps.agreed_newest_first(directory) if step is None else [step]
    for candidate in candidates:
        problem = multihost.first_problem(_problem(directory, candidate, check_contents))
        if problem is None:
            step_dir = steps.step_dir(directory, candidate)
            saved = records.saved_variables(records.read(step_dir, candidate))
            return _Source(f"step {candidate} in {directory}", step_dir, saved)
        if step is not None:
            raise DamagedCheckpointError(
                f"init_from_checkpoint_rules: step {step} in {directory} is refused: {problem}."
            )
        logging.warning("Checkpoint step %d in %s is refused: %s.", candidate, directory, problem)
    raise CheckpointNotFoundError(f"init_from_checkpoint_rules: no whole checkpoint in {directory}.")


def _problem(directory: epath.Path, step: int, check_contents: bool) -> str | None:
    """What is wrong with a step, as far as this process looked, or None."""
    if check_contents:
        return steps.contents_problem(directory, step)
    step_dir = steps.step_dir(directory, step)
    try:
        records.read(step_dir, step)
    except DamagedCheckpointError as error:
        return str(error).removesuffix(".")
    return manifest.quick_problem(step_dir, step)


def _plan_variables(
    rule: CheckpointLoadingRules, open_paths: Mapping[str, VariableSpec], source: _Source, rows: dict[str, LoadRow]
) -> dict[str, str]:
    """Returns {model path: saved path} for variables; notes in `rows` which ones `ignore_rules` keeps out."""
    plan, faults = {}, []
    for path, spec in open_paths.items():
        if not path.startswith(_VARS):
            continue
        match = rule_matching.first_match(rule.load_rules, rule.ignore_rules or (), path.removeprefix(_VARS))
        if match is None:
            continue
        if match.ignored_by is not None:
            rows[path] = LoadRow(path, SKIPPED, f"ignore rule {match.ignored_by!r}")
            continue
        saved_path = _resolve(match.source, source, rule)
        fault = _fault(spec, saved_path, match.source, source)
        if fault:
            by = rule_matching.describe(match.rule, *rule.load_rules[match.rule])
            faults.append(f"{path}, by {by}: {fault}")
        else:
            plan[path] = saved_path
    if faults:
        fix = "narrow load_rules, correct their templates, or name these variables in ignore_rules"
        raise CheckpointMismatchError(_explain(source, faults, fix))
    return plan


def _plan_opt_states(
    rule: CheckpointLoadingRules, open_paths: Mapping[str, VariableSpec], source: _Source, rows: dict[str, LoadRow]
) -> dict[str, str]:
    """Returns {model path: saved path} for optimizer states: all, by rule, or none."""
    opt_states = {path: spec for path, spec in open_paths.items() if path.startswith(_OPT)}
    if rule.load_opt_states and not rule.partial_load_opt_states:
        if any(row.status == LOADED for path, row in rows.items() if path.startswith(_OPT)):
            return {}
        saved = {path: variable for path, variable in source.saved.items() if path.startswith(_OPT)}
        wanted = {path: records.SavedVariable.from_spec(spec) for path, spec in opt_states.items()}
        message = mismatch.explain(saved, wanted, f"init_from_checkpoint_rules.load_opt_states: {source.name}")
        if message:
            raise CheckpointMismatchError(message)
        return {path: path for path in opt_states}
    plan = {}
    if rule.partial_load_opt_states:
        for path, spec in opt_states.items():
            match = rule_matching.first_match(rule.load_rules, rule.ignore_rules or (), path.removeprefix(_OPT))
            if match is None or match.ignored_by is not None:
                continue
            saved_path = _OPT + match.source
            fault = _fault(spec, saved_path, match.source, source)
            if fault is None:
                plan[path] = saved_path
            else:
                rows[path] = LoadRow(path, LEFT, fault)
    return plan


def _resolve(name: str, source: _Source, rule: CheckpointLoadingRules) -> str:
    """Returns the saved path of a name: below `mdl_vars`, or, for 'ema/...', in the optimizer states."""
    if name.startswith(_EMA) and rule.load_ema_states:
        averages = [path for path in source.saved if path.startswith(_OPT) and path.endswith(f"/{name}")]
        if len(averages) == 1:
            return averages[0]
    return _VARS + name


def _fault(spec: VariableSpec, saved_path: str, name: str, source: _Source) -> str | None:
    """Why a variable cannot be loaded from a saved path, or None."""
    saved = source.saved.get(saved_path)
    if saved is None:
        return f"the checkpoint has no {name!r}; {_nearest_saved(name, saved_path, source)}"
    if saved.shape != tuple(spec.logical_shape):
        return f"{name!r} is {saved.shape} in the checkpoint and {tuple(spec.logical_shape)} in the model"
    wanted = records.dtype_name(spec.dtype)
    if saved.dtype != wanted and not (_is_float(saved.dtype) and _is_float(wanted)):
        return f"{name!r} is {saved.dtype} in the checkpoint and {wanted} in the model"
    return None


def _nearest_saved(name: str, saved_path: str, source: _Source) -> str:
    """Which names of the checkpoint are nearest to one that it lacks, as a template would write them."""
    if name.startswith(_EMA):
        return rule_matching.nearest(
            name, (f"{_EMA}{p.split(f'/{_EMA}', 1)[1]}" for p in source.saved if f"/{_EMA}" in p)
        )
    prefix = _OPT if saved_path.startswith(_OPT) else _VARS
    return rule_matching.nearest(name, (p.removeprefix(prefix) for p in source.saved if p.startswith(prefix)))


def _is_float(dtype: str) -> bool:
    return not dtype.startswith("key<") and jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
