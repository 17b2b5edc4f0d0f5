"""Fits a scaling law to the losses of a family of models, each trained on tokens in proportion to its size.

The loss is floor + scale * compute^-exponent (Hoffmann et al. 2022, arXiv:2203.15556, along one line of sizes and tokens), where
the compute of a trial is 6 FLOPs for each parameter and token. Error bars are a bootstrap of the residuals.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
# A law of three numbers has no error bars with fewer.
LEAST_TRIALS = 4
_FLOORS = 400
_RESAMPLES = 300
# Error bars hold this share of the resampled laws.
_SHARE = 0.9
# How much more compute than that of the largest trial the law is asked about.
_AHEAD = (10, 100)


@dataclasses.dataclass(frozen=True)
class ScalingLaw:
    """loss = floor + scale * (compute / unit)^-exponent.

    Attributes:
      floor: limit of the loss for infinite compute.
      scale: loss above the floor if the compute is `unit`.
      exponent: how fast the loss above the floor falls with compute.
      unit: compute in FLOPs.
    """

    floor: float
    scale: float
    exponent: float
    unit: float

    def loss(self, flops: Floats | float) -> Floats:
        return np.asarray(self.floor + self.scale * (np.asarray(flops, np.float64) / self.unit) ** -self.exponent)


def fit(flops: Sequence[float] | Floats, losses: Sequence[float] | Floats) -> ScalingLaw:
    """Returns the law that fits losses best, by the sum of squared differences of logarithms.

    Args:
      flops: compute of each run, of at least three different values.
      losses: the runs' losses, positive.
    """
    c, observed = np.asarray(flops, np.float64), np.asarray(losses, np.float64)
    unit = float(np.exp(np.mean(np.log(c))))
    x = np.log(c / unit)
    # For a given floor the law is a line in logarithms. Floors are tried from 0 to just below the least loss, as rows of arrays.
    floors = observed.min() * (1 - np.geomspace(1e-4, 1.0, _FLOORS))
    above = observed - floors[:, None]
    # A difference of logarithms of losses is one of what is above the floor times its share of the loss.
    weights, y = (above / observed) ** 2, np.log(above)
    total = weights.sum(1, keepdims=True)
    from_x, from_y = (v - (weights * v).sum(1, keepdims=True) / total for v in (np.broadcast_to(x, y.shape), y))
    slopes = (weights * from_x * from_y).sum(1) / (weights * from_x**2).sum(1)
    intercepts = (weights * (y - slopes[:, None] * x)).sum(1) / total[:, 0]
    losses_of_law = floors[:, None] + np.exp(intercepts[:, None] + slopes[:, None] * x)
    at = int(np.argmin(((np.log(losses_of_law) - np.log(observed)) ** 2).sum(1)))
    return ScalingLaw(float(floors[at]), float(np.exp(intercepts[at])), float(-slopes[at]), unit)


def resampled(law: ScalingLaw, flops: Floats, losses: Floats, seed: int = 0) -> list[ScalingLaw]:
    """Returns laws fitted to bootstrap samples: the losses of `law`, each with a random residual added."""
    predicted = np.log(law.loss(flops))
    # Three numbers were fitted, so that the residuals are smaller than the noise.
    residuals = (np.log(losses) - predicted) * np.sqrt(len(flops) / max(len(flops) - 3, 1))
    generator = np.random.default_rng(seed)
    draws = generator.choice(residuals, size=(_RESAMPLES, len(flops)))
    return [fit(flops, np.exp(predicted + drawn)) for drawn in draws]


def record(points: Sequence[tuple[int, float, float]]) -> dict[str, Any] | None:
    """Returns the scaling law for the page of a sweep, as JSON; None if there are too few sizes to fit it.

    Args:
      points: (number of the trial, FLOPs, loss) of each trial. Those whose FLOPs or loss is not positive and finite are ignored.
    """
    found = [point for point in points if point[1] > 0 and point[2] > 0 and np.isfinite(point[2])]
    if len({flops for _, flops, _ in found}) < LEAST_TRIALS:
        return None
    flops, losses = (np.asarray([point[at] for point in found], np.float64) for at in (1, 2))
    law = fit(flops, losses)
    others = resampled(law, flops, losses)

    def with_bars(value: float, values: Sequence[float] | Floats) -> list[float]:
        low, high = np.quantile(np.asarray(values), [(1 - _SHARE) / 2, (1 + _SHARE) / 2])
        return [float(value), float(low), float(high)]

    def at(compute: float) -> list[float]:
        return with_bars(float(law.loss(compute)), [float(other.loss(compute)) for other in others])

    line = np.geomspace(flops.min(), flops.max() * _AHEAD[-1], 40)
    return {
        "points": [list(point) for point in found],
        "line": [[float(compute), *at(float(compute))] for compute in line],
        "exponent": with_bars(law.exponent, [other.exponent for other in others]),
        "floor": with_bars(law.floor, [other.floor for other in others]),
        "ahead": [[times, *at(float(flops.max() * times))] for times in _AHEAD],
        "share": _SHARE,
    }
