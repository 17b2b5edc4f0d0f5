"""Reads arrays from storage onto a mesh: each device's shard alone. Leaves Pax's padding out, and checks that it is zeros."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding

from spmd_trainer.checkpointing import mismatch
from spmd_trainer.checkpointing.shards import Bounds, logical_bounds, num_elements, trim_memory
from spmd_trainer.pax.arrays import Index, PaxArray
from spmd_trainer.pax.errors import PaxMismatchError
from spmd_trainer.sharding.variables import VariableSpec, named_shardings

# Bytes that are read ahead of the variable that is being placed, if the largest variable is smaller.
_AHEAD_BYTES = 16 << 20
# After so many bytes, memory that the C library keeps of freed chunks is given back: it grew to a quarter of the state.
_TRIM_BYTES = 64 << 20


@dataclasses.dataclass
class _Reading:
    """A variable that is being read.

    Attributes:
      path: its path in the model.
      array: where it comes from.
      parts: {the logical part of a shard: waits for it}.
      nbytes: the size of these parts.
    """

    path: str
    array: PaxArray
    parts: dict[tuple[tuple[int, int], ...], Callable[[], npt.NDArray[Any]]]
    nbytes: int


def read_onto_mesh(
    wanted: Mapping[str, VariableSpec], source: Mapping[str, PaxArray], mesh: Mesh, checkpoint: str
) -> dict[str, jax.Array]:
    """Reads variables. Each process reads the shards of its own devices, and holds at most one large variable besides.

    Args:
      wanted: the model's variables by path.
      source: the array of each, by the same path. Floating-point dtypes are converted to the model's.
      mesh: the mesh.
      checkpoint: names the checkpoint in messages.

    Returns:
      {path: array at its padded shape}, with zeros in the padding.

    Raises:
      PaxMismatchError: Pax's padding holds something else than zeros.
      PaxDamagedError, CheckpointReadError: an array can't be read.
    """
    shardings = named_shardings(dict(wanted), mesh)
    result, faults, read_bytes = {}, [], 0
    for number, reading in enumerate(_read_ahead(wanted, source, shardings)):
        spec = wanted[reading.path]
        result[reading.path] = _placed(reading, spec, shardings[reading.path])
        read_bytes += reading.nbytes
        if read_bytes > _TRIM_BYTES:
            trim_memory()
            read_bytes = 0
        # Together the processes check all variables.
        if number % jax.process_count() == jax.process_index() and (fault := _padding_fault(reading, spec)):
            faults.append(fault)
    if faults:
        raise PaxMismatchError(_explain(faults, checkpoint))
    return result


def _read_ahead(
    wanted: Mapping[str, VariableSpec], source: Mapping[str, PaxArray], shardings: Mapping[str, NamedSharding]
) -> Iterator[_Reading]:
    """Yields each variable; the next ones are being read meanwhile, as far as memory allows."""
    ahead: collections.deque[_Reading] = collections.deque()
    pending = 0
    for path, spec in wanted.items():
        reading = _start(path, spec, source[path], shardings[path])
        while ahead and pending + reading.nbytes > _AHEAD_BYTES:
            pending -= ahead[0].nbytes
            yield ahead.popleft()
        ahead.append(reading)
        pending += reading.nbytes
    yield from ahead


def _start(path: str, spec: VariableSpec, array: PaxArray, sharding: NamedSharding) -> _Reading:
    bounds = set(logical_bounds(spec, sharding).values())
    nbytes = sum(map(num_elements, bounds)) * array.dtype.itemsize
    if array.reads_whole:
        return _Reading(path, array, {}, nbytes)
    parts = {b: array.start_reading(_slices(b)) for b in bounds if num_elements(b)}
    return _Reading(path, array, parts, nbytes)


def _placed(reading: _Reading, spec: VariableSpec, sharding: NamedSharding) -> jax.Array:
    """Puts a variable on this process's devices."""
    shape = sharding.shard_shape(spec.padded_shape)
    whole = (
        reading.array.start_reading(_slices([(0, n) for n in spec.logical_shape]))()
        if reading.array.reads_whole
        else None
    )
    by_bounds: dict[Bounds, list[jax.Device]] = collections.defaultdict(list)
    for device, bounds in logical_bounds(spec, sharding).items():
        by_bounds[bounds].append(device)
    shards = []
    for bounds, devices in by_bounds.items():
        if whole is not None:
            part = whole[_slices(bounds)]
        elif bounds in reading.parts:
            part = reading.parts.pop(bounds)()
        else:
            part = np.zeros([stop - start for start, stop in bounds], spec.dtype)
        shards += [jax.device_put(host, device) for host in [_padded(part, shape, spec.dtype)] for device in devices]
    return jax.make_array_from_single_device_arrays(spec.padded_shape, sharding, shards)


def _padded(part: npt.NDArray[Any], shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Returns a shard of this shape: the logical part, then zeros."""
    if part.shape == shape:
        return np.asarray(part, dtype, order="C")
    shard = np.zeros(shape, dtype)
    shard[tuple(slice(0, size) for size in part.shape)] = part
    return shard


def _slices(bounds: Any) -> Index:
    return tuple(slice(start, stop) for start, stop in bounds)


def _padding_fault(reading: _Reading, spec: VariableSpec) -> str | None:
    """Returns what Pax's padding of a variable holds besides zeros, or None."""
    array, logical = reading.array, spec.logical_shape
    for dim, (size, stored) in enumerate(zip(logical, array.stored_shape, strict=True)):
        if size == stored:
            continue
        slab = [slice(0, n) for n in array.stored_shape]
        slab[dim] = slice(size, stored)
        found = np.argwhere(array.start_reading(tuple(slab))() != 0)
        if len(found):
            position = found[0] + np.array([s.start for s in slab])
            return (
                f"{reading.path}: stored {array.stored_shape}, in the model {tuple(logical)}; outside of that, {len(found)} "
                f"values are not zero, the first at {[int(i) for i in position]}"
            )
    return None


def _explain(faults: list[str], checkpoint: str) -> str:
    lines = [f"{checkpoint} does not fit the model: the padding of these variables is not zero:"]
    lines += mismatch.first_lines([f"  {fault}" for fault in faults])
    lines.append("Either the model's variables are smaller than the saved ones, or the checkpoint is damaged.")
    return "\n".join(lines)
