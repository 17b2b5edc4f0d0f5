"""Compares a checkpoint's variables with those of a model, and explains the differences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from spmd_trainer.checkpointing import rule_matching
from spmd_trainer.checkpointing.records import SavedVariable
from spmd_trainer.train_states import is_adapter

MAX_LISTED = 20
FIX = (
    "Fix: build the model as it was saved (without --exp, --job_log_dir alone takes all settings from its run), or load the "
    "parts that fit with task.train.init_from_checkpoint_rules"
)
_VARS = "mdl_vars/"
_NOT_OF_THE_MODEL = ("opt_states/", "extra_state/")


def explain(
    saved: Mapping[str, SavedVariable], wanted: Mapping[str, SavedVariable], checkpoint: str, *, fix: str = FIX
) -> str | None:
    """Returns None if paths, logical shapes and dtypes are the same, and otherwise an error message.

    Args:
      saved: the checkpoint's variables by path.
      wanted: the model's variables by path. Padding and sharding are ignored.
      checkpoint: the checkpoint's name in the message.
      fix: the last sentence of the message, without its period.
    """
    missing = [path for path in wanted if path not in saved]
    extra = [path for path in saved if path not in wanted]
    common = [path for path in wanted if path in saved]
    reshaped = [path for path in common if saved[path].shape != wanted[path].shape]
    retyped = [p for p in common if p not in set(reshaped) and saved[p].dtype != wanted[p].dtype]
    lines = [f"  missing in the checkpoint: {p}, in the model {_describe(wanted[p])}" for p in missing]
    for number, path in enumerate(missing[:MAX_LISTED]):
        lines[number] += _nearest_extra(path, wanted[path], extra, saved)
    lines += [f"  not in the model: {p}, saved {_describe(saved[p])}" for p in extra]
    for kind, paths in (("other shape", reshaped), ("other dtype", retyped)):
        lines += [f"  {kind}: {p}, saved {_describe(saved[p])}, in the model {_describe(wanted[p])}" for p in paths]
    if not lines:
        return None
    head = (
        f"{checkpoint} does not fit the model: {len(missing)} missing, {len(extra)} extra, {len(reshaped)} reshaped, "
        f"{len(retyped)} re-typed ({len(saved)} variables saved, {len(wanted)} in the model)."
    )
    cause = (
        _other_number_of_layers(missing, extra, saved, wanted)
        or _other_size(reshaped, saved, wanted)
        or _other_optimizer(missing, extra, reshaped, retyped)
        or ("the dtype of the variables was changed" if retyped and not reshaped else "another model was saved there")
    )
    return "\n".join([head, *first_lines(lines), f"Likely cause: {cause}.", f"{fix}."])


def first_lines(lines: Sequence[str]) -> list[str]:
    """Returns the first `MAX_LISTED` lines and, if there are more, a line that says how many more."""
    more = len(lines) - MAX_LISTED
    return [*lines[:MAX_LISTED], f"  ... and {more} more"] if more > 0 else list(lines)


def explain_adapters(saved: Iterable[str], wanted: Iterable[str], checkpoint: str) -> str | None:
    """Returns an error message if only one of the checkpoint and the run has adapters on a frozen base; otherwise None.

    Args:
      saved: the paths of the checkpoint's variables.
      wanted: the paths of the variables to restore; in a run with adapters, without those of the frozen base.
      checkpoint: the checkpoint's name in the message.
    """
    saved, wanted = list(saved), list(wanted)
    has_base = any(path.startswith(_VARS) and not is_adapter(path) for path in saved)
    if any(map(is_adapter, saved)) and not has_base and not any(map(is_adapter, wanted)):
        return adapters_alone(checkpoint)
    if any(map(is_adapter, wanted)) and not any(map(is_adapter, saved)):
        return (
            f"{checkpoint} holds a whole model, and this experiment trains adapters on a frozen base (task.lora is set). Fix: to "
            "train adapters on this model, name its directory in task.train.init_from_checkpoint_rules and choose another "
            "--job_log_dir; to continue the run that wrote it, set task.lora=None."
        )
    return None


def adapters_alone(checkpoint: str) -> str:
    """Returns the error message for a checkpoint that holds only adapters, if the model to load it into has none."""
    return (
        f"{checkpoint} holds adapters alone, as a run with task.lora saves them, and this experiment's model has none "
        "(task.lora is None). Fix: use the experiment that trained them, or set its task.lora (the checkpoint's record holds "
        "its config); or merge the adapters into their base with that experiment and --mode=export --export_dir=DIR, and "
        "load DIR."
    )


def adapters_without_base(checkpoint: str, saved: Iterable[str]) -> str:
    """Returns the error message if a run with adapters is to continue from adapters that a different trainer saved."""
    adapters = list(filter(is_adapter, saved))
    return (
        f"{checkpoint} holds {len(adapters)} variables of adapters, such as {adapters[0]}, but not the settings that they "
        "were trained with and which base they belong to: only this trainer's checkpoints do. Fix: begin a new run whose "
        "task.train.init_from_checkpoint_rules name that directory and the one of the base."
    )


def _nearest_extra(path: str, variable: SavedVariable, extra: list[str], saved: Mapping[str, SavedVariable]) -> str:
    """Returns a hint about a missing variable: the name in `extra` that is most like `path`, among those of equal shape."""
    alike = [p for p in extra if saved[p].shape == variable.shape]
    return f"; {rule_matching.nearest(path, alike)} in the checkpoint" if alike else ""


def _describe(variable: SavedVariable) -> str:
    return f"{variable.shape} {variable.dtype}"


def _other_number_of_layers(
    missing: list[str], extra: list[str], saved: Iterable[str], wanted: Iterable[str]
) -> str | None:
    """Returns the likely cause if checkpoint and model differ in the number of layers (`layers/0` or `layers_0` and so on)."""
    changed = set(_numbered(missing)) | set(_numbered(extra))
    saved_numbers, wanted_numbers = _numbered(saved), _numbered(wanted)
    for stem in sorted(changed, key=len):
        before, now = len(saved_numbers.get(stem, ())), len(wanted_numbers.get(stem, ()))
        if before != now and before and now:
            return f"saved with {before} layers, the model has {now} (counted at {stem})"
    return None


def _numbered(paths: Iterable[str]) -> dict[str, set[str]]:
    """Returns {'lm/layers/#': {'0', '1'}} for paths below 'lm/layers/0' and 'lm/layers/1'. 'lm/layers_0' is handled too."""
    numbers: dict[str, set[str]] = {}
    for path in paths:
        if path.startswith(_NOT_OF_THE_MODEL):
            continue  # Their numbers count transformations.
        for match in re.finditer(r"(?<=[_/])\d+(?=/|$)", path):
            numbers.setdefault(path[: match.start()] + "#", set()).add(match.group())
    return numbers


def _other_size(
    reshaped: list[str], saved: Mapping[str, SavedVariable], wanted: Mapping[str, SavedVariable]
) -> str | None:
    """Returns the likely cause of changed shapes: a different rank, one size that changed in all variables, or several sizes."""
    if not reshaped:
        return None
    ranks_differ = [p for p in reshaped if len(saved[p].shape) != len(wanted[p].shape)]
    if ranks_differ:
        return (
            f"variables have another rank, e.g. {ranks_differ[0]}: layers are stacked (repeated) in only one of the two"
        )
    changes = {
        (dim, before, now)
        for p in reshaped
        for dim, (before, now) in enumerate(zip(saved[p].shape, wanted[p].shape, strict=True))
        if before != now
    }
    sizes = {(before, now) for _, before, now in changes}
    if len(sizes) > 1:
        return f"{len(sizes)} sizes changed, among them " + ", ".join(f"{a} to {b}" for a, b in sorted(sizes)[:3])
    before, now = sizes.pop()
    # The paths of optimizer states contain those of the adapters.
    if all("/params/lora/" in path for path in reshaped):
        return f"the rank of the adapters (task.lora.rank) was {before} when saved and is {now} in the model"
    if {dim for dim, _, _ in changes} == {0} and all(re.search("repeat|stack|scan|layer|block", p) for p in reshaped):
        return f"saved with {before} layers, the model has {now} (dimension 0 of stacked layers)"
    return f"one size was {before} when saved and is {now} in the model (a vocabulary, a width, a number of heads)"


def _other_optimizer(missing: list[str], extra: list[str], reshaped: list[str], retyped: list[str]) -> str | None:
    """Returns the likely cause if only optimizer states and extra states differ; otherwise None."""
    changed = missing + extra
    if not changed or reshaped or retyped:
        return None
    if all(p.startswith(_NOT_OF_THE_MODEL) for p in changed):
        if not missing:
            return "saved with optimizer states that this state lacks: another optimizer, or a state for evaluation"
        if not extra:
            return (
                "the checkpoint lacks states of the model's optimizer: another optimizer, or EMA was switched on since"
            )
        return "saved with another optimizer"
    return None
