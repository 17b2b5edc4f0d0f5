"""Device meshes from axis names and sizes, within one slice and across several.

Every mesh made here has Auto axes: the compiler places what the user leaves open. (`jax.make_mesh` gives Explicit axes,
on which constraints written for Auto ones raise.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from spmd_trainer.sharding.messages import count_text, mesh_text

REST = -1


def create_device_mesh(
    config_mesh: Sequence[tuple[str, int]],
    *,
    devices: Sequence[Any] | None = None,
    allow_split_physical_axes: bool = False,
) -> Mesh:
    """A mesh over all of `devices`, e.g. `create_device_mesh([('data', -1), ('mdl', 2)])`: 4 x 2 on 8 devices.

    Args:
      config_mesh: (axis name, size) from the outermost axis to the innermost, i.e. by growing need for a fast network.
        One size may be -1: the rest of the devices.
      devices: the devices to use, all of them; default `jax.devices()`.
      allow_split_physical_axes: whether one axis of a TPU's torus may be shared by several mesh axes.

    Returns:
      A mesh with Auto axes whose sizes multiply to the number of devices.

    Raises:
      ValueError: no axis, a name given twice, a size that is no positive number, two sizes of -1, sizes whose product
        is not the number of devices (the message names sizes that fit), or a TPU topology that cannot be cut that way.
    """
    names, sizes = _parse_config(config_mesh)
    devices = list(jax.devices() if devices is None else devices)
    sizes = _resolve_sizes(names, sizes, len(devices))
    array = _arrange(sizes, devices, names, allow_split_physical_axes)
    return Mesh(array, names, axis_types=(AxisType.Auto,) * len(names))


def create_hybrid_mesh(
    ici: Sequence[int],
    dcn: Sequence[int] | None,
    names: Sequence[str],
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A mesh over several slices or hosts, e.g. `create_hybrid_mesh([1, 4], [2, 1], ['data', 'mdl'])`: 2 x 4.

    Each axis is `dcn[i] * ici[i]` long: neighbours along it share a slice in runs of `ici[i]`, so that only the outer
    part of an axis crosses the slow network. Slices are told apart by the devices' `slice_index`; where there is only
    one, by process; where there is only one process (host devices), by cutting the devices into equal runs in their
    order.

    Args:
      ici: size of each axis within a slice. One size of `ici` or `dcn` may be -1: what is left.
      dcn: size of each axis across slices; None or all 1 gives the plain mesh of `ici`.
      names: axis names.
      devices: the devices to use, all of them; default `jax.devices()`.

    Returns:
      A mesh with Auto axes of sizes `ici[i] * dcn[i]`.

    Raises:
      ValueError: what `create_device_mesh` raises, `ici`, `dcn` and `names` of unequal length, or a `dcn` part that
        would cut through a slice.
    """
    dcn = (1,) * len(tuple(names)) if dcn is None else tuple(dcn)
    if not len(tuple(ici)) == len(dcn) == len(tuple(names)):
        raise ValueError(
            f"ici={list(ici)}, dcn={list(dcn)} and names={list(names)} must be equally long, one entry per mesh axis."
        )
    if all(size == 1 for size in dcn):
        return create_device_mesh(list(zip(names, ici, strict=True)), devices=devices)
    names, ici_sizes = _parse_config(list(zip(names, ici, strict=True)))
    _, dcn_sizes = _parse_config(list(zip(names, dcn, strict=True)))
    devices = list(jax.devices() if devices is None else devices)
    labels = [f"dcn {name}" for name in names] + [f"ici {name}" for name in names]
    sizes = _resolve_sizes(labels, dcn_sizes + ici_sizes, len(devices))
    dcn_sizes, ici_sizes = sizes[: len(names)], sizes[len(names) :]
    granules = _granules(devices, dict(zip(names, dcn_sizes, strict=True)))
    blocks = np.stack([_arrange(ici_sizes, granule, names, False) for granule in granules])
    # (dcn..., ici...) -> (dcn0, ici0, dcn1, ici1, ...) -> one axis per name, its slow part outermost.
    blocks = blocks.reshape(dcn_sizes + ici_sizes)
    order = [k for i in range(len(names)) for k in (i, i + len(names))]
    array = blocks.transpose(order).reshape([d * i for d, i in zip(dcn_sizes, ici_sizes, strict=True)])
    return Mesh(array, names, axis_types=(AxisType.Auto,) * len(names))


def fit_mesh_shape(mesh_shape: Mapping[str, int], num_devices: int, *, grow: str) -> dict[str, int]:
    """Fits a mesh to another number of devices: `fit_mesh_shape({'data': 4, 'mdl': 2}, 12, grow='data')` is 6 x 2.

    Every axis but `grow` keeps its size where it can, and otherwise gets the largest divisor of its size that fits; the last
    axis, which communicates most, is fitted first. `grow` gets the rest: on 3 devices the mesh above is 3 x 1.

    Args:
      mesh_shape: the size of each axis, outermost first. The size of `grow` may be -1.
      num_devices: the product of the sizes to return; at least 1.
      grow: the axis that takes what the others leave.

    Returns:
      The sizes by axis, in the same order; they multiply to `num_devices`.

    Raises:
      ValueError: `grow` is no axis, or `num_devices` is below 1.
    """
    if grow not in mesh_shape or num_devices < 1:
        raise ValueError(
            f"grow={grow!r} with mesh {mesh_text(mesh_shape)} on {count_text(num_devices, 'device')}: grow must be an axis of "
            "the mesh, and there must be a device."
        )
    sizes, left = dict(mesh_shape), num_devices
    for axis in reversed(sizes):
        if axis != grow:
            sizes[axis] = math.gcd(sizes[axis], left)
            left //= sizes[axis]
    return {**sizes, grow: left}


def size_problem(size: object) -> str | None:
    """Says what is wrong with one size of a mesh axis; None where it is a positive whole number, or -1 for the rest."""
    if isinstance(size, bool) or not isinstance(size, int | np.integer) or (size < 1 and size != REST):
        return f"{size!r} is no size; a size is a whole number of 1 or more, or -1 for the rest of the devices"
    return None


def _parse_config(config_mesh: Sequence[tuple[str, int]]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names and sizes, each checked by itself."""
    if isinstance(config_mesh, Mapping):
        config_mesh = list(config_mesh.items())
    entries = list(config_mesh)
    if not entries:
        raise ValueError("The mesh is empty: give at least one (axis name, size), e.g. [('data', -1)] for all devices.")
    for entry in entries:
        if isinstance(entry, str) or len(tuple(entry)) != 2 or not isinstance(entry[0], str):
            raise ValueError(f"{entry!r} is no mesh axis: write (name, size), e.g. ('data', 4).")
        if size_problem(entry[1]):
            raise ValueError(
                f"Mesh axis {entry[0]!r} has size {entry[1]!r}: a size is a positive whole number, or -1 for the rest "
                f"of the devices. The mesh asked for is {mesh_text(dict(entries))}."
            )
    names = tuple(name for name, _ in entries)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"Mesh axis {twice[0]!r} is given twice in {list(entries)}: each axis needs its own name.")
    return names, tuple(int(size) for _, size in entries)


def _resolve_sizes(names: Sequence[str], sizes: tuple[int, ...], num_devices: int) -> tuple[int, ...]:
    """Puts the rest of the devices where -1 stands, and checks the product."""
    asked = mesh_text(dict(zip(names, sizes, strict=True)))
    open_axes = [name for name, size in zip(names, sizes, strict=True) if size == REST]
    if len(open_axes) > 1:
        raise ValueError(
            f"Mesh {asked}: only one size may be -1 (the rest of the devices), and {open_axes} all are. "
            f"Give all but one a size; there are {count_text(num_devices, 'device')}."
        )
    product = math.prod(size for size in sizes if size != REST)
    if open_axes and num_devices >= product and num_devices % product == 0:
        return tuple(num_devices // product if size == REST else size for size in sizes)
    if not open_axes and product == num_devices:
        return sizes
    fits = " or ".join(mesh_text(dict(zip(names, fit, strict=True))) for fit in _nearest_sizes(sizes, num_devices))
    rest = f", which leaves no whole number for {open_axes[0]!r}" if open_axes else ""
    raise ValueError(
        f"Mesh {asked}: the sizes multiply to {product}{rest}, and there are {count_text(num_devices, 'device')}. "
        f"Sizes that fit: {fits}. To use fewer devices, pass them as `devices`."
    )


def _nearest_sizes(sizes: Sequence[int], num_devices: int, how_many: int = 2) -> list[tuple[int, ...]]:
    """The ways to write `num_devices` as that many factors that change the sizes least; -1 may become anything."""

    def distance(fit: tuple[int, ...]) -> tuple[float, int]:
        changes = [(s, f) for s, f in zip(sizes, fit, strict=True) if s not in (REST, f)]
        return sum(abs(math.log(f / s)) for s, f in changes), len(changes)

    # A size of 1 is nearly always meant; leaving those alone also keeps the search short.
    free = [i for i, size in enumerate(sizes) if size != 1] or list(range(len(sizes)))
    divisors = [d for d in range(1, num_devices + 1) if num_devices % d == 0]
    fits = []
    for factors in _factorizations(num_devices, len(free), divisors):
        fit = [1] * len(sizes)
        for i, factor in zip(free, factors, strict=True):
            fit[i] = factor
        fits.append(tuple(fit))
    return sorted(fits, key=distance)[:how_many]


def _factorizations(number: int, parts: int, divisors: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (number,)
        return
    for factor in divisors:
        if number % factor == 0:
            for rest in _factorizations(number // factor, parts - 1, divisors):
                yield (factor, *rest)


def _arrange(sizes: Sequence[int], devices: Sequence[Any], names: Sequence[str], split_axes: bool) -> np.ndarray:
    """The devices in an array of shape `sizes`, laid on the network as well as JAX knows how."""
    try:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=split_axes)
    except NotImplementedError as error:
        raise ValueError(
            f"Mesh {mesh_text(dict(zip(names, sizes, strict=True)))} cannot be laid on the network of these "
            f"{len(devices)} {devices[0].device_kind} devices without cutting through one of its axes: {error}. "
            "Pass allow_split_physical_axes=True, or choose sizes that are products of whole network axes."
        ) from error


def _granules(devices: Sequence[Any], dcn: dict[str, int]) -> list[list[Any]]:
    """The devices in as many equal groups as `dcn` has places, each within a slice (or a process, where it can be)."""
    count = math.prod(dcn.values())
    slices = [getattr(device, "slice_index", 0) for device in devices]
    keys = slices if len(set(slices)) > 1 else [device.process_index for device in devices]
    ordered = [device for _, device in sorted(zip(keys, devices, strict=True), key=lambda pair: pair[0])]
    size = len(ordered) // count
    groups = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    # Within one TPU slice there is no slow network to cross; anywhere else, one group may not cut a slice in two.
    if len(set(slices)) > 1 or devices[0].platform == "tpu":
        places = [
            {i for i, group in enumerate(groups) for d in group if getattr(d, "slice_index", 0) == s}
            for s in set(slices)
        ]
        if any(len(place) > 1 for place in places):
            raise ValueError(
                f"dcn {mesh_text(dcn)} asks for {count_text(count, 'slice')}, and the {len(devices)} devices form "
                f"{count_text(len(set(slices)), 'slice')}: an axis across slices would run inside one. Make the dcn "
                f"sizes multiply to {len(set(slices))} (or a divisor of it) and move the rest to ici."
            )
    return groups
