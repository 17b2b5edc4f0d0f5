"""What readers of other trainers' checkpoints need to fill shards: which part of a variable each shard holds, and memory."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
from jax.sharding import NamedSharding

from spmd_trainer.sharding.variables import VariableSpec

# (start, stop) of each dimension.
Bounds: TypeAlias = tuple[tuple[int, int], ...]


def logical_bounds(spec: VariableSpec, sharding: NamedSharding) -> dict[jax.Device, Bounds]:
    """Returns what the shard of each of this process's devices holds of a variable, without padding."""
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
    """Returns how many elements lie within bounds."""
    return math.prod(stop - start for start, stop in bounds)


def trim_memory() -> None:
    """Gives freed memory back to the operating system, where the C library is glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
