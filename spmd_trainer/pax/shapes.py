"""Infers logical (unpadded) shapes in Pax checkpoints, and checks which logical shapes a stored array can have.

Pax stores arrays with padding: a dimension of 257 that was sharded over 2 devices is stored as 258. A checkpoint doesn't record
the logical shapes of optimizer states, so they are inferred from those of model variables.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from spmd_trainer.pax.arrays import PaxArray

_VARS, _OPT = "mdl_vars/", "opt_states/"


def can_be(array: PaxArray, shape: Sequence[int]) -> bool:
    """Returns True if a stored array can be a variable of this logical shape, with Pax's padding added.

    Returns False if the checkpoint records a different logical shape, or Pax's shards would give a different stored shape.
    """
    if array.logical_shape is not None and array.logical_shape != tuple(shape):
        return False
    if len(array.stored_shape) != len(shape):
        return False
    shards = array.shards or (1,) * len(shape)
    return all(map(_can_be_padded, array.stored_shape, shape, shards))


def _can_be_padded(stored: int, size: int, shards: int) -> bool:
    if stored == size:
        return True
    # Without a known number of shards, any padding is possible; it is checked for zeros when the array is read.
    return stored > size > 0 and (shards == 1 or stored == -(-size // shards) * shards)


def with_logical_shapes(arrays: Mapping[str, PaxArray]) -> dict[str, PaxArray]:
    """Adds logical shapes to optimizer states if they can be inferred from the checkpoint's model variables.

    A logical shape is a shape without padding. If an optimizer state's path ends with a model variable's path, and both have the
    same stored shape, they have the same logical shape. A factored state (one with some of the variable's dimensions) has these
    dimensions' logical sizes. If an array was not sharded, it has no padding, so its logical shape is its stored shape.

    Returns:
      The same arrays. `logical_shape` stays None if it can't be inferred.
    """
    return {path: _with_logical_shape(array, arrays) for path, array in arrays.items()}


def _with_logical_shape(array: PaxArray, arrays: Mapping[str, PaxArray]) -> PaxArray:
    if array.logical_shape is not None:
        return array
    if not array.stored_shape or (array.shards is not None and all(count == 1 for count in array.shards)):
        return dataclasses.replace(array, logical_shape=array.stored_shape)
    variable = variable_of(array.path, arrays)
    if variable is None or variable.logical_shape is None:
        return array
    shapes = _matching(array.stored_shape, variable.stored_shape, variable.logical_shape)
    return dataclasses.replace(array, logical_shape=shapes.pop()) if len(shapes) == 1 else array


def variable_of(path: str, arrays: Mapping[str, PaxArray]) -> PaxArray | None:
    """Returns the model variable whose path is the longest suffix of an optimizer state's path; None if there is none."""
    if not path.startswith(_OPT):
        return None
    keys = path.split("/")
    return next((arrays[p] for i in range(1, len(keys)) if (p := _VARS + "/".join(keys[i:])) in arrays), None)


def _matching(stored: tuple[int, ...], whole: tuple[int, ...], logical: tuple[int, ...]) -> set[tuple[int, ...]]:
    """Returns the possible logical shapes of an array that has some of a variable's dimensions, in the same order.

    Args:
      stored: the array's stored shape.
      whole: the variable's stored shape.
      logical: the variable's logical shape.
    """
    if stored == whole:
        return {logical}
    choices = itertools.combinations(range(len(whole)), len(stored))
    return {
        tuple(logical[dim] for dim in dims) for dims in choices if tuple(whole[dim] for dim in dims) == tuple(stored)
    }
