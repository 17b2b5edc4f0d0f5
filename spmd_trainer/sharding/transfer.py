"""Moves an array from one sharding to another by the first of these ways that is possible:

- On Pathways (`pathwaysutils` installed, proxy platform in use), the Pathways transfer engine moves arrays.
- Among the same devices in the same order, one compiled program moves the array, unless its temporaries are larger than one
  shard. (They are larger if the compiler gathers the array.)
- If the array is on the devices of several processes, `jax.device_put` moves it. It must stay on the same devices.
- If the target's devices need exactly the shards of the source, each shard is copied from device to device.
- Otherwise, each target shard is assembled in host memory from the source shards that overlap it, so devices hold only source
  and target shards. (`jax.device_put` would fetch the whole array.)
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from spmd_trainer.sharding.host_devices import finish_on_host_devices
from spmd_trainer.sharding.intermediate_sharding import Intermediate

Bounds = tuple[tuple[int, int], ...]


@dataclasses.dataclass
class Plans:
    """Caches of compiled programs and intermediate shardings, for one call of `reshard` or for all calls.

    Attributes:
      kept: True if the caches are kept after the call.
      programs: {(shape, dtype, source, target, donation): compiled program}; None for a program that needs too much memory.
      intermediates: {(source, target): intermediate sharding}; None if there is none.
    """

    kept: bool = False
    programs: dict[Any, Callable[[jax.Array], jax.Array] | None] = dataclasses.field(default_factory=dict)
    intermediates: dict[tuple[Sharding, Sharding], Intermediate | None] = dataclasses.field(default_factory=dict)

    def program(self, x: jax.Array, sharding: Sharding, donate: bool) -> Callable[[jax.Array], jax.Array] | None:
        """Returns the program that moves `x` to `sharding` on the same devices; None if it needs too much memory."""
        key = (x.shape, x.dtype, x.sharding, sharding, donate)
        if key not in self.programs:
            self.programs[key] = _compile(x, sharding, donate)
        return self.programs[key]


def on_pathways() -> bool:
    """Returns True if JAX uses the Pathways proxy, and the package `pathwaysutils` is installed, which moves arrays there."""
    platforms = (jax.config.jax_platforms or "").split(",")  # type: ignore[attr-defined]
    return "proxy" in platforms and importlib.util.find_spec("pathwaysutils") is not None


def move(
    arrays: Sequence[jax.Array],
    shardings: Sequence[Sharding],
    donate: Sequence[bool],
    may_alias: bool | None,
    plans: Plans,
) -> list[jax.Array]:
    """Moves each array to its sharding, on any backend.

    Args:
      arrays: jax.Arrays that are not deleted. An array on several processes' devices can only move among its devices.
      shardings: one target sharding per array, which must shard the array evenly.
      donate: one bool per array: True deletes the array's buffers.
      may_alias: False keeps results from sharing their sources' buffers. None or True: arrays that need not move may share them.
      plans: the caches of compiled programs; new programs are added to them.

    Returns:
      The arrays with their new shardings.
    """
    if not on_pathways():
        return move_here(arrays, shardings, donate, may_alias, plans)
    engine = importlib.import_module("pathwaysutils.experimental.reshard").reshard
    moved: dict[int, jax.Array] = {}
    for given in (True, False):  # the engine donates either all arrays of a call or none
        chosen = [i for i, donated in enumerate(donate) if donated is given]
        if chosen:
            results = engine(
                [arrays[i] for i in chosen],
                [shardings[i] for i in chosen],
                donate=given,
                may_alias=may_alias,
                cache_resharding_plans=plans.kept,
            )
            moved.update(zip(chosen, results, strict=True))
    return [moved[i] for i in range(len(arrays))]


def move_here(
    arrays: Sequence[jax.Array],
    shardings: Sequence[Sharding],
    donate: Sequence[bool],
    may_alias: bool | None,
    plans: Plans,
) -> list[jax.Array]:
    """Does the same as `move`, without Pathways."""
    return [_move(*each, may_alias, plans) for each in zip(arrays, shardings, donate, strict=True)]


def _move(x: jax.Array, sharding: Sharding, donate: bool, may_alias: bool | None, plans: Plans) -> jax.Array:
    if x.sharding.is_equivalent_to(sharding, x.ndim) and not donate and may_alias is not False:
        committed: jax.Array = jax.device_put(x, sharding)  # with the target's axis names
        return committed
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):  # PRNG keys are small and have no NumPy form
        return _put(x, sharding, donate, may_alias)
    if _device_order(x.sharding) == _device_order(sharding):
        program = plans.program(x, sharding, donate)
        if program is not None:
            return _used_up(x, finish_on_host_devices(program(x)), donate)
    if not x.is_fully_addressable:
        return _put(x, sharding, donate, may_alias)
    shards, wanted = _shards(x), _wanted(x.shape, sharding)
    if set(wanted.values()) <= shards.keys():
        pieces = _copy_shards(shards, wanted, sharding, copy=donate or may_alias is False)
    else:
        pieces = _assemble(x, shards, wanted, sharding)
    moved: jax.Array = jax.make_array_from_single_device_arrays(x.shape, sharding, pieces, dtype=x.dtype)
    return _used_up(x, moved, donate)


def _put(x: jax.Array, sharding: Sharding, donate: bool, may_alias: bool | None) -> jax.Array:
    moved = jax.device_put(x, sharding, may_alias=False if donate else may_alias)
    return _used_up(x, finish_on_host_devices(moved), donate)


def _used_up(x: jax.Array, moved: jax.Array, donate: bool) -> jax.Array:
    """Returns `moved`. If `donate`, deletes `x`, because JAX keeps a donated array whose buffers the program did not reuse."""
    if donate and not x.is_deleted():
        x.delete()
    return moved


def _compile(x: jax.Array, sharding: Sharding, donate: bool) -> Callable[[jax.Array], jax.Array] | None:
    """Returns a program that moves an array like `x` to `sharding`; None if its temporaries are larger than a shard."""
    shard_shapes = x.sharding.shard_shape(x.shape), sharding.shard_shape(x.shape)
    reuse = donate and shard_shapes[0] == shard_shapes[1]
    compiled = jax.jit(_identity, out_shardings=sharding, donate_argnums=0 if reuse else ()).lower(x).compile()
    memory = compiled.memory_analysis()
    room = max(map(math.prod, shard_shapes)) * x.dtype.itemsize
    if memory is not None and memory.temp_size_in_bytes > room:
        return None
    return compiled


def _identity(x: jax.Array) -> jax.Array:
    return x


def _device_order(sharding: Sharding) -> tuple[jax.Device, ...]:
    if isinstance(sharding, NamedSharding):
        return tuple(sharding.mesh.devices.flat)
    return tuple(sorted(sharding.device_set, key=lambda device: device.id))


def _shards(x: jax.Array) -> dict[Bounds, list[jax.Array]]:
    """Returns {bounds of a shard: list of its copies} for the distinct shards on this process's devices."""
    shards: dict[Bounds, list[jax.Array]] = {}
    for shard in x.addressable_shards:
        shards.setdefault(_bounds(shard.index, x.shape), []).append(shard.data)
    return shards


def _wanted(shape: tuple[int, ...], sharding: Sharding) -> dict[jax.Device, Bounds]:
    indices = sharding.addressable_devices_indices_map(shape)
    return {device: _bounds(index, shape) for device, index in indices.items()}


def _bounds(index: Any, shape: tuple[int, ...]) -> Bounds:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _copy_shards(
    shards: dict[Bounds, list[jax.Array]], wanted: dict[jax.Device, Bounds], sharding: Sharding, copy: bool
) -> list[jax.Array]:
    """Returns each device's target shard: its own copy if it has one, else copied from the devices that have one, in turn."""
    chosen = []
    for turn, (device, bounds) in enumerate(wanted.items()):
        holders = shards[bounds]
        here = [data for data in holders if data.device == device]
        chosen.append(here[0] if here else holders[turn % len(holders)])
    targets = [SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in wanted]
    copies: list[jax.Array] = jax.device_put(chosen, targets, may_alias=False if copy else None)
    return copies


def _assemble(
    x: jax.Array, shards: dict[Bounds, list[jax.Array]], wanted: dict[jax.Device, Bounds], sharding: Sharding
) -> list[jax.Array]:
    """Returns each device's target shard, assembled in host memory from the source shards that overlap it."""

    @functools.cache
    def on_host(bounds: Bounds) -> np.ndarray:
        shard = shards[bounds][0]
        # A jax.Array caches the host copy that np.asarray makes. Copy from a temporary array, so that the cache is freed.
        short_lived = jax.make_array_from_single_device_arrays(shard.shape, shard.sharding, [shard], dtype=shard.dtype)
        return np.asarray(short_lived)

    holders: dict[Bounds, list[jax.Device]] = {}
    for device, bounds in wanted.items():
        holders.setdefault(bounds, []).append(device)
    pieces: dict[jax.Device, jax.Array] = {}
    for bounds, devices in holders.items():
        piece = np.empty([stop - start for start, stop in bounds], x.dtype)
        for have in shards:
            both = [(max(w[0], h[0]), min(w[1], h[1])) for w, h in zip(bounds, have, strict=True)]
            if all(start < stop for start, stop in both):
                piece[_slices(both, bounds)] = on_host(have)[_slices(both, have)]
        targets = [SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in devices]
        pieces.update(zip(devices, jax.device_put([piece] * len(targets), targets), strict=True))
    return [pieces[device] for device in wanted]


def _slices(part: Sequence[tuple[int, int]], within: Bounds) -> tuple[slice, ...]:
    """Returns the slices that cut the bounds `part` out of an array that covers the bounds `within`."""
    return tuple(slice(p[0] - w[0], p[1] - w[0]) for p, w in zip(part, within, strict=True))
