"""Objects for `task.metrics`: from a step's weighted scalars to those a person wants to read."""

from __future__ import annotations

import math
from typing import Any

from praxis import base_hyperparams


class BitsPerByte(base_hyperparams.FiddleBaseParameterizable):
    """Adds `bits_per_byte` to a byte-level language model's metrics: its cross-entropy in bits.

    Attributes:
      source: the metric that holds nats per byte.
    """

    source: str = "avg_xent"

    def __call__(self, weighted_scalars: Any) -> Any:
        """Returns the same {name: (mean, weight)} with `bits_per_byte` added.

        Raises:
          ValueError: the model gives no metric named `source`.
        """
        if self.source not in weighted_scalars:
            raise ValueError(f"BitsPerByte reads {self.source!r}; the model's outputs are {sorted(weighted_scalars)}")
        nats, weight = weighted_scalars[self.source]
        return type(weighted_scalars)({**weighted_scalars, "bits_per_byte": (nats / math.log(2), weight)})
