"""Many scalars as one array: sixty scalar outputs of a step cost the host more than a small step itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_trainer.step_fns import StepFnOutput

LOSS = "loss"
# praxis adds the kind of a summary to its name; a layer that is applied several times adds a number after that.
_KIND = re.compile(r"_(aggregate_)?scalar(?=/|$)")


def summary_name(key: str) -> str:
    """Returns 'layer/norm' for praxis' key 'layer/norm_aggregate_scalar'."""
    return _KIND.sub("", key)


class ScalarPacking:
    """Packs loss, weighted scalars and scalar summaries of a step into one float32 vector, and reads it back by name.

    The names are learnt while `pack` is traced, so one instance belongs to one step function.
    """

    def __init__(self) -> None:
        self._names: list[tuple[str, str]] = []

    def pack(self, output: StepFnOutput) -> jax.Array:
        """Returns float32 [2 + 2 * weighted scalars + scalar summaries]. Called while tracing.

        A layer that is repeated gives a summary of each repetition in one array: 'layer/norm/0', 'layer/norm/1', ...
        Summaries of other kinds (images, histograms, tensors) are left out.
        """
        scalars: list[tuple[str, str, Any]] = []
        if output.loss is not None:
            scalars.append(("loss", LOSS, output.loss))
        for name, (value, weight) in sorted(output.weighted_scalars.items()):
            scalars += [("value", name, value), ("weight", name, weight)]
        for name, value in sorted(output.summary_tensors.items()):
            if jnp.ndim(value) == 0 or _KIND.search(name):
                scalars.append(("summary", summary_name(name), jnp.squeeze(value)))
        self._names = [
            (kind, "/".join((name, *map(str, index))))
            for kind, name, value in scalars
            for index in np.ndindex(jnp.shape(value))
        ]
        return jnp.concatenate([jnp.ravel(jnp.asarray(value, jnp.float32)) for _, _, value in scalars])

    def unpack(self, packed: Any) -> Scalars:
        """Reads a packed vector back on the host; waits for the device."""
        # All devices hold the same: reading one of them costs the host half of reading the whole array.
        values = np.asarray(packed.addressable_data(0) if isinstance(packed, jax.Array) else packed)
        scalars = Scalars()
        for (kind, name), value in zip(self._names, values.tolist(), strict=True):
            if kind == "loss":
                scalars.loss = value
            else:
                {"value": scalars.values, "weight": scalars.weights, "summary": scalars.summaries}[kind][name] = value
        return scalars


class Scalars:
    """One step's scalars on the host.

    Attributes:
      loss: mean loss, or None.
      values: mean of each weighted scalar over the batch.
      weights: its weight.
      summaries: scalar summaries.
    """

    def __init__(self) -> None:
        self.loss: float | None = None
        self.values: dict[str, float] = {}
        self.weights: dict[str, float] = {}
        self.summaries: dict[str, float] = {}


# What praxis' models give with weight 1 a batch although it counts examples or tokens.
_COUNTS = frozenset({"num_decoded", "num_predictions"})


class WeightedMean:
    """Averages weighted scalars over batches: sum(value * weight) / sum(weight), in float64 on the host.

    `num_decoded` and `num_predictions` are summed instead: a mean over batches would depend on the batch size.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._weights: dict[str, float] = {}

    def add(self, values: Mapping[str, float], weights: Mapping[str, float]) -> None:
        """Adds one batch. A batch of weight 0 changes nothing, whatever its value."""
        for name, value in values.items():
            weight = weights[name]
            if weight:
                self._sums[name] = self._sums.get(name, 0.0) + value * weight
            self._weights[name] = self._weights.get(name, 0.0) + weight

    def result(self) -> dict[str, float]:
        """Returns the mean (of counts, the sum) of each name that had any weight."""
        return {
            name: self._sums[name] / (1.0 if name in _COUNTS else weight)
            for name, weight in self._weights.items()
            if weight
        }
