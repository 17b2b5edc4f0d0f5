"""Finds an intermediate sharding for moves between two meshes: on the source's devices, with the target's number of shards.

An array can move from 8 shards to 4 different shards without a full gather: pairs of devices first merge their shards, so each
merged shard is on two devices. Then one of the two copies of each merged shard moves. The idea was published in pathwaysutils
(`pathwaysutils/experimental/reshard.py`); `find_intermediate_sharding` and its errors have the same names there. The
intermediate sharding has as many shards as the target, but along dimensions that the source shards. Devices that merge shards
are neighbors along a mesh axis of the source, so the merge is one gather among them. Other axes do not change.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from spmd_trainer.sharding.messages import mesh_text, spec_text
from spmd_trainer.sharding.specs import axes_by_dim, mesh_shape_of, shard_counts

SPLIT_SUFFIX = "_intermediate_split"
REPLICA_SUFFIX = "_intermediate_replica"


class NoIntermediateShardingError(ValueError):
    """Raised if there is no intermediate sharding on the source's devices."""


class NoIntermediateShardingNeededError(NoIntermediateShardingError):
    """Raised if source and target shard the same dimension, so that the array can move directly."""


@dataclasses.dataclass(frozen=True)
class Intermediate:
    """A sharding through which an array moves from a source to a target on different meshes (see the module), in two forms.

    Attributes:
      sharding: the form that is returned to callers, with the replica axes first.
      replica_axes: the names of the replica axes.
      in_order: a sharding with the same shards on the same devices, but in the device order of the source mesh. Compiled
        programs that move arrays from the source need this order.
    """

    sharding: NamedSharding
    replica_axes: tuple[str, ...]
    in_order: NamedSharding


def find_intermediate_sharding(in_sharding: Sharding, out_sharding: Sharding) -> tuple[NamedSharding, list[str]]:
    """Returns a sharding on the source's devices with as many distinct shards as the target, each shard on several devices.

    Example, with meshes as [fsdp, tp]: from [8, 1] with P('fsdp', None) to [1, 4] with P(None, 'tp'), the result is the
    mesh (fsdp_intermediate_replica=2, fsdp_intermediate_split=4, tp=1) with P('fsdp_intermediate_split', None): 4 shards,
    two copies of each. One copy (`split_by_mesh_axis` over the replica axes extracts it) can then move to the target.

    Published as `pathwaysutils.experimental.reshard.find_intermediate_sharding`.

    Args:
      in_sharding: the array's sharding: a NamedSharding on a mesh of devices.
      out_sharding: the sharding to move to. P('x') and P('x', None) mean the same.

    Returns:
      The sharding and the names of its replica axes. The replica axes come first in its mesh. The other axes follow in the
      source's order, and a device keeps its coordinate along each axis that is not divided.

    Raises:
      NoIntermediateShardingNeededError: source and target shard the same dimension.
      NoIntermediateShardingError: the source does not have several times as many shards as the target, or its axes cannot
        be divided accordingly, or one of the two is not a NamedSharding.
    """
    found = plan_intermediate(in_sharding, out_sharding)
    return found.sharding, list(found.replica_axes)


def plan_intermediate(in_sharding: Sharding, out_sharding: Sharding) -> Intermediate:
    """Does the same as `find_intermediate_sharding`, but returns both forms of the intermediate sharding."""
    source, target = _on_devices(in_sharding), _on_devices(out_sharding)
    rank = max(len(source.spec), len(target.spec))
    source_counts = shard_counts(source.spec, rank, _shape(source))
    target_counts = shard_counts(target.spec, rank, _shape(target))
    pair = f"{spec_text(source.spec)} on {mesh_text(_shape(source))} to {spec_text(target.spec)} on "
    pair += f"{mesh_text(_shape(target))}: {math.prod(source_counts)} shards {source_counts} to {target_counts}"
    copies, rest = divmod(math.prod(source_counts), math.prod(target_counts))
    if rest or copies <= 1:
        raise NoIntermediateShardingError(
            f"{pair}. Only a source with several times as many shards as its target has an intermediate sharding. "
            "Move it directly (`reshard`)."
        )
    if any(math.gcd(*counts) > 1 for counts in zip(source_counts, target_counts, strict=True)):
        raise NoIntermediateShardingNeededError(
            f"{pair}. Both split the same dimension, so no intermediate sharding is needed. Move it directly (`reshard`)."
        )
    merged = _merged_axes(axes_by_dim(source.spec, rank), _shape(source), copies)
    if merged is None:
        raise NoIntermediateShardingError(
            f"{pair}. No axes of the source can be split so that {copies} neighbours merge their shards. Move it "
            "directly (`reshard`)."
        )
    return _build(source, rank, merged)


def _merged_axes(
    axes_of_dims: tuple[tuple[str, ...], ...], sizes: dict[str, int], copies: int
) -> dict[str, int] | None:
    """Returns {mesh axis: how many neighbors along it merge their shards}; the product is `copies`. None if impossible.

    Neighbors along the last of a dimension's axes have neighboring shards. So devices merge along an earlier axis only if all
    devices along the later axes merge.
    """
    merged: dict[str, int] = {}
    for axes in axes_of_dims:
        for axis in reversed(axes):
            factor = math.gcd(copies, sizes[axis])
            if factor > 1:
                merged[axis] = factor
                copies //= factor
            if factor < sizes[axis]:
                break
    return merged if copies == 1 else None


def _build(source: NamedSharding, rank: int, merged: dict[str, int]) -> Intermediate:
    """Returns the intermediate sharding. Each axis in `merged` becomes a split axis and a replica axis."""
    names: list[str] = []
    sizes: list[int] = []
    split_name: dict[str, str] = {}
    replica_axes: list[str] = []
    taken = [axis for axis in _shape(source) if axis not in merged]
    for axis, size in _shape(source).items():
        if axis not in merged:
            names.append(axis)
            sizes.append(size)
            continue
        split_name[axis] = _free_name(axis + SPLIT_SUFFIX, taken)
        replica_axes.append(_free_name(axis + REPLICA_SUFFIX, taken))
        names += [split_name[axis], replica_axes[-1]]
        sizes += [size // merged[axis], merged[axis]]
    entries = [tuple(split_name.get(axis, axis) for axis in axes) for axes in axes_by_dim(source.spec, rank)]
    spec = PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in entries))
    devices = np.asarray(source.mesh.devices).reshape(sizes)
    order = [names.index(axis) for axis in replica_axes]
    order += [i for i in range(len(names)) if i not in order]

    def sharding(mesh: Mesh) -> NamedSharding:
        return NamedSharding(mesh, spec, memory_kind=source.memory_kind)

    given_out = Mesh(devices.transpose(order), [names[i] for i in order])
    return Intermediate(sharding(given_out), tuple(replica_axes), sharding(Mesh(devices, names)))


def _on_devices(sharding: Sharding) -> NamedSharding:
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return sharding
    raise NoIntermediateShardingError(
        f"An intermediate sharding needs two NamedShardings on devices, and {sharding!r} is not one. Move the array "
        "directly with `reshard`, which takes any two shardings."
    )


def _free_name(name: str, taken: list[str]) -> str:
    while name in taken:
        name += "_"
    return name


def _shape(sharding: NamedSharding) -> dict[str, int]:
    return mesh_shape_of(sharding.mesh)
