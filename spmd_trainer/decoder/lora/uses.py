"""Chooses the variables that get adapters."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from spmd_trainer.decoder.lora.settings import Lora
from spmd_trainer.errors import UserError
from spmd_trainer.step.product_results import MatrixDims, Uses


def choose_targets(settings: Lora, uses: Mapping[str, Uses]) -> dict[str, MatrixDims]:
    """Chooses the variables that get adapters. Returns {path: the variable's stack, input and output dimensions}.

    Args:
      settings: the adapter settings.
      uses: {path: how the model uses the variable}, for all floating-point parameters of the base model.

    Raises:
      UserError: a regex matches no variable, or matches one that can't have adapters; or 'all-linear' finds no variable.
    """
    fitting = [path for path, use in uses.items() if use.fits]
    if not settings.regexes:
        linear = [path for path in fitting if not uses[path].is_lookup]
        # If a model has only one layer, this is also the output layer.
        chosen = [path for path in linear if uses[path].is_read_on] or linear
        if not chosen:
            raise UserError("task.lora.targets='all-linear' finds no variable used in matrix products only")
    else:
        matched = {path for regex in settings.regexes for path in _matches(regex, uses, fitting)}
        chosen = [path for path in uses if path in matched]
    for path in chosen:
        _check(path, uses[path], fitting)
    return {path: uses[path].products[0] for path in chosen}


def _matches(regex: str, uses: Mapping[str, Uses], fitting: list[str]) -> list[str]:
    found = [path for path in uses if re.search(regex, path)]
    if not found:
        raise UserError(
            f"task.lora.targets: {regex!r} matches no variable; nearest variables that can have adapters: "
            f"{_nearest(regex, fitting)}"
        )
    return found


def _check(path: str, use: Uses, fitting: list[str]) -> None:
    """Raises UserError if no matrix product reads the variable, or if its dimensions' roles differ between products."""
    near = f"nearest variables that can have adapters: {_nearest(path, fitting)}"
    if len(use.products) > 1:
        raise UserError(
            f"task.lora.targets: the model uses {path} in matrix products over different dimensions "
            f"({' and '.join(str(kind.inputs) for kind in use.products)}), so the adapters' inputs are ambiguous; {near}"
        )
    if not use.products:
        how = f"in {', '.join(use.others)}" if use.others else "not at all"
        raise UserError(
            f"task.lora.targets: the model uses {path} {how}, but adapters need a weight used in matrix products; {near}"
        )


def _nearest(text: str, paths: list[str]) -> str:
    plain = re.sub(r"[\\^$.*+?()\[\]{}|]", "", text)

    def likeness(path: str) -> float:
        # A regex usually names the end of a path.
        return difflib.SequenceMatcher(None, plain, path[-len(plain) :]).ratio()

    return ", ".join(sorted(paths, key=likeness, reverse=True)[:3]) or "none"
