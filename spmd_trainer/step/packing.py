"""Packs the scalars of a step into one array on the devices, and unpacks and averages them on the host.

Fetching sixty separate scalars from the devices can take longer than a small step. clu metrics are not packed, because their
arrays may be integers and of any size; few models have them.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from clu import metrics

from spmd_trainer.errors import UserError
from spmd_trainer.step import masks
from spmd_trainer.step.step_fns import StepFnOutput

CluMetrics: TypeAlias = Mapping[str, metrics.Metric]
# Output of a step: the vector and the clu metrics.
Packed: TypeAlias = tuple[jax.Array, CluMetrics]

# praxis appends the type of a summary to its name; a layer that is applied several times appends a number after that.
_KIND = re.compile(r"_(aggregate_)?scalar(?=(/\d+)*$)")
# End of the names of summaries with the number of tokens of each expert.
_LOAD_KEY = f"/{masks.LOAD}_histogram"


def summary_name(key: str) -> str:
    """Returns a praxis summary's key without its type: 'layer/norm' for 'layer/norm_aggregate_scalar'."""
    return _KIND.sub("", key)


class ScalarPacking:
    """Packs loss, weighted scalars and scalar summaries of a step into one float32 vector, and unpacks them by name.

    The numbers of tokens per expert (`masks.LOAD`) are arrays at the end of the vector. clu metrics stay separate arrays. Tracing
    `pack` stores the names, so each step function needs its own instance.
    """

    def __init__(self) -> None:
        self._has_loss = False
        self._weighted: list[str] = []
        self._summaries = SummaryNames()
        self._loads: dict[str, tuple[int, ...]] = {}

    def pack(self, output: StepFnOutput) -> Packed:
        """Returns a float32 vector and the clu metrics. Called during tracing.

        The vector is [loss, value and weight of each weighted scalar, scalar summaries, tokens per expert]. A repeated layer's
        summary is an array; its elements are named 'layer/norm/0', 'layer/norm/1', ... Summaries of other types (images,
        histograms, tensors) are omitted, except tokens per expert.

        Raises:
          ValueError: the loss or a weighted scalar is not a scalar.
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
        loads = {
            k.removesuffix(_LOAD_KEY): v for k, v in sorted(output.summary_tensors.items()) if k.endswith(_LOAD_KEY)
        }
        parts += [jnp.ravel(load.astype(jnp.float32)) for load in loads.values()]
        self._loads = {name: load.shape for name, load in loads.items()}
        self._weighted, self._summaries = list(weighted), SummaryNames(names)
        return jnp.concatenate(parts), dict(output.clu_metrics or {})

    def unpack(self, packed: Packed) -> Scalars:
        """Returns the scalars of a step; blocks until the devices have computed them."""
        vector, clu = jax.tree.map(_on_host, packed)
        loads = {}
        for name, shape in reversed(self._loads.items()):
            vector, load = np.split(vector, [-math.prod(shape)])
            loads[name] = load.reshape(shape)
        values = vector.tolist()
        loss = values.pop(0) if self._has_loss else None
        end = 2 * len(self._weighted)
        weighted = dict(zip(self._weighted, values[0:end:2], strict=True))
        weights = dict(zip(self._weighted, values[1:end:2], strict=True))
        return Scalars(loss, weighted, weights, self._summaries, values[end:], clu, loads)


def _on_host(x: Any) -> np.ndarray:
    # It is replicated: reading one shard takes half as long as reading the whole array.
    return np.asarray(x.addressable_data(0) if isinstance(x, jax.Array) else x)


def _scalar(what: str, value: Any) -> jax.Array:
    if jnp.ndim(value):
        raise ValueError(f"{what} has shape {jnp.shape(value)}; the model must return a scalar, a mean over the batch")
    return jnp.asarray(value, jnp.float32)[None]


class SummaryNames:
    """The names of a step's summaries, in the order in which their values are packed. All steps share one instance."""

    def __init__(self, names: Sequence[str] = ()):
        self.names = tuple(names)
        self._indices: dict[str, tuple[int, ...]] = {}

    def indices_of(self, last_part: str) -> tuple[int, ...]:
        """Returns the indices of the names whose part after the last '/' is `last_part`."""
        if last_part not in self._indices:
            found = (index for index, name in enumerate(self.names) if name.rpartition("/")[2] == last_part)
            self._indices[last_part] = tuple(found)
        return self._indices[last_part]


class Scalars(Mapping[str, float]):
    """One step's scalars on the host, a mapping {name: float} of loss, weighted scalars, clu metrics and summaries.

    Attributes:
      loss: mean loss; None in decoding.
      means: mean of each weighted scalar over the batch.
      weights: weight of each weighted scalar.
      clu: the model's clu metrics over the batch, to merge with those of other batches.
      loads: {layer: number of tokens that each expert received}, float32 [experts] or [repetitions, experts]. These arrays
        are not items of this mapping. See `masks.LOAD`.
    """

    def __init__(
        self,
        loss: float | None = None,
        means: Mapping[str, float] | None = None,
        weights: Mapping[str, float] | None = None,
        summary_names: SummaryNames | None = None,
        summary_values: Sequence[float] = (),
        clu: CluMetrics | None = None,
        loads: Mapping[str, np.ndarray] | None = None,
    ):
        self.loss = loss
        self.means = means or {}
        self.weights = weights or {}
        self.clu = clu or {}
        self.loads = loads or {}
        self._names = summary_names or SummaryNames()
        self._values = summary_values

    @functools.cached_property
    def summaries(self) -> dict[str, float]:
        """{name: scalar summary}, made on first use: a deep model has thousands of summaries, which few steps read."""
        return dict(zip(self._names.names, self._values, strict=True))

    @functools.cached_property
    def _by_name(self) -> dict[str, float]:
        loss = {} if self.loss is None else {"loss": self.loss}
        return {**loss, **self.means, **computed_clu(self.clu), **self.summaries}

    def __getitem__(self, name: str) -> float:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def __repr__(self) -> str:
        return repr(self._by_name)

    def summaries_called(self, last_part: str) -> list[float]:
        """Returns the summaries of all layers and optimizers whose names have `last_part` after the last '/'."""
        return [self._values[index] for index in self._names.indices_of(last_part)]


# Counts of examples or tokens, which praxis' models report as means with weight 1.
_COUNTS = frozenset({"num_decoded", "num_predictions"})


class WeightedMean:
    """Averages weighted scalars over batches: sum(value * weight) / sum(weight), in float64 on the host.

    `num_decoded` and `num_predictions` are summed instead: a mean over batches would depend on the batch size.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._clu: CluMetrics = {}

    def add(self, values: Mapping[str, float], weights: Mapping[str, float], clu: CluMetrics | None = None) -> None:
        """Adds one batch. A value with weight 0 is ignored, even if it is NaN.

        Args:
          values: {name: mean over the batch}.
          weights: {name: weight of the mean}.
          clu: {name: clu metric over the batch}, merged by the metric's own `merge`.
        """
        self._clu = merged_clu(self._clu, clu or {})
        for name, value in values.items():
            weight = weights[name]
            if weight:
                self._sums[name] = self._sums.get(name, 0.0) + value * weight
            self._weights[name] = self._weights.get(name, 0.0) + weight

    def result(self) -> dict[str, float]:
        """Returns the mean (for counts, the sum) of each name with nonzero total weight, and clu metrics."""
        means = {
            name: self._sums[name] / (1.0 if name in _COUNTS else weight)
            for name, weight in self._weights.items()
            if weight
        }
        return {**means, **computed_clu(self._clu)}


def merged_clu(old: CluMetrics, new: CluMetrics) -> dict[str, metrics.Metric]:
    """Returns the merged clu metrics of two sets of batches; `old` may be empty."""
    with jax.transfer_guard_device_to_host("allow"):
        return {name: old[name].merge(metric) if name in old else metric for name, metric in new.items()}


def computed_clu(clu: CluMetrics) -> dict[str, float]:
    """Returns {name: value} of clu metrics; the entries of a metric that computes a dict are named 'metric/key'.

    Raises:
      UserError: a metric fails, or computes neither a scalar nor a dict of scalars; the message names it.
    """
    found: dict[str, float] = {}
    with jax.transfer_guard_device_to_host("allow"):
        for name, metric in clu.items():
            value = _value_of(name, metric)
            for key, part in value.items() if isinstance(value, Mapping) else [("", value)]:
                if np.shape(part):
                    raise UserError(
                        f"the clu metric {name!r} ({type(metric).__name__}) computes an array of shape {np.shape(part)}; its "
                        "`compute` must return a scalar, or a dict of scalars"
                    )
                found[f"{name}/{key}" if key else name] = float(part)
    return found


def _value_of(name: str, metric: metrics.Metric) -> Any:
    try:
        return metric.compute()
    except Exception as error:  # a user's code may fail in any way, and clu's own `Std` does with JAX 0.10
        raise UserError(
            f"the clu metric {name!r} ({type(metric).__name__}) can't be computed: {type(error).__name__}: {error}"
        ) from error
