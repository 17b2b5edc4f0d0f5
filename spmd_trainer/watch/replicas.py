"""Finds devices whose copy of a value differs from the others': a chip that computes or stores wrong numbers.

Several devices hold the same part of a variable: all of them if it is replicated, otherwise those along the axes that don't split
it. Their bits must be equal, because they ran the same program. Each device computes a checksum of the bits that it holds, in one
program; the host compares the checksums of equal parts.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmd_trainer.checkpointing.checksums import bits_checksum
from spmd_trainer.sharding.messages import named_text

# The two halves of `bits_checksum`.
DeviceChecksum: TypeAlias = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Difference:
    """Copies of one part of a variable that differ.

    Attributes:
      path: the variable's.
      devices: the devices with other bits than most; all that hold the part if no bits are in the majority.
      others: the devices that most have the same bits on; empty if no bits are in the majority.
    """

    path: str
    devices: Sequence[jax.Device]
    others: Sequence[jax.Device]

    def __str__(self) -> str:
        named = named_text([device_text(device) for device in self.devices], "device")
        if not self.others:
            return f"{self.path}: the copies on {named} differ from each other"
        return f"{self.path}: the copy on {named} differs from that on {', '.join(map(device_text, self.others))}"


def differences(arrays: Mapping[str, jax.Array]) -> list[Difference]:
    """Returns where copies differ. Called by every process; all of them get the same result.

    Args:
      arrays: by path, with NamedShardings on one mesh.
    """
    sums = device_checksums(arrays)
    found = []
    for path, x in arrays.items():
        for devices in _holders(x):
            by_sum = collections.defaultdict(list)
            for device in devices:
                by_sum[sums[path][device]].append(device)
            if len(by_sum) > 1:
                found.append(_difference(path, list(by_sum.values())))
    return found


def device_checksums(arrays: Mapping[str, jax.Array]) -> dict[str, dict[jax.Device, DeviceChecksum]]:
    """Returns the checksum of the bits that each device holds of each array. Waits for the devices.

    Called by every process; all of them get the same result.

    Args:
      arrays: by path, with NamedShardings on one mesh.

    Returns:
      {path: {device: checksum}}, for all devices of the mesh.
    """
    if not arrays:
        return {}
    shardings = [cast(NamedSharding, x.sharding) for x in arrays.values()]
    mesh = cast(Mesh, shardings[0].mesh)
    sums = _checksums(mesh, tuple(sharding.spec for sharding in shardings))(tuple(arrays.values()))
    by_device = np.asarray(sums.addressable_data(0)).tolist()
    return {
        path: {device: tuple(by_device[row][number]) for row, device in enumerate(mesh.devices.flat)}
        for number, path in enumerate(arrays)
    }


def _difference(path: str, groups: list[list[jax.Device]]) -> Difference:
    groups.sort(key=len, reverse=True)
    has_majority = len(groups[0]) > len(groups[1])
    wrong = groups[1:] if has_majority else groups
    return Difference(path, [device for group in wrong for device in group], groups[0] if has_majority else [])


def _holders(x: jax.Array) -> list[list[jax.Device]]:
    """Returns the devices that hold each part of an array."""
    parts = collections.defaultdict(list)
    for device, index in x.sharding.devices_indices_map(x.shape).items():
        parts[tuple(part.indices(size) for part, size in zip(index, x.shape, strict=True))].append(device)
    return list(parts.values())


@functools.lru_cache(maxsize=8)
def _checksums(mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> jax.stages.Wrapped:
    """Returns a jitted function: arrays -> uint32 [devices, arrays, 2], which every process can read."""

    def local(arrays: Sequence[jax.Array]) -> jax.Array:
        sums = jax.numpy.stack([bits_checksum(x) for x in arrays])
        gathered: jax.Array = lax.all_gather(sums, mesh.axis_names)
        return gathered

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec(), check_vma=False)
    return jax.jit(mapped, out_shardings=NamedSharding(mesh, PartitionSpec()))


def device_text(device: jax.Device) -> str:
    """Returns a device's number, kind and process, for messages."""
    return f"{device.id} ({device.device_kind}, process {device.process_index})"
