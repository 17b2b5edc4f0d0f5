"""The shapes of batches, and which requests share one.

Each shape is compiled, so there are few; each row is as long as its batch, so the lengths in a batch must be near each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# Most shapes for the requests of one kind.
MAX_SHAPES = 8
# Fewer shapes are used if no more than this fraction of the tokens is then padding.
_ENOUGH = 0.1
# Widths are multiples of this number, and of more where there would be more candidates than _CANDIDATES.
_MULTIPLE = 8
_CANDIDATES = 256


class Shape(NamedTuple):
    """The shape of a batch.

    Attributes:
      rows: rows of the global batch.
      width: tokens of a row.
    """

    rows: int
    width: int


class Batch(NamedTuple):
    """Requests that run together.

    Attributes:
      shape: the shape.
      requests: indices of the requests; at most `shape.rows`.
    """

    shape: Shape
    requests: tuple[int, ...]


def choose_shapes(
    lengths: Sequence[int], *, limit: int, rows_of: Callable[[int], int], num_devices: int
) -> list[Shape]:
    """Chooses the shapes for requests of these lengths: at most MAX_SHAPES, with as little padding as possible.

    Args:
      lengths: tokens of each request.
      limit: no row is longer; all lengths are at most this.
      rows_of: width -> most rows of a batch.
      num_devices: rows are a multiple of it.

    Returns:
      The shapes, the widest first.
    """
    found: list[Shape] = []
    sizes, before = np.sort(np.asarray(lengths, int))[::-1], 0
    for width, next_width in itertools.pairwise([*reversed(_widths(sizes, limit)), 0] if len(sizes) else []):
        # What is left of the requests of this width; some may fill the last batch of the width before.
        count = int(np.count_nonzero(sizes > next_width)) - before
        if count <= 0:
            continue
        number = -(-count // rows_of(width))
        rows = -(-count // (number * num_devices)) * num_devices
        found.append(Shape(rows, width))
        before += number * rows
    return found


def batches(lengths: Sequence[int], shapes: Sequence[Shape]) -> list[Batch]:
    """Divides requests into batches, the longest first. Only the last batch may have rows without a request.

    Args:
      lengths: tokens of each request.
      shapes: the shapes, the widest first; the first is as wide as the longest request.
    """
    order = np.argsort(-np.asarray(lengths, int), kind="stable").tolist()
    found, start = [], 0
    while start < len(order):
        shape = next(shape for shape in reversed(shapes) if shape.width >= lengths[order[start]])
        found.append(Batch(shape, tuple(order[start : start + shape.rows])))
        start += shape.rows
    return found


def padding(lengths: Sequence[int], planned: Sequence[Batch]) -> float:
    """Returns the fraction of the batches' tokens that belong to no request."""
    total = sum(batch.shape.rows * batch.shape.width for batch in planned)
    return 1 - sum(lengths) / total if total else 0.0


def _widths(found: npt.NDArray[np.int64], limit: int) -> list[int]:
    """Returns the widths in ascending order: the fewest with little padding, or the MAX_SHAPES with the least."""
    multiple = _MULTIPLE * max(1, -(-int(found.max()) // (_MULTIPLE * _CANDIDATES)))
    rounded = np.minimum(-(-found // multiple) * multiple, limit)
    candidates, counts = np.unique(rounded, return_counts=True)
    before = np.concatenate([[0], np.cumsum(counts)])
    # cost[j]: tokens of the rows up to candidate j, with the k widths used so far, the widest of them candidate j.
    cost, choices = candidates * before[1:], []
    for _ in range(min(MAX_SHAPES, len(candidates)) - 1):
        if cost[-1] * (1 - _ENOUGH) <= found.sum():
            break
        # Splitting at i: rows up to candidate i as before, those from i + 1 to j with the width of j.
        split = cost[:, None] + candidates[None, :] * (before[None, 1:] - before[1:, None])
        split = np.where(np.arange(len(candidates))[:, None] < np.arange(len(candidates))[None, :], split, np.inf)
        choice = np.argmin(split, axis=0)
        better = np.min(split, axis=0) < cost
        choices.append(np.where(better, choice, -1))
        cost = np.where(better, np.min(split, axis=0), cost)
    chosen, last = [], len(candidates) - 1
    for choice in reversed(choices):
        if choice[last] >= 0:
            chosen.append(int(candidates[last]))
            last = int(choice[last])
    return sorted([*chosen, int(candidates[last])])
