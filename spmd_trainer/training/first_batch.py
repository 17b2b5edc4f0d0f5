"""Checks an input's first batch against the specs for which the step is compiled (`task.train.enforce_input_specs`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from spmd_trainer.errors import UserError
from spmd_trainer.sharding.variables import path_str

# Differences that one message lists.
_LISTED = 5


def check(name: str, batch: Any, declared: Any) -> None:
    """Checks that a batch has the declared structure, shapes and dtypes.

    Args:
      name: the input's name.
      batch: one process's batch, a tree of arrays.
      declared: the same tree of ShapeDtypeStructs.

    Raises:
      UserError: they differ. The message has the input's name and, for each leaf, its path and both shapes and dtypes.
    """
    given, wanted = _leaves(batch), _leaves(declared)
    problems = list(_differences(given, wanted))
    if not problems:
        return
    more = f"; and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
    raise UserError(
        f"the first batch of input {name!r} differs from its declared specs: {'; '.join(problems[:_LISTED])}{more}. Change "
        "the input's batches or its specs (get_input_specs_provider_params() for training, the input's input_specs() for "
        "evaluation and decode). task.train.enforce_input_specs=False skips this check"
    )


def _differences(given: dict[str, str], wanted: dict[str, str]) -> Iterator[str]:
    for path, declared in wanted.items():
        if path not in given:
            yield f"{path} is missing, declared as {declared}"
        elif given[path] != declared:
            yield f"{path} is {given[path]}, declared as {declared}"
    for path in given.keys() - wanted.keys():
        yield f"{path} ({given[path]}) is not declared"


def _leaves(tree: Any) -> dict[str, str]:
    """Returns {path: dtype and shape}, e.g. {'image/pixels': 'float32 [8, 28, 28]'}."""
    return {path_str(path): _text(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _text(leaf: Any) -> str:
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    return f"{dtype} {list(np.shape(leaf))}"
