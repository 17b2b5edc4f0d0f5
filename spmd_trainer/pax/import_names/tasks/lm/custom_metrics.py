"""A language model that reports LAMBADA's or BoolQ's accuracy, for Pax's GPU experiments.

Those experiments import it as `praxis.contrib.gpu.scripts_gpu.models`, which praxis 1.4.0 doesn't have; see `pax/published.py`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from praxis.layers import models
from praxis.py_utils import NestedMap

from spmd_trainer.errors import UserError


class CustomMetricsLM(models.LanguageModel):
    """praxis' `LanguageModel` with one more metric.

    Attributes:
      eval_task: 'lambada' adds `acc_strict`, the fraction of rows whose tokens of nonzero weight are all predicted right.
        'boolq' adds `boolq_acc`, the fraction of rows whose right answer has a higher logit than the wrong one. None adds no
        metric.
      boolq_yn_tokens: the token ids of 'yes' and 'no'.
      report_strict_acc: older setting of praxis; True also adds `acc_strict`.
    """

    eval_task: str | None = None
    boolq_yn_tokens: Any = None

    def compute_loss(self, predictions: NestedMap, input_batch: NestedMap) -> tuple[Any, Any]:
        """Returns praxis' metrics, with the metric of `eval_task` added, and praxis' per-example outputs."""
        if self.eval_task not in (None, "lambada", "boolq"):
            raise UserError(f"task.model.eval_task is {self.eval_task!r}; it is 'lambada', 'boolq' or None")
        is_strict = self.report_strict_acc or self.eval_task == "lambada"
        metrics, per_example = models.compute_xent_loss_helper(
            predictions, input_batch, self.return_predictions, self.apply_eval_sample_weights, is_strict
        )
        if self.eval_task == "boolq":
            metrics.boolq_acc = self._boolq_accuracy(predictions, input_batch)
        return metrics, per_example

    def _boolq_accuracy(self, predictions: NestedMap, input_batch: NestedMap) -> tuple[Any, Any]:
        if self.boolq_yn_tokens is None:
            raise UserError("task.model.boolq_yn_tokens is not set; give the ids of 'yes' and 'no'")
        labels = input_batch.labels
        other = jnp.sum(jnp.asarray(self.boolq_yn_tokens)) - labels

        def logit_of(tokens: Any) -> Any:
            return jnp.take_along_axis(predictions.logits, tokens[..., None], axis=-1)[..., 0]

        is_right = (logit_of(labels) > logit_of(other)) * input_batch.weights
        num_rows = jnp.sum(input_batch.eval_sample_weights).astype(predictions.avg_xent.dtype)
        return jnp.sum(is_right) / jnp.maximum(num_rows, 1), num_rows
