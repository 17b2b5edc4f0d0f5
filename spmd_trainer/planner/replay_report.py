"""The report of `--mode=replay`: where the first NaN or infinity of a step came from, and which layers it went through."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from spmd_trainer.planner.nan_origin import Flags, Found, Value
from spmd_trainer.planner.value_flags import FINITE, INFINITE
from spmd_trainer.step.packing import Scalars, summary_name
from spmd_trainer.tasks_lib import SingleTask
from spmd_trainer.training.invalid_steps import GRAD_NORM, is_finite, is_valid

# Maximum number of lines in each list.
_LISTED = 12
_WORDS = {INFINITE: "an infinity", 2: "NaN"}


@dataclasses.dataclass(frozen=True)
class Observed:
    """One training step, evaluated with a flag on each value.

    Attributes:
      flags: the flags of all values.
      arguments: names of the step's arguments: 'mdl_vars/params/...', 'batch/ids', ...
      results: {name: key of the value in `flags`} for the loss, the summaries and the new state.
      gradients: {path of a variable: key of the variable's gradient in `flags`}.
      first_update: number of the program's operations before the learner begins.
    """

    flags: Flags
    arguments: list[str]
    results: dict[str, Value]
    gradients: dict[str, Value]
    first_update: int

    def is_of_update(self) -> bool:
        """Returns True if the loss and the gradients are finite, but some result that the learner computes from them isn't."""
        before = [self.results["loss"], *self.gradients.values()]
        return not any(map(self.flags.flag, before)) and any(map(self.flags.flag, self.results.values()))


def lines(observed: Observed, scalars: Scalars, step: int, task: SingleTask) -> list[str]:
    """Returns the report's lines. `scalars`: scalars of the same step, evaluated without flags, as in training."""
    norms = ", ".join(f"gradient norm {norm:g}" for norm in scalars.summaries_called(GRAD_NORM))
    numbers = f"loss {scalars.loss:g}" + (f", {norms}" if norms else "")
    start = _start(observed)
    if start is None:
        threshold = task.learner.skip_step_gradient_norm_value
        if is_valid(scalars):
            return [f"step {step} is valid: {numbers}"]
        if not is_finite(scalars):
            return [
                f"step {step} is invalid: {numbers}",
                "",
                "with a flag on each value, the same step is finite: the compiler fuses and orders its operations in another way "
                "then, or a device gives other numbers for the same step. --check_repeat_every=1 finds out which",
            ]
        limit = f": the gradient norm reaches skip_step_gradient_norm_value={threshold:g}" if threshold else ""
        return [f"step {step}: {numbers}; no NaN and no infinity, but the learner does not take it{limit}"]
    begun, _ = observed.flags.causes(start)
    verdict = "is invalid" if not is_valid(scalars) else "is taken as valid, and is not"
    report = [f"step {step} {verdict}: {numbers}", ""]
    report += [f"the first {_WORDS[begun[0].flag].removeprefix('an ')}: {_origin(begun[0], observed)}"]
    report += [f"  then {_WORDS[one.flag]}: {_origin(one, observed)}" for one in begun[1:3] if one.from_infinity]
    others = [one for one in begun[1:] if not one.from_infinity]
    if others:
        report.append(f"  {len(others)} more began independently, the next in {_origin(others[0], observed)}")
    return [*report, "", "where it went", *_path(observed), *_of_gradients(observed), *_of_update(observed)]


def _start(observed: Observed) -> list[Value] | None:
    """Returns the non-finite values in the first of these that has any: loss, gradients, gradient norms, new state. Else None."""
    norms = {name: value for name, value in observed.results.items() if summary_name(name).endswith(GRAD_NORM)}
    state = {name: value for name, value in observed.results.items() if name.startswith("new ")}
    loss = {"loss": observed.results["loss"]}
    for group in (loss, observed.gradients, norms, state):
        if bad := _bad(observed, group):
            return [group[name] for name in bad]
    return None


def _bad(observed: Observed, values: Mapping[str, Value]) -> list[str]:
    return [name for name, value in values.items() if observed.flags.flag(value) != FINITE]


def _origin(found: Found, observed: Observed) -> str:
    if found.operation is None:
        if found.argument is None:
            return "a constant of the program holds it: an array of NumPy or JAX that the model's code made"
        name = observed.arguments[found.argument]
        if name.startswith("batch/"):
            return f"the batch holds it: {name.removeprefix('batch/')}"
        is_parameter = name.startswith("mdl_vars/")
        kind = "the parameters themselves hold it" if is_parameter else "the state before the step holds it"
        return f"{kind}: variable {name.removeprefix('mdl_vars/')}. An earlier step made it"
    operation = found.operation
    made = "of an infinity" if found.from_infinity else "of finite values"
    stage = _stage(found, observed)
    layer = found.layer or ("the learner" if stage == "update" else "outside of the layers")
    return f"{stage}, {layer}\n    {operation.primitive} made it {made}, at {operation.where}"


def _stage(found: Found, observed: Observed) -> str:
    if found.index >= observed.first_update:
        return "update"
    if found.recomputed:
        return "backward pass, in what rematerialisation computes again"
    return "backward pass" if found.backward else "forward pass"


def _path(observed: Observed) -> list[str]:
    values = [observed.results["loss"], *observed.gradients.values()]
    passed: dict[tuple[str, str], int] = {}  # in the order of execution
    for found in observed.flags.causes(values)[1]:
        if found.operation is not None and not found.recomputed:
            key = (_stage(found, observed), found.layer)
            passed[key] = max(passed.get(key, FINITE), found.flag)
    rows = []
    for stage in ("forward pass", "backward pass"):
        flags = [(layer or "(no layer)", flag) for (s, layer), flag in passed.items() if s == stage]
        rows += _capped([f"  {stage:<14} {layer}: {_WORDS[flag]}" for layer, flag in flags])
        if stage == "forward pass":
            bad = observed.flags.flag(observed.results["loss"])
            rows.append(f"  {'loss':<14} {_WORDS.get(bad, 'finite')}")
    return rows


def _of_gradients(observed: Observed) -> list[str]:
    bad = _bad(observed, observed.gradients)
    total = len(observed.gradients)
    if not bad:
        return [f"  {'gradients':<14} all {total} are finite"]
    flags = {name: observed.flags.flag(observed.gradients[name]) for name in bad}
    head = f"  {'gradients':<14} {len(bad)} of {total} variables"
    return [head, *_capped([f"    {name}: {_WORDS[flag]}" for name, flag in flags.items()])]


def _of_update(observed: Observed) -> list[str]:
    state = {name: value for name, value in observed.results.items() if name.startswith("new ")}
    bad = _bad(observed, state)
    if not bad:
        return [f"  {'new state':<14} finite: nothing of it is in the variables or the optimizer states"]
    return [
        f"  {'new state':<14} {len(bad)} of {len(state)} arrays",
        *_capped([f"    {name.removeprefix('new ')}" for name in bad]),
    ]


def _capped(rows: Iterable[str]) -> list[str]:
    found = list(rows)
    more = [f"    and {len(found) - _LISTED} more"] if len(found) > _LISTED else []
    return found[:_LISTED] + more
