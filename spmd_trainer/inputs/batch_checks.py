"""Checks the values of a batch before it goes to the devices.

Devices don't report impossible values: an embedding lookup beyond the vocabulary succeeds, a negative weight trains
away from its label, and a NaN weight makes the whole step NaN.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from spmd_trainer.errors import UserError
from spmd_trainer.inputs.batches import WEIGHT_NAMES
from spmd_trainer.sharding.variables import path_str

# Entries of a batch from which praxis' LanguageModel reads tokens.
_TOKENS = ("ids", "labels")


def check_values(name: str, batch: Any, vocab_size: int | None) -> None:
    """Checks the tokens and the weights of a batch, at the cost of one minimum and one maximum per leaf.

    All `ids` must be in the vocabulary. `labels` with a weight of 0 may have any value (some inputs mark ignored labels
    with -1 or -100); all others must be in the vocabulary. Weights (`batches.WEIGHT_NAMES`) must be finite and 0 or more.

    Args:
      name: the input's name.
      batch: one process's batch, a pytree of numpy arrays [rows, ...].
      vocab_size: vocabulary size of the model, `task.model.lm_tpl.vocab_size`; None checks only the weights.

    Raises:
      UserError: a value is out of range. The message names the input, the leaf, the row, the value and the range.
    """
    leaves = {path_str(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(batch)}
    for path, leaf in leaves.items():
        if path.rpartition("/")[2] in WEIGHT_NAMES:
            _check_weights(name, path, np.asarray(leaf))
    if vocab_size is None:
        return
    for path in _TOKENS:
        if path in leaves:
            counts = leaves.get("weights") if path == "labels" else None
            _check_tokens(name, path, np.asarray(leaves[path]), counts, vocab_size)


def _check_weights(name: str, path: str, weights: np.ndarray) -> None:
    # A NaN makes the minimum NaN, and so not >= 0.
    if not weights.size or (weights.min() >= 0 and weights.max() < np.inf):
        return
    where = _first(~((weights >= 0) & (weights < np.inf)))
    raise UserError(
        f"input {name!r}: {path} is {weights[where]} {_place(where)}; weights must be finite and 0 or more. A weight of 0 "
        "leaves a row or a token out"
    )


def _check_tokens(name: str, path: str, tokens: np.ndarray, weights: Any, vocab_size: int) -> None:
    if tokens.dtype.kind not in "iu" or not tokens.size or (tokens.min() >= 0 and tokens.max() < vocab_size):
        return
    outside = (tokens < 0) | (tokens >= vocab_size)
    if weights is not None and np.shape(weights) == tokens.shape:
        outside &= np.asarray(weights) != 0
    if not outside.any():
        return
    where = _first(outside)
    raise UserError(
        f"input {name!r}: {path} is {tokens[where]} {_place(where)}, and the model's vocabulary is 0 to {vocab_size - 1}. "
        "Correct the data or the tokenizer, or set task.model.lm_tpl.vocab_size to the largest token + 1 or more"
    )


def _first(wrong: np.ndarray) -> tuple[int, ...]:
    return tuple(int(index) for index in np.argwhere(wrong)[0])


def _place(where: tuple[int, ...]) -> str:
    """Formats an index as 'at row 3, position 17 of the batch'."""
    row, *position = where
    return f"at row {row}" + (f", position {', '.join(map(str, position))}" if position else "") + " of the batch"
