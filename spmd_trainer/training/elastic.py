"""Continues a run in memory when devices are added or removed: builds a mesh on the new devices and reshards the state."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from fractions import Fraction

import jax
from absl import logging

from spmd_trainer.errors import UserError
from spmd_trainer.sharding.messages import mesh_text
from spmd_trainer.step import moving
from spmd_trainer.step.mesh_choice import mesh_over_slices
from spmd_trainer.train_states import TrainState
from spmd_trainer.training.job import BatchSettings, Job


def changed_devices(job: Job, step: int) -> Sequence[jax.Device] | None:
    """Returns the devices to continue on if they are not those of the job's mesh, else None.

    Calls the experiment's `available_devices` if the job's partitioner is elastic; otherwise returns None.
    """
    if not job.partitioner.elastic:
        return None
    devices = job.config.experiment.experiment.available_devices(step)
    return None if devices is None or set(devices) == set(job.partitioner.mesh.devices.flat) else devices


def check_processes(job: Job) -> None:
    """Checks that an elastic job has one process.

    Raises:
      UserError: the job has several processes, whose arrays JAX can't move to other devices.
    """
    count = jax.process_count()
    if job.partitioner.elastic and count > 1:
        raise UserError(
            f"experiment {job.config.experiment.label}: elastic=True needs a job of one process, and this one has {count}: JAX "
            "can't move arrays of several processes to fewer or more devices. Set elastic=False, and start the job again when "
            "its devices change; it resumes from its newest checkpoint on any mesh and number of processes"
        )


def rebuild(job: Job, devices: Sequence[jax.Device], state: TrainState) -> tuple[Job, TrainState]:
    """Rebuilds a job on other devices and moves its state there, bit for bit. The old state is donated.

    The experiment's `mesh_for_devices` chooses the mesh; the partitioner's `elastic_batch` decides the batch settings.

    Raises:
      UserError: the experiment has no mesh for this number of devices, its mesh doesn't fit the devices or the mappings, or the
        batch can't be scaled.
    """
    before, experiment = job.partitioner.mesh_shape(), job.config.experiment
    try:
        sizes = experiment.experiment.mesh_for_devices(before, len(devices))
        mesh = mesh_over_slices(sizes, devices)
    except ValueError as error:
        raise UserError(f"experiment {experiment.label}: {error}") from error
    new_job = job.on_mesh(mesh, batch_settings(job, len(devices)))
    logging.warning(
        "devices changed: from %s to %s; %s", mesh_text(before), mesh_text(sizes), _batch_text(job, new_job)
    )
    return new_job, moving.move_state(state, job.partitioner.metadata, new_job.partitioner.metadata)


def batch_settings(job: Job, num_devices: int) -> BatchSettings:
    """Returns the batch settings for `num_devices` devices, according to the partitioner's `elastic_batch`.

    They are derived from the settings and the number of devices with which this process began, not from the current ones.
    Therefore a return to the initial number of devices restores the initial settings.
    """
    partitioner = job.partitioner
    now = job.batch or BatchSettings(partitioner.mesh.size, partitioner.num_minibatches, partitioner.num_minibatches)
    match partitioner.elastic_batch:
        case "scale":
            return dataclasses.replace(now, batch_scale=Fraction(num_devices, now.first_devices))
        case "accumulate":
            at_least = -(-now.first_minibatches * now.first_devices // num_devices)
            rows = partitioner.rows_to_split(job.num_rows, num_devices)
            # The smallest number that divides the rows and gives no device more rows per minibatch than at the start.
            number = next((n for n in range(at_least, rows) if rows % n == 0), rows)
            return dataclasses.replace(now, num_minibatches=number)
        case _:
            return now


def _batch_text(old: Job, new: Job) -> str:
    rows = f"the global batch of {old.num_rows} rows stays"
    if old.num_rows != new.num_rows:
        rows = f"the global batch goes from {old.num_rows} rows to {new.num_rows}, and the learning rate stays"
    parts = new.partitioner.num_minibatches
    return rows if parts == old.partitioner.num_minibatches else f"{rows}, in {parts} minibatches"
