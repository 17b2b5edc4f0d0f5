"""Reads the arrays of a Pax checkpoint onto a mesh. Drops the padding that Pax added, and checks that it is zero."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding

from spmd_trainer.checkpointing import mismatch
from spmd_trainer.checkpointing.shards import Bounds, ReadShard, logical_bounds, num_elements, place
from spmd_trainer.pax.arrays import Index, PaxArray
from spmd_trainer.pax.errors import PaxMismatchError
from spmd_trainer.sharding.variables import VariableSpec

# Maximum number of bytes that are being read at a time. A larger variable is read alone.
_AHEAD_BYTES = 16 << 20
# After this many bytes, memory that was freed is returned to the system: it had grown to a quarter of the state's size.
_TRIM_BYTES = 64 << 20


def read_onto_mesh(
    wanted: Mapping[str, VariableSpec], source: Mapping[str, PaxArray], mesh: Mesh, checkpoint: str
) -> dict[str, jax.Array]:
    """Reads variables onto a mesh. Each process reads only its own devices' shards, and reads large variables one at a time.

    Args:
      wanted: the model's variables by path.
      source: the stored array of each variable, by the same path. Floating-point dtypes are converted to the model's.
      mesh: the mesh on which the variables are placed.
      checkpoint: the checkpoint's name in error messages.

    Returns:
      {path: array with the model's padded shape}. The padding is zero.

    Raises:
      PaxMismatchError: the padding of a stored array holds values other than zero.
      PaxDamagedError, CheckpointReadError: an array can't be read.
    """

    def start(path: str, spec: VariableSpec, sharding: NamedSharding) -> ReadShard:
        return _start(source[path], spec, sharding)

    result = place(wanted, mesh, start, ahead_bytes=_AHEAD_BYTES, trim_bytes=_TRIM_BYTES)
    # Each process checks the padding of some variables; together they check all.
    mine = list(wanted.items())[jax.process_index() :: jax.process_count()]
    faults = [fault for path, spec in mine if (fault := _padding_fault(source[path], spec))]
    if faults:
        raise PaxMismatchError(_explain(faults, checkpoint))
    return result


def _start(array: PaxArray, spec: VariableSpec, sharding: NamedSharding) -> ReadShard:
    """Starts to read this process's shards of an array. Returns a function from the bounds of a shard to the padded shard."""
    shape = sharding.shard_shape(spec.padded_shape)
    held = set(logical_bounds(spec, sharding).values())
    parts = {bounds: array.start_reading(_slices(bounds)) for bounds in held if num_elements(bounds)}

    def read(bounds: Bounds) -> npt.NDArray[Any]:
        if bounds not in parts:
            return np.zeros(shape, spec.dtype)
        return _padded(parts.pop(bounds)(), shape, spec.dtype)

    return read


def _padded(part: npt.NDArray[Any], shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if part.shape == shape:
        return np.asarray(part, dtype, order="C")
    shard = np.zeros(shape, dtype)
    shard[tuple(slice(0, size) for size in part.shape)] = part
    return shard


def _slices(bounds: Any) -> Index:
    return tuple(slice(start, stop) for start, stop in bounds)


def _padding_fault(array: PaxArray, spec: VariableSpec) -> str | None:
    """Returns a description of the nonzero values in Pax's padding of a variable; None if all values are zero."""
    logical = spec.logical_shape
    for dim, (size, stored) in enumerate(zip(logical, array.stored_shape, strict=True)):
        if size == stored:
            continue
        slab = [slice(0, n) for n in array.stored_shape]
        slab[dim] = slice(size, stored)
        found = np.argwhere(array.start_reading(tuple(slab))() != 0)
        if len(found):
            position = found[0] + np.array([s.start for s in slab])
            return (
                f"{spec.path}: stored {array.stored_shape}, in the model {tuple(logical)}; outside of that, {len(found)} "
                f"values are not zero, the first at {[int(i) for i in position]}"
            )
    return None


def _explain(faults: list[str], checkpoint: str) -> str:
    lines = [f"{checkpoint} does not fit the model: the padding of these variables is not zero:"]
    lines += mismatch.first_lines([f"  {fault}" for fault in faults])
    lines.append("Either the model's variables are smaller than the saved ones, or the checkpoint is damaged.")
    return "\n".join(lines)
