"""Fits a scaling law to the losses of a family of models, each trained on tokens in proportion to its size.

The law is loss = floor + scale * compute^-exponent (Hoffmann et al. 2022, arXiv:2203.15556, for a fixed ratio of tokens to
parameters), where the compute of a trial is 6 FLOPs for each parameter and token. Error bars come from a bootstrap of the
residuals.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
# The law has three parameters, so error bars need at least four different amounts of compute.
LEAST_TRIALS = 4
_FLOORS = 400
_RESAMPLES = 300
# Fraction of the resampled laws that lie within the error bars.
_SHARE = 0.9
# The page shows the law's losses for these multiples of the largest trial's compute.
_AHEAD = (10, 100)


@dataclasses.dataclass(frozen=True)
class ScalingLaw:
    """The law loss = floor + scale * (compute / unit)^-exponent.

    Attributes:
      floor: limit of the loss for infinite compute.
      scale: how far the loss is above `floor` if the compute is `unit`.
      exponent: how fast the difference from `floor` falls with compute.
      unit: reference compute in FLOPs; `fit` takes the geometric mean of the runs' compute.
    """

    floor: float
    scale: float
    exponent: float
    unit: float

    def loss(self, flops: Floats | float) -> Floats:
        return np.asarray(self.floor + self.scale * (np.asarray(flops, np.float64) / self.unit) ** -self.exponent)


def fit(flops: Sequence[float] | Floats, losses: Sequence[float] | Floats) -> ScalingLaw:
    """Returns the law that fits `losses` best: it minimizes the sum of squared differences between logarithms of losses.

    Args:
      flops: compute of each run in FLOPs, with at least three different values.
      losses: the runs' losses, positive.
    """
    c, observed = np.asarray(flops, np.float64), np.asarray(losses, np.float64)
    unit = float(np.exp(np.mean(np.log(c))))
    x = np.log(c / unit)
    # For a given floor, the law is a straight line in logarithms. Floors from 0 to just below the least loss are tried at
    # once: each is a row of the arrays below.
    floors = observed.min() * (1 - np.geomspace(1e-4, 1.0, _FLOORS))
    above = observed - floors[:, None]
    # A difference in log(loss) is about (loss - floor) / loss times the difference in log(loss - floor); hence these weights.
    weights, y = (above / observed) ** 2, np.log(above)
    total = weights.sum(1, keepdims=True)
    from_x, from_y = (v - (weights * v).sum(1, keepdims=True) / total for v in (np.broadcast_to(x, y.shape), y))
    slopes = (weights * from_x * from_y).sum(1) / (weights * from_x**2).sum(1)
    intercepts = (weights * (y - slopes[:, None] * x)).sum(1) / total[:, 0]
    losses_of_law = floors[:, None] + np.exp(intercepts[:, None] + slopes[:, None] * x)
    at = int(np.argmin(((np.log(losses_of_law) - np.log(observed)) ** 2).sum(1)))
    return ScalingLaw(float(floors[at]), float(np.exp(intercepts[at])), float(-slopes[at]), unit)


def resampled(law: ScalingLaw, flops: Floats, losses: Floats, seed: int = 0) -> list[ScalingLaw]:
    """Returns laws fitted to bootstrap samples: the losses that `law` predicts, each with a random residual added.

    The residuals are the differences between `losses` and the predictions, in logarithms.
    """
    predicted = np.log(law.loss(flops))
    # Scaled up, because three fitted parameters make the residuals smaller than the noise.
    residuals = (np.log(losses) - predicted) * np.sqrt(len(flops) / max(len(flops) - 3, 1))
    generator = np.random.default_rng(seed)
    draws = generator.choice(residuals, size=(_RESAMPLES, len(flops)))
    return [fit(flops, np.exp(predicted + drawn)) for drawn in draws]


def record(points: Sequence[tuple[int, float, float]]) -> dict[str, Any] | None:
    """Returns the fitted scaling law for a sweep's page, as JSON values; None for fewer than 4 different numbers of FLOPs.

    Args:
      points: (number of the trial, FLOPs, loss) of each trial. Trials whose FLOPs or loss are not positive, or whose loss is not
        finite, are ignored.
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
