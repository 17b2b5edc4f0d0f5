"""The steps that run requests (scores of given tokens, and continuations of prompts), and their batch shapes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from praxis.py_utils import NestedMap

from spmd_trainer.decoder.generation.decode import tokenizer_of_texts
from spmd_trainer.decoder.generation.settings import GenerationSettings
from spmd_trainer.errors import UserError
from spmd_trainer.inputs.tokenizers import Tokenizer
from spmd_trainer.step import step_fns
from spmd_trainer.step.layout import Layout
from spmd_trainer.train_states import PyTree, TrainState

# Maximum number of batch shapes for the requests of one kind.
MAX_SHAPES = 8
# Use fewer shapes while at most this fraction of the tokens is padding.
_ENOUGH = 0.1
# Row widths are multiples of this number, or of a larger one if there would be more than _CANDIDATES candidate widths.
_MULTIPLE = 8
_CANDIDATES = 256


class Shape(NamedTuple):
    """Shape of a batch.

    Attributes:
      rows: number of rows of the global batch.
      width: number of tokens of a row.
    """

    rows: int
    width: int


class Batch(NamedTuple):
    """Requests that run together in one batch.

    Attributes:
      shape: shape of the batch.
      requests: indices of the requests, at most `shape.rows`.
    """

    shape: Shape
    requests: tuple[int, ...]


def choose_shapes(
    lengths: Sequence[int], *, limit: int, rows_of: Callable[[int], int], num_devices: int
) -> list[Shape]:
    """Chooses at most MAX_SHAPES shapes for requests of these lengths, with as little padding as possible.

    Args:
      lengths: number of tokens of each request.
      limit: maximum number of tokens in a row.
      rows_of: returns the maximum number of rows in a batch, for a width of its rows.
      num_devices: number of devices; the number of rows is a multiple of it.

    Returns:
      The shapes, the widest first.
    """
    found: list[Shape] = []
    sizes, before = np.sort(np.asarray(lengths, int))[::-1], 0
    for width, next_width in itertools.pairwise([*reversed(_widths(sizes, limit)), 0] if len(sizes) else []):
        # Number of remaining requests of this width; some may already fill up the last batch of the previous, larger width.
        count = int(np.count_nonzero(sizes > next_width)) - before
        if count <= 0:
            continue
        number = -(-count // rows_of(width))
        rows = -(-count // (number * num_devices)) * num_devices
        found.append(Shape(rows, width))
        before += number * rows
    return found


def batches(lengths: Sequence[int], shapes: Sequence[Shape]) -> list[Batch]:
    """Divides requests into batches, the longest requests first. Only the last batch may have unused rows.

    Args:
      lengths: number of tokens of each request.
      shapes: the shapes, the widest first; the first is at least as wide as the longest request.
    """
    order = np.argsort(-np.asarray(lengths, int), kind="stable").tolist()
    found, start = [], 0
    while start < len(order):
        shape = next(shape for shape in reversed(shapes) if shape.width >= lengths[order[start]])
        found.append(Batch(shape, tuple(order[start : start + shape.rows])))
        start += shape.rows
    return found


def _widths(found: npt.NDArray[np.int64], limit: int) -> list[int]:
    """Returns row widths, ascending, for rows of the lengths `found`: the fewest with at most 10% padding, up to MAX_SHAPES."""
    multiple = _MULTIPLE * max(1, -(-int(found.max()) // (_MULTIPLE * _CANDIDATES)))
    rounded = np.minimum(-(-found // multiple) * multiple, limit)
    candidates, counts = np.unique(rounded, return_counts=True)
    before = np.concatenate([[0], np.cumsum(counts)])
    # cost[j]: tokens of the rows up to candidate j, with the k widths used so far, the widest of them candidate j.
    cost, choices = candidates * before[1:], []
    for _ in range(min(MAX_SHAPES, len(candidates)) - 1):
        if cost[-1] * (1 - _ENOUGH) <= found.sum():
            break
        # Splitting at i: rows up to candidate i as before, those from i + 1 to j with the width of j.
        split = cost[:, None] + candidates[None, :] * (before[None, 1:] - before[1:, None])
        split = np.where(np.arange(len(candidates))[:, None] < np.arange(len(candidates))[None, :], split, np.inf)
        choice = np.argmin(split, axis=0)
        better = np.min(split, axis=0) < cost
        choices.append(np.where(better, choice, -1))
        cost = np.where(better, np.min(split, axis=0), cost)
    chosen, last = [], len(candidates) - 1
    for choice in reversed(choices):
        if choice[last] >= 0:
            chosen.append(int(candidates[last]))
            last = int(choice[last])
    return sorted([*chosen, int(candidates[last])])


# Outputs that a model must return per row, unless it returns logits.
_NEEDED = ("per_example_argmax", "per_sequence_xent")


def score_step(
    layout: Layout, state: TrainState, key: jax.Array, inputs: NestedMap, *rest: Any
) -> tuple[None, tuple[jax.Array, jax.Array, jax.Array]]:
    """Scores the labels of a batch that have nonzero weights. A step function for `Partitioner.partition`.

    Args:
      layout, state, key: as in `step_fns.eval_step`.
      inputs: the batch; `row_index` int32 [B] is returned unchanged.
      *rest: the partitioner's own forward pass, if it has one. It is not used, so XLA partitions the step over the devices.

    Returns:
      float32 [B], the sum of the log-probabilities; bool [B], True if every scored label is the most likely token;
        `row_index`.

    Raises:
      UserError: the model returns neither logits nor per-token scores.
    """
    del rest
    if hasattr(layout.task.model, "return_predictions"):
        layout = _with_model(layout, return_predictions=True)
    output, _ = step_fns.forward(layout, state.mdl_vars, key, inputs, do_eval=True)
    xent, argmax = _of_labels(output.per_example_out, inputs)
    is_greedy = jnp.all((argmax == inputs.labels) | (inputs.weights == 0), axis=-1)
    return None, (-xent.astype(jnp.float32), is_greedy, inputs.row_index)


def _with_model(layout: Layout, **settings: Any) -> Layout:
    """Returns the layout with changed settings of its model. The changes must not affect the model's variables."""
    return dataclasses.replace(layout, task=layout.task.with_model(layout.task.model.clone(**settings)))


def _of_labels(outputs: Any, inputs: NestedMap) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of the cross entropy over each row's scored labels, [B], and the most likely tokens, int [B, T]."""
    if all(name in outputs for name in _NEEDED):
        return outputs["per_sequence_xent"], outputs["per_example_argmax"]
    if "logits" not in outputs:
        has = ", ".join(outputs) or "nothing"
        raise UserError(
            "scoring texts needs the model's logits: a language model of praxis or of spmd_trainer.decoder, or "
            "task.model.per_example that returns {'logits': [batch, time, vocabulary]}; the model returns "
            f"{has} per example"
        )
    logits = outputs["logits"].astype(jnp.float32)
    own = jnp.take_along_axis(jax.nn.log_softmax(logits), inputs.labels[..., None], axis=-1)[..., 0]
    return -jnp.sum(own * inputs.weights, axis=-1), jnp.argmax(logits, axis=-1)


def generate_step(
    layout: Layout,
    state: TrainState,
    key: jax.Array,
    inputs: NestedMap,
    *rest: Any,
    settings: GenerationSettings,
    tokenizer: Tokenizer | None,
) -> tuple[None, tuple[jax.Array, jax.Array, jax.Array]]:
    """Continues the prompts of a batch. A step function for `Partitioner.partition`.

    Args:
      layout, state, key, inputs, *rest: as in `score_step`.
      settings: the generation settings.
      tokenizer: the tokenizer, for stop strings and end-of-text.

    Returns:
      int32 [B, max_tokens], the generated tokens; int32 [B], the number of generated tokens; `row_index`.
    """
    del rest
    layout = _with_model(layout, generation=settings)
    with tokenizer_of_texts(tokenizer):
        _, output = step_fns.decode_step(layout, state, key, inputs)
    found = output.per_example_out
    lengths = found.prefix_lengths
    index = lengths[:, None] + jnp.arange(settings.max_tokens)
    tokens = jnp.take_along_axis(found.output_ids[:, 0], index, axis=1)
    return None, (tokens, found.decode_lengths[:, 0] - lengths, inputs.row_index)


def training_rows(batch: PyTree) -> tuple[int, int]:
    """Returns (rows, tokens per row) of a training batch. A preference pair counts as two rows, one per answer.

    Raises:
      UserError: the batch is not the batch of a language model.
    """
    chosen = batch.get("chosen") if isinstance(batch, Mapping) else None
    # The model reads a batch of pairs as one batch of the chosen and the rejected answers.
    rows, answers = (chosen, 2) if isinstance(chosen, Mapping) else (batch, 1)
    ids = rows.get("ids") if isinstance(rows, Mapping) else None
    if ids is None or len(ids.shape) != 2:
        raise UserError(
            "only a language model can be judged or talked to: its training batch has token ids [batch, time] as `ids`, or "
            "as `chosen.ids` for pairs of answers, and this experiment's has "
            f"{', '.join(map(str, batch)) if isinstance(batch, Mapping) else 'none'}"
        )
    return answers * int(ids.shape[0]), int(ids.shape[1])
