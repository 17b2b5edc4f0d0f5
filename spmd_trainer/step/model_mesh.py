"""The mesh that a model declares."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol

import jax
from jax.sharding import Mesh

from spmd_trainer import sharding
from spmd_trainer.errors import UserError

# Name of the only axis of a model that declares no mesh: data-parallel over all devices.
DEFAULT_AXIS = "data"


class DeclaresMesh(Protocol):
    """A praxis model, or its config.

    Attributes:
      ici_mesh_shape: size of each axis within a slice or host; None for one axis over all devices.
      dcn_mesh_shape: size of each axis over slices or hosts; may be None.
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
      ici: size of each axis within a slice or host; -1: the rest of the devices.
      dcn: size of each axis over slices or hosts.
    """

    axis_names: tuple[str, ...]
    ici: tuple[int, ...]
    dcn: tuple[int, ...]

    @property
    def shape(self) -> dict[str, int]:
        """Size of each axis over all slices; -1: the rest of the devices."""
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
    """Builds the mesh that a praxis model (or its config) declares.

    Args:
      model: declares the mesh.
      devices: the devices to use; None for all.

    Raises:
      ValueError: names and sizes don't fit each other or the devices.
    """
    declared = declared_mesh(model)
    if declared is None:
        return sharding.create_device_mesh([(DEFAULT_AXIS, -1)], devices=devices)
    if any(size != 1 for size in declared.dcn):
        return sharding.create_hybrid_mesh(declared.ici, declared.dcn, declared.axis_names, devices=devices)
    return sharding.create_device_mesh(list(declared.shape.items()), devices=devices)
