"""DPO and related losses on preference pairs: a chosen and a rejected answer to one prompt.

The log-ratio of an answer is r = log p(answer | prompt) - log p_reference(answer | prompt), where p is the trained model.
Log-probabilities are summed over the answer's n tokens. With the indices c for the chosen and r for the rejected answer, b for
`beta`, e for `label_smoothing` and L(h) = -log sigmoid(h), the loss of a pair is:

| `loss` | loss of a pair | source |
|---|---|---|
| sigmoid | (1 - e) L(h) + e L(-h), h = b (r_c - r_r) | DPO (arXiv:2305.18290); with e > 0 conservative DPO (Mitchell, 2023) |
| sigmoid_norm | the same, h = b (r_c / n_c - r_r / n_r) | length-normalized DPO, as Tulu 3 uses it (arXiv:2411.15124) |
| robust | ((1 - e) L(h) - e L(-h)) / (1 - 2 e), the same h as for sigmoid | robust DPO (arXiv:2403.00409) |
| ipo | (r_c / n_c - r_r / n_r - 1 / (2 b))^2 | IPO (arXiv:2310.12036), per token as its authors use it |
| simpo | as sigmoid, h = b (log p_c / n_c - log p_r / n_r) - target_margin | SimPO (arXiv:2405.14734); no reference |

The losses have the same names as in TRL. In TRL, 'sigmoid' and 'sigmoid_norm' ignore label smoothing; here it applies.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from spmd_trainer.errors import UserError, require_one_of

LOSSES = ("sigmoid", "sigmoid_norm", "robust", "ipo", "simpo")
_NAME = "task.model.preference"


class PairLosses(NamedTuple):
    """Loss and rewards for each preference pair.

    Attributes:
      loss: float32 [pairs].
      rewards: float32 [pairs, 2 (chosen, rejected)]: beta times the answer's log-ratio. With 'simpo', beta times the mean
        log-probability of the answer's tokens.
    """

    loss: jax.Array
    rewards: jax.Array


@dataclasses.dataclass
class PreferenceLoss:
    """The loss on preference pairs; the module docstring has a table of the losses.

    Attributes:
      loss: one of `LOSSES`.
      beta: strength of the regularization toward the reference model (IPO's tau); greater than 0. SimPO's authors use 2 to 2.5.
      label_smoothing: fraction of pairs assumed to be mislabeled, at least 0 and less than 0.5; must be 0 for 'ipo'.
      target_margin: target for the difference between a pair's two rewards (SimPO's gamma), 0 or more for 'simpo'; else 0.
    """

    loss: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    target_margin: float = 0.0

    @property
    def needs_reference(self) -> bool:
        """True if the loss compares the trained model with a reference model."""
        return self.loss != "simpo"

    def check(self) -> None:
        """Checks every field.

        Raises:
          UserError: a field has an invalid value; the message names the field, the value and the valid values.
        """
        require_one_of(f"{_NAME}.loss", self.loss, LOSSES)
        for name in ("beta", "label_smoothing", "target_margin"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise UserError(f"{_NAME}.{name}={value!r}; set it to a number")
        if self.beta <= 0:
            raise UserError(f"{_NAME}.beta={self.beta}; set it above 0, e.g. 0.1")
        if not 0 <= self.label_smoothing < 0.5:
            raise UserError(f"{_NAME}.label_smoothing={self.label_smoothing}; set it to 0 or more, below 0.5")
        if self.label_smoothing and self.loss == "ipo":
            raise UserError(f"{_NAME}.label_smoothing={self.label_smoothing}: the loss 'ipo' has none; set it to 0")
        if self.target_margin < 0 or (self.target_margin and self.loss != "simpo"):
            raise UserError(
                f"{_NAME}.target_margin={self.target_margin} with the loss {self.loss!r}; set it to 0, or to 0 or more for "
                "'simpo'"
            )

    def __call__(self, logps: jax.Array, lengths: jax.Array, reference_logps: jax.Array | None = None) -> PairLosses:
        """Computes the loss and the rewards of each preference pair. The rewards have no gradient.

        Args:
          logps: float32 [pairs, 2 (chosen, rejected)], the answers' log-probabilities under the trained model.
          lengths: [pairs, 2], number of tokens in the answers; may be 0 in padding rows.
          reference_logps: float32 [pairs, 2], their log-probabilities under the reference model. Not used by 'simpo'.
        """
        lengths = jnp.maximum(lengths, 1).astype(logps.dtype)
        if not self.needs_reference:
            rewards = self.beta * logps / lengths
            return PairLosses(self._smoothed(_difference(rewards) - self.target_margin), jax.lax.stop_gradient(rewards))
        assert reference_logps is not None
        # The log-probabilities may be in the hundreds and their differences small: subtracting these two first keeps the digits.
        ratios = logps - jax.lax.stop_gradient(reference_logps)
        if self.loss == "ipo":
            loss = jnp.square(_difference(ratios / lengths) - 1 / (2 * self.beta))
        else:
            margin = self.beta * _difference(ratios / lengths if self.loss == "sigmoid_norm" else ratios)
            loss = self._unbiased(margin) if self.loss == "robust" else self._smoothed(margin)
        return PairLosses(loss, jax.lax.stop_gradient(self.beta * ratios))

    def _smoothed(self, margin: jax.Array) -> jax.Array:
        loss = -jax.nn.log_sigmoid(margin)
        if not self.label_smoothing:
            return loss
        return (1 - self.label_smoothing) * loss - self.label_smoothing * jax.nn.log_sigmoid(-margin)

    def _unbiased(self, margin: jax.Array) -> jax.Array:
        share = self.label_smoothing
        loss, flipped = -jax.nn.log_sigmoid(margin), -jax.nn.log_sigmoid(-margin)
        return ((1 - share) * loss - share * flipped) / (1 - 2 * share)


def _difference(pairs: jax.Array) -> jax.Array:
    return pairs[:, 0] - pairs[:, 1]
