"""Predicts a candidate's step from the layout of its variables, to choose what to compile first. Nothing is compiled here.

The prediction is only for the order: the traced step's products, bytes of the state, and the collectives that a layout needs.
Parameters that are split over axes of the batch are gathered for each pass, gradients are summed over these axes, and activations
are summed over the other axes that split a parameter.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from praxis import base_layer

from spmd_trainer.analysis import links
from spmd_trainer.analysis.chips import Chip
from spmd_trainer.analysis.hlo_collectives import Collective
from spmd_trainer.optim import masks
from spmd_trainer.programs.job import Job
from spmd_trainer.sharding.variables import VariableSpec

# Bytes of an element in the computation, and of a gradient.
_ACTIVATION, _GRADIENT = 2, 4


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The chip and its links."""

    chip: Chip
    machine: links.Machine


def state_bytes(job: Job) -> tuple[int, int]:
    """Returns the bytes of the train state on one device, and how many of them are padding."""
    mesh = job.partitioner.mesh_shape()
    records = job.partitioner.metadata.records()
    whole = sum(v.bytes_per_device(mesh) for v in records)
    padding = sum(
        v.bytes_per_device(mesh) * v.padding_bytes() // max(1, v.logical_bytes() + v.padding_bytes()) for v in records
    )
    return whole, padding


def batch_axes(job: Job) -> tuple[str, ...]:
    """Returns the mesh axes that the task splits its batch over; all axes if it doesn't say."""
    mesh = job.partitioner.mesh_shape()
    mapping = job.task.train.inputs_split_mapping
    for field in ("map_2d", "map_1d"):
        split = getattr(mapping, field, None) if mapping is not None else None
        if split:
            first = split[0]
            return tuple(axis for axis in ([first] if isinstance(first, str) else first or ()) if axis in mesh)
    return tuple(mesh)


def predict(job: Job, hardware: Hardware, *, flops: float, minibatches: int = 1) -> float:
    """Returns the predicted seconds of a step.

    Args:
      job: the candidate's job.
      hardware: its chips.
      flops: FLOPs of the step on all devices; see `jaxpr_costs.dot_flops`.
      minibatches: parts of the batch; each gathers the parameters.
    """
    mesh = job.partitioner.mesh_shape()
    split = batch_axes(job)
    shards = math.prod(mesh[axis] for axis in split)
    tokens_of_row = int(np.prod(jax.tree.leaves(job.inputs_shape_dtype)[0].shape[1:]))
    tokens = -(-job.num_rows // shards) * tokens_of_row
    network = _Network(job, hardware.machine)
    params = jax.tree.leaves(job.partitioner.metadata.variables.mdl_vars.get(base_layer.PARAMS, {}))
    here, seconds, equal_part = 0.0, 0.0, 0.0
    for variable in params:
        if len(variable.logical_shape) < 2:
            continue
        of_batch, others = _axes(variable, split, mesh)
        elements = math.prod(variable.padded_shape) // math.prod(mesh[axis] for axis in others)
        # Products of the parameters with the tokens: what one device computes, and an equal part of all.
        here += tokens * elements
        equal_part += job.num_rows * tokens_of_row * math.prod(variable.logical_shape) / job.partitioner.mesh.size
        if of_batch:
            gathers = minibatches * 2 * elements * _ACTIVATION
            seconds += network.seconds("all-gather", of_batch, gathers)
            seconds += network.seconds("reduce-scatter", of_batch, elements * _GRADIENT)
        rest = tuple(axis for axis in split if axis not in of_batch and mesh[axis] > 1)
        if rest:
            shard = elements // math.prod(mesh[axis] for axis in of_batch)
            seconds += network.seconds("all-reduce", rest, shard * _GRADIENT)
        if others:
            seconds += network.seconds("all-reduce", others, 2 * tokens * _width(variable, mesh, others) * _ACTIVATION)
    whole, _ = state_bytes(job)
    products = (
        flops
        / job.partitioner.mesh.size
        / hardware.chip.peak_flops
        * max(1.0, here / equal_part if equal_part else 1.0)
    )
    return products + 2 * whole / hardware.machine.memory + seconds


def lower_bound(job: Job, hardware: Hardware, flops: float) -> float:
    """Returns seconds that no step takes less than: its products on all devices, or its state read and,
    except for frozen variables, written once.

    Args:
      job: the candidate's job.
      hardware: its chips.
      flops: FLOPs of the step on all devices; see `jaxpr_costs.dot_flops`.
    """
    whole, _ = state_bytes(job)
    products = flops / job.partitioner.mesh.size / hardware.chip.peak_flops
    return max(products, (2 * whole - _frozen_bytes(job)) / hardware.machine.memory)


def _frozen_bytes(job: Job) -> int:
    """Returns the bytes of the frozen variables on one device."""
    metadata, mesh = job.partitioner.metadata, job.partitioner.mesh_shape()
    params = jax.tree.leaves(metadata.variables.mdl_vars.get(base_layer.PARAMS, {}))
    hparams = jax.tree.leaves(metadata.var_weight_hparams.get(base_layer.PARAMS, {}))
    pairs = zip(params, hparams, strict=True)
    return sum(variable.bytes_per_device(mesh) for variable, hparam in pairs if masks.is_frozen(hparam))


class _Network:
    """Times of collectives over mesh axes."""

    def __init__(self, job: Job, machine: links.Machine):
        mesh = job.partitioner.mesh
        self._links = links.Links(mesh.devices.flatten().tolist(), machine)
        self._positions = np.arange(mesh.size).reshape(mesh.devices.shape)
        self._names = list(mesh.axis_names)

    def seconds(self, kind: str, axes: Sequence[str], num_bytes: int) -> float:
        """Returns the seconds of a collective; `num_bytes` as in `Collective`."""
        dims = [self._names.index(axis) for axis in axes]
        others = [dim for dim in range(len(self._names)) if dim not in dims]
        members = math.prod(self._positions.shape[dim] for dim in dims)
        groups = self._positions.transpose(others + dims).reshape(-1, members)
        time = self._links.seconds(Collective(kind, 1, num_bytes, groups))
        return time.inside + time.outside


def _entries(variable: VariableSpec) -> list[tuple[str, ...]]:
    """Returns the mesh axes of each dimension."""
    entries = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in variable.spec]
    return entries + [()] * (len(variable.logical_shape) - len(entries))


def _axes(
    variable: VariableSpec, split: Sequence[str], mesh: Mapping[str, int]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the axes larger than 1 that split a variable: those of the batch, and the others."""
    used = [axis for entry in _entries(variable) for axis in entry if mesh[axis] > 1]
    return tuple(a for a in used if a in split), tuple(a for a in used if a not in split)


def _width(variable: VariableSpec, mesh: Mapping[str, int], others: Sequence[str]) -> int:
    """Returns the size of the dimensions that `others` don't split, times the layers of a stacked variable."""
    return math.prod(
        size
        for size, entry in zip(variable.padded_shape, _entries(variable), strict=True)
        if not any(axis in others for axis in entry)
    )
