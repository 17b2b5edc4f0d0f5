"""How an array's bytes get from one sharding to another, on whichever backend there is: the one place that chooses.

- On Pathways (`pathwaysutils` installed, the proxy platform in use), its transfer engine moves arrays.
- Among the same devices in the same order, one compiled program, unless the compiler would gather: its temporaries are
  asked for first, and more than one shard's worth is too much.
- To other devices that want the very shards there are, each shard is copied from device to device.
- Everything else goes shard by shard: each target shard is put together in host memory from the source shards that it
  overlaps, so that devices hold source and target and nothing else. (`jax.device_put` fetches the whole array.)
- What several processes hold has no way but `jax.device_put`, among the same devices.
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
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from spmd_trainer.sharding.intermediate_sharding import Intermediate

Bounds = tuple[tuple[int, int], ...]


@dataclasses.dataclass
class Plans:
    """What was decided and compiled, so that like arrays share it: of one call, or kept from call to call.

    Attributes:
      kept: whether it outlives the call.
      programs: by shape, dtype, source, target and donation; None: too large a program.
      intermediates: by source and target; None: there is none.
    """

    kept: bool = False
    programs: dict[Any, Callable[[jax.Array], jax.Array] | None] = dataclasses.field(default_factory=dict)
    intermediates: dict[tuple[Sharding, Sharding], Intermediate | None] = dataclasses.field(default_factory=dict)

    def program(self, x: jax.Array, sharding: Sharding, donate: bool) -> Callable[[jax.Array], jax.Array] | None:
        """The program that takes `x` to `sharding` on the same devices; None where it needs too much room."""
        key = (x.shape, x.dtype, x.sharding, sharding, donate)
        if key not in self.programs:
            self.programs[key] = _compile(x, sharding, donate)
        return self.programs[key]


def on_pathways() -> bool:
    """Whether JAX talks to devices through Pathways' proxy, and `pathwaysutils` is there to move arrays on it."""
    platforms = (jax.config.jax_platforms or "").split(",")  # type: ignore[attr-defined]
    return "proxy" in platforms and importlib.util.find_spec("pathwaysutils") is not None


def move(
    arrays: Sequence[jax.Array],
    shardings: Sequence[Sharding],
    donate: Sequence[bool],
    may_alias: bool | None,
    plans: Plans,
) -> list[jax.Array]:
    """Moves each array to its sharding, on whichever backend there is.

    Args:
      arrays: living jax.Arrays. One that other processes share can only go to a sharding of the same devices.
      shardings: where to, one each; they divide their arrays.
      donate: whether the array's buffers may be used up, and are deleted; one each.
      may_alias: False: no result shares a buffer with its source. None and True: it may where nothing needs to move.
      plans: compiled programs to use and to add to.

    Returns:
      The arrays on their shardings.
    """
    if not on_pathways():
        return move_here(arrays, shardings, donate, may_alias, plans)
    engine = importlib.import_module("pathwaysutils.experimental.reshard").reshard
    moved: dict[int, jax.Array] = {}
    for given in (True, False):  # the engine donates all of a call's arrays or none
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
    """`move` by JAX's own means."""
    return [_move(*each, may_alias, plans) for each in zip(arrays, shardings, donate, strict=True)]


def _move(x: jax.Array, sharding: Sharding, donate: bool, may_alias: bool | None, plans: Plans) -> jax.Array:
    """`move_here` of one array."""
    if x.sharding.is_equivalent_to(sharding, x.ndim) and not donate and may_alias is not False:
        return jax.device_put(x, sharding)  # commits it, and gives it the target's axis names
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):  # PRNG keys are small and have no host form
        return _put(x, sharding, donate, may_alias)
    if _device_order(x.sharding) == _device_order(sharding):
        program = plans.program(x, sharding, donate)
        if program is not None:
            return _used_up(x, program(x), donate)
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
    """`move_here` by `jax.device_put`."""
    return _used_up(x, jax.device_put(x, sharding, may_alias=False if donate else may_alias), donate)


def _used_up(x: jax.Array, moved: jax.Array, donate: bool) -> jax.Array:
    """`moved`, with its source deleted if that was asked for: JAX leaves it alive where it had no use for its buffers."""
    if donate and not x.is_deleted():
        x.delete()
    return moved


def _compile(x: jax.Array, sharding: Sharding, donate: bool) -> Callable[[jax.Array], jax.Array] | None:
    """The identity from x's sharding to `sharding`; None if it needs more room than one more shard."""
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


def _device_order(sharding: Sharding) -> tuple[Any, ...]:
    """The devices in the order in which a compiled program counts them."""
    if isinstance(sharding, NamedSharding):
        return tuple(sharding.mesh.devices.flat)
    return tuple(sorted(sharding.device_set, key=lambda device: device.id))


def _shards(x: jax.Array) -> dict[Bounds, list[jax.Array]]:
    """The different shards of an array, each with its copies on the devices."""
    shards: dict[Bounds, list[jax.Array]] = {}
    for shard in x.addressable_shards:
        shards.setdefault(_bounds(shard.index, x.shape), []).append(shard.data)
    return shards


def _wanted(shape: tuple[int, ...], sharding: Sharding) -> dict[Any, Bounds]:
    """Which part of an array each device of a sharding is to hold."""
    indices = sharding.addressable_devices_indices_map(shape)
    return {device: _bounds(index, shape) for device, index in indices.items()}


def _bounds(index: Any, shape: tuple[int, ...]) -> Bounds:
    """(start, stop) in each dimension."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _copy_shards(
    shards: dict[Bounds, list[jax.Array]], wanted: dict[Any, Bounds], sharding: Sharding, copy: bool
) -> list[jax.Array]:
    """Each device's shard, from that device where it has it, else from the holders in turn."""
    chosen = []
    for turn, (device, bounds) in enumerate(wanted.items()):
        holders = shards[bounds]
        here = [data for data in holders if data.device == device]
        chosen.append(here[0] if here else holders[turn % len(holders)])
    places = [SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in wanted]
    return jax.device_put(chosen, places, may_alias=False if copy else None)


def _assemble(
    x: jax.Array, shards: dict[Bounds, list[jax.Array]], wanted: dict[Any, Bounds], sharding: Sharding
) -> list[jax.Array]:
    """Each device's shard, put together in host memory from the source shards that it overlaps, one after the other."""

    @functools.cache
    def on_host(bounds: Bounds) -> np.ndarray:
        shard = shards[bounds][0]
        # An array keeps the host copy that it has given out as long as it lives; this one lives no longer than needed.
        short_lived = jax.make_array_from_single_device_arrays(shard.shape, shard.sharding, [shard], dtype=shard.dtype)
        return np.asarray(short_lived)

    holders: dict[Bounds, list[Any]] = {}
    for device, bounds in wanted.items():
        holders.setdefault(bounds, []).append(device)
    pieces: dict[Any, jax.Array] = {}
    for bounds, devices in holders.items():
        piece = np.empty([stop - start for start, stop in bounds], x.dtype)
        for have in shards:
            both = [(max(w[0], h[0]), min(w[1], h[1])) for w, h in zip(bounds, have, strict=True)]
            if all(start < stop for start, stop in both):
                piece[_slices(both, bounds)] = on_host(have)[_slices(both, have)]
        places = [SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in devices]
        pieces.update(zip(devices, jax.device_put([piece] * len(places), places), strict=True))
    return [pieces[device] for device in wanted]


def _slices(part: Sequence[tuple[int, int]], within: Bounds) -> tuple[slice, ...]:
    """`part` of an array, counted from the start of `within`."""
    return tuple(slice(p[0] - w[0], p[1] - w[0]) for p, w in zip(part, within, strict=True))
