"""Places variables of other trainers' checkpoints on a mesh. Each process reads only its own shards, some in advance."""

from __future__ import annotations

import collections
import ctypes
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding

from spmd_trainer.sharding.variables import VariableSpec, named_shardings

# (start, stop) of each dimension.
Bounds: TypeAlias = tuple[tuple[int, int], ...]
# For a variable that is being read: waits for the shard with these logical bounds, and returns it at its padded shape.
ReadShard: TypeAlias = Callable[[Bounds], npt.NDArray[Any]]


def place(
    wanted: Mapping[str, VariableSpec],
    mesh: Mesh,
    start: Callable[[str, VariableSpec, NamedSharding], ReadShard],
    *,
    ahead_bytes: int,
    trim_bytes: int,
) -> dict[str, jax.Array]:
    """Reads variables onto a mesh. While a variable is placed, the next ones are already being read into host memory.

    Args:
      wanted: the model's variables by path.
      mesh: the mesh.
      start: (path, spec, sharding) -> a function that returns a shard. Starts to read this process' shards of a variable.
      ahead_bytes: the maximum number of bytes that are being read at a time; a larger variable is read alone.
      trim_bytes: freed memory is returned to the operating system each time that more than this many bytes have been placed.

    Returns:
      {path: array at its padded shape}.
    """
    shardings = named_shardings(dict(wanted), mesh)
    waiting: collections.deque[tuple[str, int, ReadShard]] = collections.deque()
    placed: dict[str, jax.Array] = {}
    pending = untrimmed = 0

    def place_first() -> None:
        nonlocal pending, untrimmed
        path, nbytes, read = waiting.popleft()
        placed[path] = _placed(wanted[path], shardings[path], read)
        pending, untrimmed = pending - nbytes, untrimmed + nbytes
        if untrimmed > trim_bytes:
            _trim_memory()
            untrimmed = 0

    for path, spec in wanted.items():
        held = set(logical_bounds(spec, shardings[path]).values())
        nbytes = sum(map(num_elements, held)) * spec.dtype.itemsize
        while waiting and pending + nbytes > ahead_bytes:
            place_first()
        waiting.append((path, nbytes, start(path, spec, shardings[path])))
        pending += nbytes
    while waiting:
        place_first()
    return placed


def _placed(spec: VariableSpec, sharding: NamedSharding, read: ReadShard) -> jax.Array:
    by_bounds: dict[Bounds, list[jax.Device]] = collections.defaultdict(list)
    for device, bounds in logical_bounds(spec, sharding).items():
        by_bounds[bounds].append(device)
    shards = []
    for bounds, devices in by_bounds.items():
        host = read(bounds)
        shards += [jax.device_put(host, device) for device in devices]
    return jax.make_array_from_single_device_arrays(spec.padded_shape, sharding, shards)


def logical_bounds(spec: VariableSpec, sharding: NamedSharding) -> dict[jax.Device, Bounds]:
    """Returns {device: bounds of its shard, without padding} of a variable, for the devices of this process."""
    indices: Mapping[jax.Device, Any] = sharding.addressable_devices_indices_map(spec.padded_shape)
    found = {}
    for device, index in indices.items():
        bounds = []
        for entry, size, padded in zip(index, spec.logical_shape, spec.padded_shape, strict=True):
            start, stop, _ = entry.indices(padded)
            bounds.append((min(start, size), min(stop, size)))
        found[device] = tuple(bounds)
    return found


def num_elements(bounds: Bounds) -> int:
    """Returns how many elements lie within the bounds."""
    return math.prod(stop - start for start, stop in bounds)


def _trim_memory() -> None:
    """Returns freed memory to the operating system, if the C library is glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
