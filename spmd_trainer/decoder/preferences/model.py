"""Language models trained on preference pairs: a chosen and a rejected answer to one prompt.

    task_p.model = Config(model.PreferenceModel, name="lm", lm_tpl=..., preference=Config(loss.PreferenceLoss, beta=0.1))

A pair is one entry of the batch, so padding, minibatches, devices and processes never separate its answers. A batch is a
NestedMap with B pairs of `inputs.PreferenceInput`:

    chosen, rejected     NestedMaps of `ids`, `labels`, `paddings`, `weights`, `segment_ids`, `segment_pos`, each [B, T]:
                         prompt and answer in one row, as for a language model, with weight 1 on the answer's labels and 0 on
                         all others; and `reference_logps` [B], the answer's log-probability under the reference model
    eval_sample_weights  [B], the weight of each pair; optional
    pair_index           [B], the index of each pair in the input files; unused

The model runs on the 2 B rows in the order chosen 0, rejected 0, chosen 1, ..., so that no row leaves its device. A batch
without `chosen` is an ordinary language-model batch, for which the model computes praxis' loss and metrics.

The variables are those of praxis' `LanguageModel` with the same `lm_tpl`, so that checkpoints and Hugging Face folders fit.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from praxis import base_layer, base_model, layers
from praxis.py_utils import NestedMap

from spmd_trainer.decoder.lm import DecoderLanguageModel
from spmd_trainer.decoder.preferences.loss import PreferenceLoss
from spmd_trainer.errors import UserError

REFERENCE = "reference_logps"


class PreferenceLanguageModel(layers.LanguageModel):
    """praxis' `LanguageModel`, trained on preference pairs; see the module docstring.

    Attributes:
      preference: the loss on preference pairs.
    """

    preference: PreferenceLoss = base_layer.instance_field(PreferenceLoss)

    def setup(self) -> None:
        """Checks `preference` and creates the child layers.

        Raises:
          UserError: a field of `preference` is invalid, or the decoder has multi-token prediction layers.
        """
        self.preference.check()
        if getattr(getattr(self.lm_tpl, "spec", None), "mtp_layers", 0):
            raise UserError(
                f"task.model.lm_tpl.spec.mtp_layers={self.lm_tpl.spec.mtp_layers}: these layers would learn the rejected answers "
                "too; give 0 for preferences"
            )
        super().setup()

    def compute_predictions(self, input_batch: NestedMap) -> base_model.Predictions:
        """Runs the language model on the 2 B answers of B preference pairs, or on an ordinary language-model batch.

        Returns the predictions of praxis' `LanguageModel` for these rows. The module docstring describes `input_batch`.
        """
        return super().compute_predictions(_rows(input_batch) if "chosen" in input_batch else input_batch)

    def compute_loss(
        self, predictions: base_model.Predictions, input_batch: NestedMap
    ) -> tuple[dict[str, tuple[jax.Array, jax.Array]], NestedMap]:
        """Computes the loss, and metrics named as in TRL.

        Args:
          predictions: the result of `compute_predictions`.
          input_batch: the batch.

        Returns:
          {name: (mean over the pairs, sum of the pairs' weights)}: 'total_loss' (with the auxiliary loss of mixtures of
          experts), 'preference_loss', 'rewards/chosen', 'rewards/rejected', 'rewards/accuracies' (fraction of pairs whose
          chosen answer has the greater reward), 'rewards/margins', 'logps/chosen', 'logps/rejected'; and 'aux_loss', with the
          weight 1. Also, for each pair, `logps` and `rewards` [B, 2], and `loss` [B].

        Raises:
          UserError: the batch has no `reference_logps`, or they have been rounded to bfloat16.
        """
        if "chosen" not in input_batch:
            return super().compute_loss(predictions, input_batch)
        logps, lengths = _answer_logps(predictions, input_batch)
        found = self.preference(logps, lengths, self._reference(input_batch, logps))
        weights = input_batch.get("eval_sample_weights", jnp.ones(len(logps))).astype(jnp.float32)
        num_pairs = jnp.sum(weights)
        divisor = jnp.where(num_pairs == 0, 1.0, num_pairs)

        def mean(values: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jnp.sum(values * weights) / divisor, num_pairs

        preference_loss, (chosen, rejected) = mean(found.loss), found.rewards.T
        aux_loss = jnp.asarray(predictions.aux_loss, jnp.float32)
        scalars = {
            "total_loss": (preference_loss[0] + aux_loss, num_pairs),
            "preference_loss": preference_loss,
            "aux_loss": (aux_loss, jnp.ones(())),
            "rewards/chosen": mean(chosen),
            "rewards/rejected": mean(rejected),
            "rewards/accuracies": mean((chosen > rejected).astype(jnp.float32)),
            "rewards/margins": mean(chosen - rejected),
            "logps/chosen": mean(logps[:, 0]),
            "logps/rejected": mean(logps[:, 1]),
        }
        return scalars, NestedMap(logps=logps, rewards=found.rewards, loss=found.loss)

    def with_reference(self, input_batch: NestedMap) -> NestedMap:
        """Adds `reference_logps` to a batch: this model's own log-probabilities, computed without dropout.

        In training with adapters, the frozen base model is the reference model: call this method with its variables.

        Args:
          input_batch: the batch; returned unchanged if it has no pairs, or has `reference_logps`, or the loss needs none.

        Returns:
          A new batch with `reference_logps` float32 [B] in `chosen` and `rejected`. They have no gradient.
        """
        if "chosen" not in input_batch or not self.preference.needs_reference or REFERENCE in input_batch.chosen:
            return input_batch
        without_dropout = dataclasses.replace(base_layer.cur_jax_context().hparams, do_eval=True)
        with base_layer.JaxContext.new_context(hparams=without_dropout):
            logps, _ = _answer_logps(self.compute_predictions(input_batch), input_batch)
        logps = jax.lax.stop_gradient(logps)
        found = NestedMap(input_batch)
        for column, side in enumerate(("chosen", "rejected")):
            found[side] = NestedMap({**input_batch[side], REFERENCE: logps[:, column]})
        return found

    def _reference(self, batch: NestedMap, logps: jax.Array) -> jax.Array | None:
        """Returns the batch's `reference_logps` as float32 [B, 2]; None if the loss needs no reference model."""
        if not self.preference.needs_reference:
            return None
        if self.is_initializing():  # traced for its variables only
            return jax.lax.stop_gradient(logps)
        if REFERENCE not in batch.chosen or REFERENCE not in batch.rejected:
            raise UserError(
                f"the batch has no {REFERENCE}, and the loss {self.preference.loss!r} compares with a reference model. Either "
                "compute them once, before training: PreferenceInput(reference='file'), REFERENCE='file' in an experiment. Or "
                "train adapters, whose frozen base is the reference: task.lora with reference=True, REFERENCE='live'. The loss "
                "'simpo' needs no reference"
            )
        return jnp.stack([_as_float32(batch[side][REFERENCE]) for side in ("chosen", "rejected")], axis=1)


class PreferenceModel(PreferenceLanguageModel, DecoderLanguageModel):
    """A `DecoderLanguageModel`, trained on preference pairs; see the module docstring."""


def _rows(batch: NestedMap) -> NestedMap:
    """Converts a batch of B preference pairs to a language-model batch of 2 B rows: chosen 0, rejected 0, chosen 1, ..."""
    rows = NestedMap()
    for name in batch.chosen.keys() - {REFERENCE}:
        both = jnp.stack([batch.chosen[name], batch.rejected[name]], axis=1)
        rows[name] = both.reshape(-1, *both.shape[2:])
    return rows


def _answer_logps(predictions: Any, batch: NestedMap) -> tuple[jax.Array, jax.Array]:
    """Returns each answer's log-probability and its number of tokens, float32 [B, 2] each."""
    weights = _rows(batch).weights.astype(jnp.float32)
    logps = jnp.sum(-predictions.per_example_xent.astype(jnp.float32) * weights, axis=-1)
    return logps.reshape(-1, 2), jnp.sum(weights, axis=-1).reshape(-1, 2)


def _as_float32(x: jax.Array) -> jax.Array:
    """Returns log-probabilities as float32. If the array is int32, it holds the bits of float32 values.

    Raises:
      UserError: the array is neither float32 nor int32.
    """
    if x.dtype == jnp.int32:
        return jax.lax.bitcast_convert_type(x, jnp.float32)
    if x.dtype != jnp.float32:
        raise UserError(
            f"{REFERENCE} is {x.dtype}: the step computes in {x.dtype} and has rounded the log-probabilities, which need more "
            "digits. Give their bits, int32: np.asarray(logps, np.float32).view(np.int32)"
        )
    return x
