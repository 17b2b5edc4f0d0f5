"""Chooses a job's mesh: from `--mesh`, from the model's declaration, or from the experiment's `adapt_mesh`."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
from jax.sharding import Mesh

from spmd_trainer import sharding
from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.sharding.messages import count_text, mesh_text

if TYPE_CHECKING:
    from spmd_trainer.base_experiment import BaseExperiment

# Name of the only axis of a model that declares no mesh: data-parallel over all devices.
DEFAULT_AXIS = "data"
# The size of an axis in --mesh.
_SIZE = re.compile(r"-?[0-9]{1,18}")


class DeclaresMesh(Protocol):
    """The fields of a praxis model, or of its config, that declare a mesh.

    Attributes:
      ici_mesh_shape: size of each axis within a slice or host; None if no mesh is declared.
      dcn_mesh_shape: size of each axis over slices or hosts; None for one slice or host.
      mesh_axis_names: names of the axes.
    """

    ici_mesh_shape: Sequence[int] | None
    dcn_mesh_shape: Sequence[int] | None
    mesh_axis_names: Sequence[str] | None


@dataclasses.dataclass(frozen=True)
class DeclaredMesh:
    """The mesh that a model declares.

    Attributes:
      axis_names: names, outermost axis first.
      ici: size of each axis within a slice or host; -1 for all remaining devices.
      dcn: size of each axis over slices or hosts.
    """

    axis_names: tuple[str, ...]
    ici: tuple[int, ...]
    dcn: tuple[int, ...]

    @property
    def shape(self) -> dict[str, int]:
        """{axis: size over all slices or hosts}; -1 for all remaining devices."""
        sizes = zip(self.axis_names, self.ici, self.dcn, strict=True)
        return {name: -1 if -1 in (i, d) else i * d for name, i, d in sizes}

    @property
    def num_devices(self) -> int | None:
        """Number of devices that the mesh needs; None if a size is -1."""
        sizes = self.shape.values()
        return None if -1 in sizes else math.prod(sizes)


def declared_mesh(model: DeclaresMesh) -> DeclaredMesh | None:
    """Returns the mesh that a praxis model or its config declares; None if it declares none.

    Raises:
      UserError: ici_mesh_shape, dcn_mesh_shape and mesh_axis_names differ in length.
    """
    ici, dcn, names = model.ici_mesh_shape, model.dcn_mesh_shape, model.mesh_axis_names
    if ici is None:
        return None
    for field, shape in (("ici_mesh_shape", ici), ("dcn_mesh_shape", dcn)):
        if shape is not None and (names is None or len(shape) != len(names)):
            raise UserError(
                f"task.model.{field} is {list(shape)} and task.model.mesh_axis_names is {names}: one size per name is needed"
            )
    return DeclaredMesh(tuple(names or ()), tuple(ici), tuple(dcn or [1] * len(ici)))


def mesh_from_model(model: DeclaresMesh, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Builds the mesh that a praxis model (or its config) declares; without a declaration, one axis 'data' over all devices.

    Args:
      model: the model or its config.
      devices: the devices to use; None for all.

    Raises:
      UserError: the fields of the declaration differ in length.
      ValueError: the sizes don't fit the devices.
    """
    declared = declared_mesh(model)
    if declared is None:
        return sharding.create_device_mesh([(DEFAULT_AXIS, -1)], devices=devices)
    if any(size != 1 for size in declared.dcn):
        return sharding.create_hybrid_mesh(declared.ici, declared.dcn, declared.axis_names, devices=devices)
    return sharding.create_device_mesh(list(declared.shape.items()), devices=devices)


def choose_mesh(
    experiment: BaseExperiment,
    model: DeclaresMesh,
    *,
    name: str,
    given: Sequence[tuple[str, int]] | None,
    devices: Sequence[jax.Device] | None,
) -> tuple[Mesh, str]:
    """Returns a job's mesh, over all of its devices, and the reason for the choice as text for the log, e.g. 'as --mesh says'.

    Args:
      experiment: the experiment; its `adapt_mesh` is called if the declared mesh does not fit the devices.
      model: the built model; declares `ici_mesh_shape`, `dcn_mesh_shape` and `mesh_axis_names`.
      name: the experiment's name, for messages.
      given: the value of `--mesh`, e.g. (('data', 4), ('mdl', 2)), or None. Axes that only the model declares get size 1.
      devices: the devices to use; None for all available devices.

    Raises:
      UserError: the sizes don't fit the devices; the message suggests a `--mesh` that fits.
      ValueError: the model's declaration contradicts itself.
    """
    count = len(devices) if devices is not None else jax.device_count()
    found = declared_mesh(model)
    declared = None if found is None else found.shape
    if given:
        return _given_mesh(given, declared, devices, count), "as --mesh says"
    if declared is None or _fits(declared, count):
        reason = "the experiment declares no mesh" if declared is None else "as the experiment declares it"
        return mesh_from_model(model, devices), reason
    adapted = experiment.adapt_mesh(declared, count)
    if adapted is None:
        raise UserError(
            f"experiment {name} declares the mesh ({mesh_text(declared)}), which needs {_needed(declared)}, and there "
            f"{_are(count)}. Run it with --mesh={mesh_flag(_nearest(declared, count).items())}, or let the experiment adapt its "
            "mesh (adapt_mesh)"
        )
    if math.prod(adapted.values()) != count:
        raise UserError(
            f"{type(experiment).__name__}.adapt_mesh returns the mesh ({mesh_text(adapted)}), which needs "
            f"{math.prod(adapted.values())} devices; there {_are(count)}. Return sizes whose product is {count}"
        )
    mesh = mesh_over_slices(adapted, devices)
    return mesh, f"adapted from the declared ({mesh_text(declared)}), which needs {_needed(declared)}"


def _fits(shape: Mapping[str, int], count: int) -> bool:
    known = math.prod(size for size in shape.values() if size != -1)
    return count % known == 0 if -1 in shape.values() else count == known


def _given_mesh(
    given: Sequence[tuple[str, int]],
    declared: Mapping[str, int] | None,
    devices: Sequence[jax.Device] | None,
    count: int,
) -> Mesh:
    sizes = dict(given)
    if len(sizes) != len(given):
        raise UserError(f"--mesh names an axis twice: {', '.join(name for name, _ in given)}")
    if declared is not None:
        for name in sizes:
            if name not in declared:
                axes = ", ".join(declared)
                raise UserError(
                    f"--mesh has an axis {name!r}; the experiment's axes are {axes}{did_you_mean(name, declared)}"
                )
        sizes = {name: sizes.get(name, 1) for name in declared}
    if not _fits(sizes, count):
        fits = mesh_flag(_nearest(sizes, count).items())
        raise UserError(
            f"--mesh={mesh_flag(sizes.items())} needs {_needed(sizes)}, and there {_are(count)}. This one fits: --mesh={fits}"
        )
    return mesh_over_slices(sizes, devices)


def mesh_over_slices(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Makes a mesh. On several TPU slices, only the outermost axis of size > 1 crosses slices.

    Args:
      sizes: size of each axis, outermost first. One size may be -1 for all remaining devices.
      devices: the devices, all of which are used; None for all available devices.

    Raises:
      UserError: the number of slices does not divide the size of this outermost axis.
      ValueError: see `create_device_mesh`.
    """
    devices = list(jax.devices() if devices is None else devices)
    slices = len({getattr(device, "slice_index", 0) for device in devices if device.platform == "tpu"}) or 1
    if slices == 1:
        return sharding.create_device_mesh(list(sizes.items()), devices=devices)
    rest = len(devices) // math.prod(size for size in sizes.values() if size != -1)
    whole = {name: rest if size == -1 else size for name, size in sizes.items()}
    outermost = next(name for name, size in whole.items() if size > 1)
    if whole[outermost] % slices:
        raise UserError(
            f"--mesh={mesh_flag(sizes.items())} on {slices} slices: the slices are divided over the outermost axis, and "
            f"{outermost!r} has size {whole[outermost]}; give it a multiple of {slices}"
        )
    across = [slices if name == outermost else 1 for name in whole]
    inside = [size // count for size, count in zip(whole.values(), across, strict=True)]
    return sharding.create_hybrid_mesh(inside, across, tuple(whole), devices)


def _nearest(shape: Mapping[str, int], count: int) -> dict[str, int]:
    """Returns a mesh shape for `count` devices. Resizes the axis 'data', or the largest axis if there is no 'data'."""
    grow = "data" if "data" in shape else max(shape, key=shape.__getitem__)
    sizes = {name: 1 if size == -1 else size for name, size in shape.items()}
    return sharding.fit_mesh_shape(sizes, count, grow=grow)


def _needed(shape: Mapping[str, int]) -> str:
    known = math.prod(size for size in shape.values() if size != -1)
    return f"a multiple of {known} devices" if -1 in shape.values() else count_text(known, "device")


def _are(count: int) -> str:
    return "is 1" if count == 1 else f"are {count}"


def mesh_flag(sizes: Iterable[tuple[str, int]]) -> str:
    """Returns mesh sizes in the form of `--mesh`, e.g. 'data:4,mdl:2'."""
    return ",".join(f"{axis}:{size}" for axis, size in sizes)


def read_mesh(flag: str, value: Any) -> tuple[tuple[str, int], ...]:
    """Returns (axis, size) pairs for a mesh given as 'data:4,mdl:2', as {'data': 4, 'mdl': 2} or as pairs.

    `flag`: name of the setting, for messages. Errors as in `parse_mesh`.
    """
    if isinstance(value, str):
        return parse_mesh(value)
    try:
        text = mesh_flag(value.items() if isinstance(value, Mapping) else value)
    except (TypeError, ValueError) as error:
        raise UserError(f"{flag}={value!r}: give e.g. 'data:4,mdl:2' or {{'data': 4, 'mdl': 2}}") from error
    return parse_mesh(text)


def parse_mesh(text: str) -> tuple[tuple[str, int], ...]:
    """Parses the value of `--mesh`, e.g. 'data:4,mdl:2', to (axis, size) pairs.

    Raises:
      UserError: the text has a different form, a size is neither positive nor -1, or several sizes are -1.
    """
    axes = []
    for part in text.split(","):
        name, colon, number = part.partition(":")
        # int() alone would take '1_0' for 10.
        size = int(number) if _SIZE.fullmatch(number.strip()) else None
        if not (name.strip() and colon) or size is None:
            raise UserError(f"--mesh={text}: {part!r} is not of the form axis:size, e.g. --mesh=data:4,mdl:2")
        problem = sharding.size_problem(size)
        if problem:
            raise UserError(f"--mesh={text}: axis {name.strip()!r}: {problem}")
        axes.append((name.strip(), size))
    if sum(size == -1 for _, size in axes) > 1:
        raise UserError(f"--mesh={text}: only one size may be -1, the rest of the devices")
    return tuple(axes)
