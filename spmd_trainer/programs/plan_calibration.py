"""Corrects the predictions of a search by what compiled candidates really take.

Predictions of similar candidates are wrong in a similar way: one that splits activations over a large axis, say, moves more than
the prediction counts wherever that axis is large. So the logarithm of estimate / prediction is a Gaussian process over the
candidates, whose covariance falls with the distance between them. Nothing is fitted to any model or chip: the process' mean and
spread are those of the candidates compiled so far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from spmd_trainer.programs.plan_report import Outcome

# Before any compilation, the standard deviation is a factor of 2. This counts as much as one candidate.
_SPREAD, _COUNTS = math.log(2), 1
# Distance of two candidates (see `_features`) at which the covariance has fallen to 1 / e.
_LENGTH = 5.0
# Share of the variance that is a candidate's own: no neighbour explains it.
_OWN = 0.05
# A candidate takes less time than this many standard deviations below its expectation in one case of 40.
_DEVIATIONS = 2.0


def optimistic(outcomes: Sequence[Outcome]) -> dict[int, float]:
    """Returns seconds that each candidate's step hardly takes less than.

    Args:
      outcomes: candidates with a prediction; those with `estimated` seconds are what is known.

    Returns:
      {`id` of the outcome: seconds}, for the candidates that aren't compiled.
    """
    known = [outcome for outcome in outcomes if outcome.estimated]
    waiting = [outcome for outcome in outcomes if not outcome.estimated]
    if not waiting:
        return {}
    mean, below = _correction(known, waiting)
    return {id(o): o.predicted * math.exp(m - _DEVIATIONS * s) for o, m, s in zip(waiting, mean, below, strict=True)}


def _correction(known: Sequence[Outcome], waiting: Sequence[Outcome]) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean and standard deviation of log(estimate / prediction), [candidates]."""
    errors = np.array([math.log((outcome.estimated or 0.0) / outcome.predicted) for outcome in known])
    if not len(errors):
        return np.zeros(len(waiting)), np.full(len(waiting), _SPREAD)
    policies = sorted({outcome.candidate.remat for outcome in (*known, *waiting)}, key=str)
    points = _features(known, policies)
    between = _covariance(points, points) + _OWN * np.eye(len(known))
    across = _covariance(_features(waiting, policies), points)
    weights = np.linalg.solve(between, np.ones(len(known)))
    mean = float(weights @ errors / weights.sum())
    rest = np.linalg.solve(between, errors - mean)
    variance = (_COUNTS * _SPREAD**2 + float((errors - mean) @ rest)) / (_COUNTS + len(errors))
    unexplained = 1.0 - np.sum(across * np.linalg.solve(between, across.T).T, axis=1)
    return mean + across @ rest, np.sqrt(variance * np.maximum(unexplained, _OWN))


def _covariance(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Returns the covariance of two lists of candidates in units of the variance, [some, others]; takes their `_features`."""
    squares = np.sum((some[:, None] - others[None]) ** 2, axis=-1)
    covariance: np.ndarray = np.exp(-np.sqrt(squares) / _LENGTH)
    return covariance


def _features(outcomes: Sequence[Outcome], policies: Sequence[str | None]) -> np.ndarray:
    """Returns the candidates as points, [candidates, features]: logarithms of their sizes, and which policy they have.

    Halving one axis and doubling another is a distance of 1, and so is another policy.
    """
    found = [outcome.candidate for outcome in outcomes]
    sizes = [[*(size for _, size in c.mesh), c.minibatches or 1, c.rows or 1] for c in found]
    chosen = [[c.remat == policy for policy in policies] for c in found]
    return np.concatenate([np.log2(sizes), np.array(chosen, float)], axis=1) / math.sqrt(2)
