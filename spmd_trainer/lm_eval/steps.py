"""The steps that answer requests on the devices: scores of given tokens, and continuations of prompts."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from praxis.py_utils import NestedMap

from spmd_trainer.decoder.generation.decode import tokenizer_of_texts
from spmd_trainer.decoder.generation.settings import GenerationSettings
from spmd_trainer.errors import UserError
from spmd_trainer.inputs.tokenizers import Tokenizer
from spmd_trainer.step import step_fns
from spmd_trainer.tasks_lib import SingleTask
from spmd_trainer.train_states import NestedWeightHParams, TrainState

# What a model must give for each row, or all of it as logits.
_NEEDED = ("per_example_argmax", "per_sequence_xent")


def score_step(
    task: SingleTask,
    state: TrainState,
    key: jax.Array,
    inputs: NestedMap,
    var_weight_hparams: NestedWeightHParams,
    *rest: Any,
) -> tuple[None, tuple[jax.Array, jax.Array, jax.Array]]:
    """Scores the labels of a batch whose weights are not 0. A step for `Partitioner.partition`.

    Args:
      task, state, key, var_weight_hparams: as in `step_fns.eval_step`.
      inputs: the batch; `row_index` int32 [B] is returned as it is.
      *rest: what a partitioner adds; not used, so that the compiler splits the step.

    Returns:
      float32 [B], the sum of the log-probabilities; bool [B], whether every scored label is the most likely token; `row_index`.

    Raises:
      UserError: the model gives neither logits nor what is needed of them.
    """
    del rest
    if hasattr(task.model, "return_predictions"):
        task = dataclasses.replace(task, model=task.model.clone(return_predictions=True))
    output = step_fns.evaluate(task, state.mdl_vars, key, inputs, var_weight_hparams)
    xent, argmax = _of_labels(output.per_example_out, inputs)
    is_greedy = jnp.all((argmax == inputs.labels) | (inputs.weights == 0), axis=-1)
    return None, (-xent.astype(jnp.float32), is_greedy, inputs.row_index)


def _of_labels(outputs: Any, inputs: NestedMap) -> tuple[jax.Array, jax.Array]:
    """Returns the cross entropy of each row's scored labels, [B], and the most likely tokens, int [B, T]."""
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
    task: SingleTask,
    state: TrainState,
    key: jax.Array,
    inputs: NestedMap,
    var_weight_hparams: NestedWeightHParams,
    *rest: Any,
    settings: GenerationSettings,
    tokenizer: Tokenizer | None,
) -> tuple[None, tuple[jax.Array, jax.Array, jax.Array]]:
    """Continues the prompts of a batch. A step for `Partitioner.partition`.

    Args:
      task, state, key, inputs, var_weight_hparams, *rest: as in `score_step`.
      settings: how to continue them.
      tokenizer: of stop strings and the end-of-text.

    Returns:
      int32 [B, N], the generated tokens; int32 [B], their number; `row_index`.
    """
    del rest
    task = dataclasses.replace(task, model=task.model.clone(generation=settings))
    with tokenizer_of_texts(tokenizer):
        _, output = step_fns.decode_step(task, state, key, inputs, var_weight_hparams)
    found = output.per_example_out
    lengths = found.prefix_lengths
    index = lengths[:, None] + jnp.arange(settings.max_tokens)
    tokens = jnp.take_along_axis(found.output_ids[:, 0], index, axis=1)
    return None, (tokens, found.decode_lengths[:, 0] - lengths, inputs.row_index)
