"""Compares the copies of the train state on different devices every N steps (--check_replicas_every), to find a device that
computes or stores wrong numbers.

Several devices hold the same shard of a variable: all devices if the variable is replicated, otherwise the devices along the mesh
axes over which it isn't sharded. These copies must have equal bits, because the devices ran the same program. Each device
computes a checksum of its copy, and the host compares the checksums.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

import jax
import numpy as np
from absl import logging
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmd_trainer.callbacks import Callback, Run
from spmd_trainer.checkpointing.checksums import bits_checksum
from spmd_trainer.errors import UserError
from spmd_trainer.sharding.messages import named_text
from spmd_trainer.sharding.variables import named_leaves

# Maximum number of differences that an error message names.
_NAMED = 5


class ReplicaError(UserError):
    """Devices that should hold the same values hold different ones, so one of them computes or stores wrong numbers."""

    exit_status = 6


class ReplicaCheck(Callback):
    """Ends the run if devices that hold the same shard of a variable have different bits. Such a state is not saved."""

    def __init__(self, every: int):
        self._every = every
        self._checked = -1

    def asks_for_pause(self, run: Run, step: int) -> bool:
        del run
        return bool(self._every) and step % self._every == 0 and step > 0

    def on_pause(self, run: Run, step: int) -> None:
        """Compares the devices' copies if a check is due at this step and hasn't been done yet. Also called before each save.

        Raises:
          ReplicaError: copies differ. The message names the devices and the variables.
        """
        if not self.asks_for_pause(run, step) or step == self._checked:
            return
        self._checked = step
        run.begin(f"comparing the devices' copies at step {step}", part="other")
        leaves = {path: x for path, x in named_leaves(run.state) if isinstance(x.sharding, NamedSharding)}
        found = differences(leaves)
        if not found:
            return
        if not jax.process_index():
            logging.error("%d variables differ between devices at step %d", len(found), step)
        raise ReplicaError(
            f"step {step}: devices that must hold the same values don't, so one of them computes or stores wrong numbers:"
            f"{rows_text(found)}\nThe state is not saved. Take that device out, and start again: the run continues from its last "
            "checkpoint"
        )

    before_save = on_pause


def rows_text(rows: Sequence[object]) -> str:
    """Returns the first `_NAMED` rows as lines of an error message, and a line with the number of further rows."""
    more = [f"and {len(rows) - _NAMED} more"] if len(rows) > _NAMED else []
    return "".join(f"\n  {row}" for row in (*rows[:_NAMED], *more))


# The two halves of `bits_checksum`.
DeviceChecksum: TypeAlias = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Difference:
    """A shard of a variable whose copies on several devices differ.

    Attributes:
      devices: the devices outside of the largest group of equal copies. If several groups are largest, all devices with a copy.
      others: the devices in the largest group of equal copies. Empty if several groups are largest.
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
    """Returns the shards whose copies on different devices differ. All arrays must be on the same mesh.

    Must be called by every process; all processes get the same result.
    """
    sums = device_checksums(arrays)
    found = []
    for path, x in arrays.items():
        holders = collections.defaultdict(list)  # the devices that hold each part
        for device, index in x.sharding.devices_indices_map(x.shape).items():
            holders[tuple(part.indices(size) for part, size in zip(index, x.shape, strict=True))].append(device)
        for devices in holders.values():
            by_sum = collections.defaultdict(list)
            for device in devices:
                by_sum[sums[path][device]].append(device)
            groups = sorted(by_sum.values(), key=len, reverse=True)
            if len(groups) > 1:
                has_majority = len(groups[0]) > len(groups[1])
                wrong = groups[1:] if has_majority else groups
                others = groups[0] if has_majority else []
                found.append(Difference(path, [device for group in wrong for device in group], others))
    return found


def device_checksums(arrays: Mapping[str, jax.Array]) -> dict[str, dict[jax.Device, DeviceChecksum]]:
    """Returns the checksum of each device's shard of each array. Waits for the devices.

    Must be called by every process; all processes get the same result. All arrays must be on the same mesh.

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


@functools.lru_cache(maxsize=8)
def _checksums(mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> jax.stages.Wrapped:
    """Returns a jitted function: tuple of arrays -> checksum of each device's shards, uint32 [devices, arrays, 2], replicated."""

    def local(arrays: Sequence[jax.Array]) -> jax.Array:
        sums = jax.numpy.stack([bits_checksum(x) for x in arrays])
        gathered: jax.Array = lax.all_gather(sums, mesh.axis_names)
        return gathered

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec(), check_vma=False)
    return jax.jit(mapped, out_shardings=NamedSharding(mesh, PartitionSpec()))


def device_text(device: jax.Device) -> str:
    """Returns a device's number, kind and process, for messages."""
    return f"{device.id} ({device.device_kind}, process {device.process_index})"
