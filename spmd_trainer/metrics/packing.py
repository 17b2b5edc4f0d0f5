"""Many scalars as one array: sixty scalar outputs of a step cost the host more than a small step itself."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_trainer.steps.step_fns import StepFnOutput

# praxis adds the kind of a summary to its name; a layer that is applied several times adds a number after that.
_KIND = re.compile(r"_(aggregate_)?scalar(?=(/\d+)*$)")


def summary_name(key: str) -> str:
    """Returns 'layer/norm' for praxis' key 'layer/norm_aggregate_scalar'."""
    return _KIND.sub("", key)


class ScalarPacking:
    """Packs loss, weighted scalars and scalar summaries of a step into one float32 vector, and reads it back by name.

    The names are learnt while `pack` is traced, so one instance belongs to one step function.
    """

    def __init__(self) -> None:
        self._has_loss = False
        self._weighted: list[str] = []
        self._summaries = SummaryNames()

    def pack(self, output: StepFnOutput) -> jax.Array:
        """Returns float32 [loss, value and weight of each weighted scalar, summaries]. Called while tracing.

        A layer that is repeated gives a summary of each repetition in one array: 'layer/norm/0', 'layer/norm/1', ...
        Summaries of other kinds (images, histograms, tensors) are left out.

        Raises:
          ValueError: the loss, or a weighted scalar, is no scalar.
        """
        weighted, self._has_loss = dict(sorted(output.weighted_scalars.items())), output.loss is not None
        parts = [_scalar("the loss", output.loss)] if self._has_loss else []
        for name, (value, weight) in weighted.items():
            parts += [_scalar(f"weighted scalar {name!r}", value), _scalar(f"the weight of {name!r}", weight)]
        names: list[str] = []
        for key, value in sorted(output.summary_tensors.items()):
            if jnp.ndim(value) == 0 or _KIND.search(key):
                values, name = jnp.squeeze(value), summary_name(key)
                names += ["/".join((name, *map(str, index))) for index in np.ndindex(values.shape)]
                parts.append(jnp.ravel(jnp.asarray(values, jnp.float32)))
        self._weighted, self._summaries = list(weighted), SummaryNames(names)
        return jnp.concatenate(parts)

    def unpack(self, packed: Any) -> Scalars:
        """Reads a packed vector back on the host; waits for the device."""
        # All devices hold the same: reading one of them costs the host half of reading the whole array.
        values = np.asarray(packed.addressable_data(0) if isinstance(packed, jax.Array) else packed).tolist()
        loss = values.pop(0) if self._has_loss else None
        end = 2 * len(self._weighted)
        weighted = dict(zip(self._weighted, values[0:end:2], strict=True))
        weights = dict(zip(self._weighted, values[1:end:2], strict=True))
        return Scalars(loss, weighted, weights, self._summaries, values[end:])


def _scalar(what: str, value: Any) -> jax.Array:
    if jnp.ndim(value):
        raise ValueError(f"{what} has shape {jnp.shape(value)}; the model is to give a mean over the batch, a scalar")
    return jnp.asarray(value, jnp.float32)[None]


class SummaryNames:
    """Names of a step's summaries, in the order of their values. All steps share one object, which remembers places."""

    def __init__(self, names: Sequence[str] = ()):
        self.names = tuple(names)
        self._places: dict[str, tuple[int, ...]] = {}

    def places_of(self, last_part: str) -> tuple[int, ...]:
        """Where the names stand that are `last_part`, or end with '/' and that."""
        if last_part not in self._places:
            found = (place for place, name in enumerate(self.names) if name.rpartition("/")[2] == last_part)
            self._places[last_part] = tuple(found)
        return self._places[last_part]


class Scalars:
    """One step's scalars on the host.

    Attributes:
      loss: mean loss, or None.
      values: mean of each weighted scalar over the batch.
      weights: its weight.
    """

    def __init__(
        self,
        loss: float | None = None,
        values: Mapping[str, float] | None = None,
        weights: Mapping[str, float] | None = None,
        summary_names: SummaryNames | None = None,
        summary_values: Sequence[float] = (),
    ):
        self.loss = loss
        self.values = values or {}
        self.weights = weights or {}
        self._names = summary_names or SummaryNames()
        self._values = summary_values

    @functools.cached_property
    def summaries(self) -> dict[str, float]:
        """Scalar summaries. A deep model has thousands, and most steps are never asked for theirs."""
        return dict(zip(self._names.names, self._values, strict=True))

    def summaries_called(self, last_part: str) -> list[float]:
        """The summaries of that name, whichever layer or optimizer gave them."""
        return [self._values[place] for place in self._names.places_of(last_part)]


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
