"""Corrects the predictions of a search by the estimates of compiled candidates.

Predictions of candidates that share a setting are wrong in a similar way: e.g. splitting activations over a large axis
moves more bytes than predicted under every policy. So log(estimate / prediction) is modelled as a Gaussian process, a
sum of parts for mesh, policy, number of minibatches and batch. Each part changes little between similar settings.

Mean and spread come from the candidates compiled so far. `_LENGTH` and `_OWN` are round numbers chosen by hand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from spmd_trainer.planner.plan_candidates import Candidate
from spmd_trainer.planner.plan_report import Outcome

# Before any compilation, the standard deviation is a factor of 2. This counts as much as one candidate.
_SPREAD, _COUNTS = math.log(2), 1
# Distance of two settings (see `_settings`) at which the covariance has fallen to 1 / e. The farthest meshes of 64 chips are 6
# apart.
_LENGTH = 5.0
# Share of the variance that no other candidate explains.
_OWN = 0.05
# In one case out of 40, a candidate takes less time than is expected minus this many standard deviations.
_DEVIATIONS = 2.0


def optimistic(outcomes: Sequence[Outcome]) -> dict[int, float]:
    """Returns a lower limit in seconds that each candidate's step is unlikely to beat. `outcomes`: candidates with a
    prediction. The compiled ones have `estimated` seconds.

    Returns:
      {`id` of the outcome: seconds} of the candidates that aren't compiled.
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
    covariance = _covariance([outcome.candidate for outcome in (*known, *waiting)])
    between = covariance[: len(known), : len(known)] + _OWN * np.eye(len(known))
    across = covariance[len(known) :, : len(known)]
    weights = np.linalg.solve(between, np.ones(len(known)))
    mean = float(weights @ errors / weights.sum())
    rest = np.linalg.solve(between, errors - mean)
    variance = (_COUNTS * _SPREAD**2 + float((errors - mean) @ rest)) / (_COUNTS + len(errors))
    unexplained = 1.0 - np.sum(across * np.linalg.solve(between, across.T).T, axis=1)
    return mean + across @ rest, np.sqrt(variance * np.maximum(unexplained, _OWN))


def _covariance(candidates: Sequence[Candidate]) -> np.ndarray:
    """Returns the covariance of candidates in units of the variance, [candidates, candidates]."""
    parts = []
    for points in _settings(candidates):
        if np.ptp(points, axis=0).any():  # a setting that all candidates share explains no difference
            distances = np.linalg.norm(points[:, None] - points[None], axis=-1)
            parts.append(np.exp(-distances / _LENGTH))
    covariance: np.ndarray = np.mean(parts, axis=0) if parts else np.ones((len(candidates), len(candidates)))
    return covariance


def _settings(candidates: Sequence[Candidate]) -> list[np.ndarray]:
    """Returns the candidates' meshes, policies, minibatches and rows, each as points [candidates, coordinates].

    Sizes are logarithms. Halving one axis and doubling another is a distance of 1, and so is another policy, or twice as many
    minibatches or rows.
    """
    policies = sorted({candidate.remat for candidate in candidates}, key=str)
    return [
        np.log2([[size for _, size in c.mesh] for c in candidates]) / math.sqrt(2),
        np.array([[c.remat == policy for policy in policies] for c in candidates], float) / math.sqrt(2),
        np.log2([[c.minibatches or 1] for c in candidates]),
        np.log2([[c.rows or 1] for c in candidates]),
    ]
