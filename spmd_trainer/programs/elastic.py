"""A run whose devices come and go: it goes on where it is, on a mesh of those that there are, without touching disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
from absl import logging

from spmd_trainer import moving
from spmd_trainer.errors import UserError
from spmd_trainer.programs.job import Job
from spmd_trainer.train_states import TrainState


def changed_devices(job: Job, step: int) -> Sequence[jax.Device] | None:
    """Returns the devices to go on with where they are not those of the job's mesh, else None.

    Asks the experiment, when the job's partitioner is elastic.
    """
    if not job.partitioner.elastic:
        return None
    devices = job.experiment.available_devices(step)
    if devices is None or {d.id for d in devices} == {d.id for d in job.partitioner.mesh.devices.flat}:
        return None
    return devices


def rebuild(job: Job, devices: Sequence[jax.Device], state: TrainState) -> tuple[Job, TrainState]:
    """Builds the job on other devices and moves its state there, bit for bit; the old state is used up.

    The mesh is what the experiment's `mesh_for_devices` says. The global batch stays the same: fewer devices hold more
    rows each.

    Args:
      job: the job as it runs.
      devices: the devices to go on with.
      state: its state.

    Returns:
      The new job and the state on its mesh.

    Raises:
      UserError: the experiment's rule has no mesh for so many devices, or that mesh doesn't fit its mappings.
    """
    before = job.partitioner.mesh_shape()
    try:
        sizes = job.experiment.mesh_for_devices(before, len(devices))
    except ValueError as error:
        raise UserError(f"experiment {job.settings.exp}: {error}") from error
    settings = dataclasses.replace(job.settings, mesh=tuple(sizes.items()), devices=tuple(devices))
    new_job = Job(settings, job.resolved)
    logging.warning("devices changed: from %s to %s", _text(before), _text(sizes))
    return new_job, moving.move_state(state, job.partitioner.metadata, new_job.partitioner.metadata)


def _text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in sizes.items())
