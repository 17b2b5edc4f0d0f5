"""Makes device meshes from axis names and sizes, within one slice and across several.

Every mesh made here has Auto axes: the compiler chooses the sharding of every value for which the user specifies none.
(`jax.make_mesh` gives Explicit axes, on which sharding constraints written for Auto axes raise an error.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from spmd_trainer.sharding.messages import count_text, mesh_text

REST = -1


def create_device_mesh(
    config_mesh: Sequence[tuple[str, int]],
    *,
    devices: Sequence[jax.Device] | None = None,
    allow_split_physical_axes: bool = False,
) -> Mesh:
    """Makes a mesh over all of `devices`: `create_device_mesh([('data', -1), ('mdl', 2)])` is 4 x 2 on 8 devices.

    Args:
      config_mesh: (axis name, size) pairs, outermost axis first. The innermost axis gets the fastest links. One size may
        be -1 for all remaining devices.
      devices: the devices, all of which are used; default `jax.devices()`.
      allow_split_physical_axes: True lets several mesh axes share one physical axis of a TPU's torus.

    Returns:
      A mesh with Auto axes whose sizes multiply to the number of devices.

    Raises:
      ValueError: there is no axis, a name occurs twice, a size is invalid, two sizes are -1, the product of the sizes is not the
        number of devices (the message names sizes that fit), or the TPU topology does not allow this mesh.
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
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Makes a mesh over several slices or hosts: `create_hybrid_mesh([1, 4], [2, 1], ['data', 'mdl'])` is 2 x 4.

    Axis i has size `dcn[i] * ici[i]`. Along this axis, each group of `ici[i]` consecutive devices is in one slice, so only
    the axis' outer part crosses the slow network. Slices are distinguished by the devices' `slice_index`. If all devices
    have the same one, each process is treated as a slice. A single process (host devices) is divided into slices of equal size.

    Args:
      ici: size of each axis within a slice. One size of `ici` or `dcn` may be -1 for all remaining devices.
      dcn: size of each axis across slices. None or all 1: the mesh has the sizes `ici`.
      names: axis names.
      devices: the devices, all of which are used; default `jax.devices()`.

    Returns:
      A mesh with Auto axes of sizes `ici[i] * dcn[i]`.

    Raises:
      ValueError: as for `create_device_mesh`; also if `ici`, `dcn` and `names` differ in length, or if `dcn` would cut
        through a slice.
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
    # (dcn..., ici...) -> (dcn0, ici0, dcn1, ici1, ...) -> one axis per name, with the slow part outermost.
    blocks = blocks.reshape(dcn_sizes + ici_sizes)
    order = [k for i in range(len(names)) for k in (i, i + len(names))]
    array = blocks.transpose(order).reshape([d * i for d, i in zip(dcn_sizes, ici_sizes, strict=True)])
    return Mesh(array, names, axis_types=(AxisType.Auto,) * len(names))


def fit_mesh_shape(mesh_shape: Mapping[str, int], num_devices: int, *, grow: str) -> dict[str, int]:
    """Fits a mesh to a different number of devices: `fit_mesh_shape({'data': 4, 'mdl': 2}, 12, grow='data')` is 6 x 2.

    Every axis except `grow` keeps its size if possible, and otherwise gets the largest divisor of its size that fits. The last
    axis, which communicates most, is fitted first. `grow` gets the remaining devices: on 3 devices this mesh becomes 3 x 1.

    Args:
      mesh_shape: the size of each axis, outermost first. The size of `grow` may be -1.
      num_devices: the new number of devices; at least 1.
      grow: the axis whose size may change freely.

    Returns:
      The sizes by axis, in the same order; they multiply to `num_devices`.

    Raises:
      ValueError: `grow` is not an axis of the mesh, or `num_devices` is below 1.
    """
    if grow not in mesh_shape or num_devices < 1:
        raise ValueError(
            f"grow={grow!r} with mesh {mesh_text(mesh_shape)} on {count_text(num_devices, 'device')}: grow must be an axis of "
            "the mesh, and at least one device is needed."
        )
    sizes, left = dict(mesh_shape), num_devices
    for axis in reversed(sizes):
        if axis != grow:
            sizes[axis] = math.gcd(sizes[axis], left)
            left //= sizes[axis]
    return {**sizes, grow: left}


def size_problem(size: object) -> str | None:
    """Returns the problem with `size` as the size of a mesh axis, or None if it is a positive whole number or -1."""
    if isinstance(size, bool) or not isinstance(size, int | np.integer) or (size < 1 and size != REST):
        return f"{size!r} is not a size: give a whole number of 1 or more, or -1 for the remaining devices"
    return None


def _parse_config(config_mesh: Sequence[tuple[str, int]]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    if isinstance(config_mesh, Mapping):
        config_mesh = list(config_mesh.items())
    entries = list(config_mesh)
    if not entries:
        raise ValueError("The mesh is empty: give at least one (axis name, size), e.g. [('data', -1)] for all devices.")
    for entry in entries:
        if isinstance(entry, str) or len(tuple(entry)) != 2 or not isinstance(entry[0], str):
            raise ValueError(f"{entry!r} is not a mesh axis: write (name, size), e.g. ('data', 4).")
        if problem := size_problem(entry[1]):
            raise ValueError(f"Mesh axis {entry[0]!r}: {problem}. The requested mesh is {mesh_text(dict(entries))}.")
    names = tuple(name for name, _ in entries)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"Mesh axis {twice[0]!r} is given twice in {list(entries)}: axis names must differ.")
    return names, tuple(int(size) for _, size in entries)


def _resolve_sizes(names: Sequence[str], sizes: tuple[int, ...], num_devices: int) -> tuple[int, ...]:
    """Checks the product of the sizes, and returns them with -1 replaced by the number of remaining devices."""
    asked = mesh_text(dict(zip(names, sizes, strict=True)))
    open_axes = [name for name, size in zip(names, sizes, strict=True) if size == REST]
    if len(open_axes) > 1:
        raise ValueError(
            f"Mesh {asked}: only one size may be -1 (the remaining devices), but those of {open_axes} all are. "
            f"Give all but one of them a size; there {_are(num_devices)}."
        )
    product = math.prod(size for size in sizes if size != REST)
    if open_axes and num_devices >= product and num_devices % product == 0:
        return tuple(num_devices // product if size == REST else size for size in sizes)
    if not open_axes and product == num_devices:
        return sizes
    fits = " or ".join(mesh_text(dict(zip(names, fit, strict=True))) for fit in _nearest_sizes(sizes, num_devices))
    rest = f", which leaves no whole number for {open_axes[0]!r}" if open_axes else ""
    raise ValueError(
        f"Mesh {asked}: the sizes multiply to {product}{rest}, but there {_are(num_devices)}. "
        f"Sizes that fit: {fits}. To use fewer devices, pass them as `devices`."
    )


def _nearest_sizes(sizes: Sequence[int], num_devices: int) -> list[tuple[int, ...]]:
    """Returns the two factorizations of `num_devices` that are closest to `sizes`. A size of -1 may become any factor."""

    def distance(fit: tuple[int, ...]) -> tuple[float, int]:
        changes = [(s, f) for s, f in zip(sizes, fit, strict=True) if s not in (REST, f)]
        return sum(abs(math.log(f / s)) for s, f in changes), len(changes)

    # A size of 1 is nearly always intended. Keeping these sizes also keeps the search short.
    free = [i for i, size in enumerate(sizes) if size != 1] or list(range(len(sizes)))
    divisors = [d for d in range(1, num_devices + 1) if num_devices % d == 0]
    fits = []
    for factors in _factorizations(num_devices, len(free), divisors):
        fit = [1] * len(sizes)
        for i, factor in zip(free, factors, strict=True):
            fit[i] = factor
        fits.append(tuple(fit))
    return sorted(fits, key=distance)[:2]


def _are(num_devices: int) -> str:
    return "is 1 device" if num_devices == 1 else f"are {num_devices} devices"


def _factorizations(number: int, parts: int, divisors: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (number,)
        return
    for factor in divisors:
        if number % factor == 0:
            for rest in _factorizations(number // factor, parts - 1, divisors):
                yield (factor, *rest)


def _arrange(sizes: Sequence[int], devices: Sequence[jax.Device], names: Sequence[str], split_axes: bool) -> np.ndarray:
    """Returns the devices as an array of shape `sizes`, in the order that JAX finds best for the network."""
    try:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=split_axes)
    except NotImplementedError as error:
        raise ValueError(
            f"Mesh {mesh_text(dict(zip(names, sizes, strict=True)))} does not fit the network of these "
            f"{len(devices)} {devices[0].device_kind} devices without splitting one of its axes: {error}. "
            "Pass allow_split_physical_axes=True, or choose sizes that are products of whole network axes."
        ) from error


def _granules(devices: Sequence[jax.Device], dcn: dict[str, int]) -> list[list[jax.Device]]:
    """Returns the devices in prod(dcn) groups of equal size, each within one slice (or process)."""
    count = math.prod(dcn.values())
    slices = [getattr(device, "slice_index", 0) for device in devices]
    keys = slices if len(set(slices)) > 1 else [device.process_index for device in devices]
    ordered = [device for _, device in sorted(zip(keys, devices, strict=True), key=lambda pair: pair[0])]
    size = len(ordered) // count
    groups = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    # A group must not cut a slice in two. On CPUs and GPUs without slices, any groups are allowed.
    if len(set(slices)) > 1 or devices[0].platform == "tpu":
        groups_of_slices = [
            {i for i, group in enumerate(groups) for d in group if getattr(d, "slice_index", 0) == s}
            for s in set(slices)
        ]
        if any(len(indices) > 1 for indices in groups_of_slices):
            raise ValueError(
                f"dcn {mesh_text(dcn)} asks for {count_text(count, 'slice')}, but the {len(devices)} devices form "
                f"{count_text(len(set(slices)), 'slice')}: an axis across slices would lie within one. Make the dcn "
                f"sizes multiply to {len(set(slices))} (or a divisor of it) and move the rest to ici."
            )
    return groups
