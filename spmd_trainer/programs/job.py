"""What every mode needs: the experiment resolved, its mesh, its partitioner, its directories."""

from __future__ import annotations

import dataclasses
import fractions
import json
import os
from collections.abc import Sequence
from typing import Any

import jax
from absl import logging
from etils import epath
from jax.sharding import Mesh
from praxis import pax_fiddle

from spmd_trainer import experiment_config, partitioning, sharding
from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.experiment_config import ResolvedExperiment
from spmd_trainer.tasks_lib import SingleTask

# Says whose directory a job_log_dir is.
MARKER = "experiment.json"


@dataclasses.dataclass(frozen=True)
class Moved:
    """The batch of a run that goes on on other devices than it began on.

    Attributes:
      first_devices: how many it began on.
      first_minibatches: its partitioner's `num_minibatches` then.
      num_minibatches: those it has now.
      batch_scale: its global batch is so many times the first one.
    """

    first_devices: int
    first_minibatches: int
    num_minibatches: int
    batch_scale: fractions.Fraction = fractions.Fraction(1)


@dataclasses.dataclass(frozen=True)
class JobSettings:
    """The command line, resolved.

    Attributes:
      exp: the experiment's name.
      job_log_dir: where everything of this job goes.
      mode: train, eval, decode, decode_once, infer, inspect or verify.
      overrides: 'path=value' each, applied to the experiment's config.
      restore_checkpoint_dir: read checkpoints from here instead of `job_log_dir/checkpoints`.
      restore_checkpoint_step: this step instead of the newest.
      eval_on_test: evaluate during training on every evaluation dataset (else only between intervals).
      decode_during_train: decode during training, at `decode_interval_steps`.
      enable_checkpoint_saving: False trains without saving.
      exit_after_ondemand_checkpoint: leave after the checkpoint that a signal asked for.
      verify_steps: steps that `verify` takes.
      plan: `inspect` also compiles the train step and says what it needs.
      topology: the same for TPUs of this topology.
      devices: plan for these, as `plan.topology_devices` gives them, instead of those that are here.
      moved: what the run began with and what it has now, once its devices have changed.
      mesh: replaces the declared mesh, e.g. (('data', 4), ('mdl', 2)); declared axes that it leaves out get size 1.
    """

    exp: str
    job_log_dir: epath.Path
    mode: str = "train"
    overrides: Sequence[str] = ()
    restore_checkpoint_dir: epath.Path | None = None
    restore_checkpoint_step: int | None = None
    eval_on_test: bool = True
    decode_during_train: bool = False
    enable_checkpoint_saving: bool = True
    exit_after_ondemand_checkpoint: bool = True
    verify_steps: int = 5
    mesh: Sequence[tuple[str, int]] | None = None
    plan: bool = False
    topology: str | None = None
    devices: Sequence[jax.Device] | None = None
    moved: Moved | None = None

    @property
    def checkpoint_dir(self) -> epath.Path:
        """Where checkpoints are read from."""
        return self.restore_checkpoint_dir or self.job_log_dir / "checkpoints"


class Job:
    """An experiment on its devices. Building one allocates nothing on them."""

    def __init__(self, settings: JobSettings, resolved: ResolvedExperiment):
        """Builds task, mesh and partitioner.

        Raises:
          UserError: the experiment, the mesh and the devices don't fit each other.
        """
        self.settings = settings
        self.resolved = resolved
        self.experiment = resolved.experiment
        try:
            self.task: SingleTask = partitioning.build_task(resolved.task_p)
            self.partitioner = self.experiment.partitioner() or partitioning.PjitPartitioner()
            if settings.moved is not None:
                self.partitioner.num_minibatches = settings.moved.num_minibatches
            mesh = _mesh(settings, self.task)
            if mesh is not None:
                self.partitioner.use_mesh(mesh)
            self.process_inputs_shape_dtype = self._process_inputs_shape_dtype()
            self.partitioner.setup(self.task, self.global_shape_dtype(self.process_inputs_shape_dtype))
        except UserError:
            raise
        except ValueError as error:
            raise UserError(f"experiment {settings.exp}: {experiment_config.first_paragraph(error)}") from error
        logging.info(
            "experiment %s: %s parameters on mesh %s (%d devices: %s)",
            settings.exp,
            f"{self.partitioner.metadata.num_params():,}",
            ", ".join(f"{axis}={size}" for axis, size in self.partitioner.mesh.shape.items()),
            self.partitioner.mesh.size,
            self.partitioner.mesh.devices.flat[0].device_kind,
        )

    @classmethod
    def from_settings(cls, settings: JobSettings) -> Job:
        """Resolves the experiment and builds its job."""
        return cls(settings, experiment_config.resolve(settings.exp, settings.overrides))

    @property
    def prng_key(self) -> jax.Array:
        """The run's one key, from `task.train.random_seed`."""
        return jax.random.key(self.task.train.random_seed)

    def _process_inputs_shape_dtype(self) -> Any:
        provider = pax_fiddle.build(self.experiment.get_input_specs_provider_params())
        shapes = provider.get_input_specs()
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((self._scaled(x.shape[0]), *x.shape[1:]), x.dtype), shapes)

    def _scaled(self, rows: int) -> int:
        scaled = rows * (self.settings.moved.batch_scale if self.settings.moved else fractions.Fraction(1))
        if scaled.denominator != 1:
            raise UserError(
                f"elastic_batch='scale': {rows} rows of each process become {scaled}, no whole number, on "
                f"{len(self.settings.devices or ())} devices; choose another batch size, or 'whole' or 'accumulate'"
            )
        return int(scaled)

    def build_train_input(self) -> Any:
        """Builds this process's share of the training input, its batch scaled as `settings.moved` says.

        Raises:
          UserError: as `build_input`; the batch can't be scaled so.
        """
        input_p = self.resolved.config.train_datasets[0].clone()
        if self.settings.moved and self.settings.moved.batch_scale != 1:
            if input_p.batch_size is None:
                raise UserError(
                    f"elastic_batch='scale': the training input {input_p.name!r} has no batch_size to scale"
                )
            # An experiment may give a config that works it out.
            input_p.batch_size = self._scaled(pax_fiddle.build(input_p.batch_size))
        return self.build_input(input_p)

    @property
    def num_rows(self) -> int:
        """Rows of the global training batch."""
        return jax.tree.leaves(self.global_shape_dtype(self.process_inputs_shape_dtype))[0].shape[0]

    @staticmethod
    def global_shape_dtype(process_shape_dtype: Any) -> Any:
        """Returns the shapes of the batch over all processes, given those of one process."""

        def scale(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((x.shape[0] * jax.process_count(), *x.shape[1:]), x.dtype)

        return jax.tree.map(scale, process_shape_dtype)

    def build_input(self, input_p: Any) -> Any:
        """Builds an input for this process's share of the data.

        Raises:
          UserError: the input's own settings don't fit each other or its files.
        """
        input_p = input_p.clone()
        input_p.num_infeed_hosts = jax.process_count()
        input_p.infeed_host_index = jax.process_index()
        try:
            return pax_fiddle.build(input_p)
        except ValueError as error:
            raise UserError(experiment_config.first_paragraph(error)) from error

    def config_lines(self) -> list[str]:
        """The resolved config, one 'a.b.c: value' a line."""
        return experiment_config.flatten_mapping(self.resolved.flattened())

    def write_description(self) -> None:
        """Writes what this job is into its directory: marker, resolved config, sharding report."""
        if jax.process_index():
            return
        directory = self.settings.job_log_dir
        directory.mkdir(parents=True, exist_ok=True)
        (directory / MARKER).write_text(json.dumps({"experiment": self.resolved.name}) + "\n")
        (directory / "config.txt").write_text("\n".join(self.config_lines()) + "\n")
        for suffix, form in (("txt", "text"), ("json", "json"), ("html", "html")):
            report = sharding.sharding_report(self.partitioner.metadata.records(), self.partitioner.mesh, format=form)
            (directory / f"sharding_report.{suffix}").write_text(report)


def _mesh(settings: JobSettings, task: SingleTask) -> Mesh | None:
    """The mesh that replaces the declared one: of `--mesh`, or the declared one on devices that aren't here."""
    if settings.mesh:
        return sharding.create_device_mesh(_axes(settings.mesh, task), devices=settings.devices)
    return partitioning.mesh_from_model(task.model, settings.devices) if settings.devices is not None else None


def _axes(given: Sequence[tuple[str, int]], task: SingleTask) -> list[tuple[str, int]]:
    """The axes of `--mesh` in the order that the model declares, those left out at size 1."""
    declared = task.model.mesh_axis_names
    if declared is None:
        return list(given)
    sizes = dict(given)
    for name in sizes:
        if name not in declared:
            raise UserError(
                f"--mesh has an axis {name!r}; the experiment's axes are {', '.join(declared)}{did_you_mean(name, declared)}"
            )
    if len(sizes) != len(given):
        raise UserError(f"--mesh names an axis twice: {', '.join(name for name, _ in given)}")
    return [(name, sizes.get(name, 1)) for name in declared]


def check_directory(settings: JobSettings, full_name: str) -> None:
    """Makes sure, before any device is touched and without writing, that `job_log_dir` can be this experiment's own.

    Raises:
      UserError: not writable; holds something else; holds another experiment's run.
    """
    directory = settings.job_log_dir
    existing = directory
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(
            f"--job_log_dir={directory} can't be written below {existing}; give a directory that you may write"
        )
    marker = directory / MARKER
    if marker.exists():
        owner = json.loads(marker.read_text())["experiment"]
        if owner != full_name:
            raise UserError(
                f"--job_log_dir={directory} holds a run of {owner}, not of {full_name}; "
                "give each experiment a directory of its own"
            )
    elif settings.mode == "train" and directory.exists() and any(directory.iterdir()):
        raise UserError(
            f"--job_log_dir={directory} is not empty and no run of this trainer; give a new or an empty directory"
        )
