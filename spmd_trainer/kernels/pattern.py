"""Which keys a query sees, and how logits are computed; the same for all kernels."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from spmd_trainer.errors import UserError

# The logit of a key that a query doesn't see. Not -inf: a difference of two of these must be a number.
MASKED = -1e30


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Which keys of its segment a query sees, and how its logits are computed.

    Query i sees key j if both have the same segment id, `j <= i` if `causal`, and `i - j < window` if there is a window. Every
    query sees itself, so no row of logits is fully masked.

    Attributes:
      causal: a query sees no key after it.
      window: a query sees itself and the `window - 1` tokens before it. Needs `causal`.
      softcap: logits x become softcap * tanh(x / softcap).
      scale: factor of the logits, applied before the cap.
    """

    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        """Checks the fields.

        Raises:
          UserError: a window without `causal`, or a window or cap that is not positive.
        """
        if self.window is not None and not self.causal:
            raise UserError(
                f"a window of {self.window} tokens needs causal=True: it counts the tokens before the query"
            )
        if self.window is not None and self.window < 1:
            raise UserError(f"the window is {self.window}; it must be at least 1, the query's own token")
        if self.softcap is not None and self.softcap <= 0:
            raise UserError(f"softcap is {self.softcap}; it must be positive, or None for no cap")

    def logits(self, products: jax.Array) -> jax.Array:
        """Scales and caps query-key products (float32, any shape); returns the logits."""
        logits = self.scale * products
        return logits if self.softcap is None else self.softcap * jnp.tanh(logits / self.softcap)
