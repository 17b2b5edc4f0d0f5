"""Defines `Job`: an experiment built for its devices, used in all modes. It has the task, partitioner, mesh and inputs."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import jax
from absl import logging
from jax.sharding import Mesh
from praxis import pax_fiddle

from spmd_trainer import sharding, tasks_lib
from spmd_trainer.base_experiment import BaseExperiment, check_overrides
from spmd_trainer.errors import MissingCompilerError, UserError, first_paragraph, user_code
from spmd_trainer.errors.installation import installed_version
from spmd_trainer.inputs import batches
from spmd_trainer.inputs.indexed import CheckpointedInput
from spmd_trainer.models.base import vocabulary_size
from spmd_trainer.sharding.messages import count_text, mesh_text
from spmd_trainer.sharding.report_data import InputLayout
from spmd_trainer.step import pjit
from spmd_trainer.step.mesh_choice import choose_mesh
from spmd_trainer.step.minibatches import check_count
from spmd_trainer.step.partitioner import Partitioner
from spmd_trainer.tasks_lib import SingleTask
from spmd_trainer.train_states import PyTree
from spmd_trainer.training import ramps, reference_files, rooms
from spmd_trainer.training.ramps import Stage
from spmd_trainer.training.run_config import ChipsConfig, RunConfig, StepConfig


@dataclasses.dataclass(frozen=True)
class BatchSettings:
    """Batch settings of an elastic run, which may change when the run's devices change.

    Attributes:
      first_devices: number of devices that the run began on.
      first_minibatches: the partitioner's `num_minibatches` when the run began.
      num_minibatches: the partitioner's current `num_minibatches`.
      batch_scale: current global batch size / initial global batch size.
    """

    first_devices: int
    first_minibatches: int
    num_minibatches: int
    batch_scale: Fraction = Fraction(1)


@dataclasses.dataclass(frozen=True)
class Job:
    """An experiment built for its devices. Building a job allocates no device memory.

    Attributes:
      partitioner: the partitioner, set up on the job's mesh.
      process_inputs_shape_dtype: ShapeDtypeStructs of one process's training batch.
      batch: the batch settings of an elastic run whose devices have changed, else None.
      stage: the current stage of the batch-size and sequence-length ramps. `build` chooses the last stage, `at_step` the stage of
        a given step. None without a ramp.
    """

    config: RunConfig
    task: SingleTask
    partitioner: Partitioner
    process_inputs_shape_dtype: PyTree
    batch: BatchSettings | None = None
    stage: Stage | None = None
    # Inputs that are built and at their beginning, by the id of their config.
    _kept: dict[int, Any] = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def build(cls, config: RunConfig) -> Job:
        """Builds task, mesh and partitioner.

        Raises:
          UserError: the experiment, the mesh and the devices don't fit each other.
        """
        with _errors_of_building(config):
            shapes = _declared_inputs(config.experiment.experiment)
            check_overrides(config.experiment.experiment)
            task = tasks_lib.build_task(config.experiment.task_p)
            devices = None
            if isinstance(config, ChipsConfig) and config.topology:
                devices = _topology_devices(config.topology, config.num_slices)
            partitioner = make_partitioner(config.experiment.experiment)
            if isinstance(config, StepConfig) and config.num_minibatches is not None:
                partitioner.num_minibatches = config.num_minibatches
            _use_mesh(config, task, partitioner, devices)
            job = cls(config, task, partitioner, shapes)
            if stages := job.stages:
                ramps.check(task, partitioner, stages, job.inputs_shape_dtype)
                job = job._in_stage(stages[-1], shapes)
            partitioner.setup(task, job.inputs_shape_dtype)
            for stage in stages:
                rows = job._in_stage(stage, shapes).num_rows
                check_count(partitioner.num_minibatches, partitioner.rows_to_split(rows, partitioner.mesh.size))
        frozen = partitioner.metadata.num_frozen_params()
        and_frozen = f" learn, {frozen:,} are frozen" if frozen else ""
        logging.info("%s parameters%s", f"{partitioner.metadata.num_params():,}", and_frozen)
        return job

    def on_mesh(self, mesh: Mesh, batch: BatchSettings) -> Job:
        """Returns a copy of the job on a new mesh, with new batch settings. The copy has the same task object.

        Raises:
          UserError: the batch can't be scaled, or the new mesh doesn't fit the mappings.
        """

        def scaled(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((_scaled(x.shape[0], batch, mesh.size), *x.shape[1:]), x.dtype)

        experiment = self.config.experiment.experiment
        with _errors_of_building(self.config):
            partitioner = make_partitioner(experiment)
            partitioner.num_minibatches = batch.num_minibatches
            partitioner.use_mesh(mesh)
            shapes = _declared_inputs(experiment)
            if self.stage is not None:
                shapes = ramps.shapes_in(self.stage, shapes, jax.process_count())
            shapes = jax.tree.map(scaled, shapes)
            partitioner.setup(self.task, self.global_shape_dtype(shapes))
        return dataclasses.replace(self, partitioner=partitioner, process_inputs_shape_dtype=shapes, batch=batch)

    @property
    def stages(self) -> Sequence[Stage]:
        """The stages of the batch-size and sequence-length ramps; empty without a ramp."""
        return ramps.stages_of(self.task.train)

    def at_step(self, step: int) -> Job:
        """Returns the job in the ramp stage for the training step that follows `step`. Without a ramp, returns the job itself."""
        if self.stage is None:
            return self
        stage = ramps.stage_at(self.stages, step)
        return (
            self if stage == self.stage else self._in_stage(stage, _declared_inputs(self.config.experiment.experiment))
        )

    def _in_stage(self, stage: Stage, declared: PyTree) -> Job:
        shapes = ramps.shapes_in(stage, declared, jax.process_count())
        return dataclasses.replace(self, process_inputs_shape_dtype=shapes, stage=stage)

    @property
    def prng_key(self) -> jax.Array:
        """The run's only PRNG key, from `task.train.random_seed`."""
        return jax.random.key(self.task.train.random_seed)

    @property
    def abstract_prng_key(self) -> jax.ShapeDtypeStruct:
        """The ShapeDtypeStruct of `prng_key`, for compiling a step for devices that may not be attached."""
        key: jax.ShapeDtypeStruct = jax.eval_shape(lambda: self.prng_key)
        return key

    @property
    def inputs_shape_dtype(self) -> PyTree:
        """ShapeDtypeStructs of the global training batch."""
        return self.global_shape_dtype(self.process_inputs_shape_dtype)

    @property
    def num_rows(self) -> int:
        return int(jax.tree.leaves(self.inputs_shape_dtype)[0].shape[0])

    @staticmethod
    def global_shape_dtype(process_shape_dtype: PyTree) -> PyTree:
        """Returns ShapeDtypeStructs of the global batch, given those of one process."""

        def scale(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((x.shape[0] * jax.process_count(), *x.shape[1:]), x.dtype)

        return jax.tree.map(scale, process_shape_dtype)

    def build_train_input(self) -> Any:
        """Builds this process's share of the training input, with the batch size of `stage`, scaled by `batch.batch_scale`.

        Raises:
          UserError: as for `build_input`; also if the batch size can't be scaled.
        """
        input_p = self.config.experiment.config.train_datasets[0].clone()
        if self.stage is not None:
            input_p = ramps.with_rows(input_p, self.stage, jax.process_count())
        if self.batch is not None and self.batch.batch_scale != 1:
            if input_p.batch_size is None:
                raise UserError(
                    f"elastic_batch='scale': the training input {input_p.name!r} has no batch_size to scale"
                )
            # An experiment may give a config that computes the batch size.
            rows = pax_fiddle.build(input_p.batch_size)
            input_p.batch_size = _scaled(rows, self.batch, self.partitioner.mesh.size)
        built = self.build_input(input_p)
        if self.stage is not None:
            ramps.check_input(built, self.stages)
        return built

    def cut(self, batch: PyTree) -> PyTree:
        """Returns one process's training batch, with its rows cut into rows of `stage.length` tokens if that is set."""
        return batches.cut_rows(batch, self.stage.length) if self.stage and self.stage.length else batch

    def build_input(self, input_p: Any) -> Any:
        """Builds an input for this process's share of the data, or returns the one that `keep_input` kept.

        Raises:
          UserError: the input's settings contradict each other, its files or the model's vocabulary.
        """
        if (kept := self._kept.pop(id(input_p), None)) is not None:
            return kept
        input_p = input_p.clone()
        input_p.num_infeed_hosts = jax.process_count()
        input_p.infeed_host_index = jax.process_index()
        try:
            built = pax_fiddle.build(input_p)
        except ValueError as error:
            raise UserError(first_paragraph(error)) from error
        _check_vocabulary(built, self.task)
        reference_files.attach(built, self.config.job_log_dir)
        return built

    def keep_input(self, input_p: Any, built: Any) -> None:
        """Keeps a built input, positioned at its beginning. The next call of `build_input` with the same config returns it."""
        self._kept[id(input_p)] = built

    def settings_lines(self) -> list[str]:
        """Returns the resolved config, the mesh, the batch and further settings of the run, one 'path: value' per line."""
        return [
            *self.config.experiment.lines(),
            f"mesh: ({mesh_text(self.partitioner.mesh_shape())})",
            f"processes: {jax.process_count()}",
            f"global batch rows: {self.num_rows}",
            f"minibatches: {self.partitioner.num_minibatches}",
            *self.config.noted_lines(),
        ]

    def sharding_report(
        self, attention: Sequence[str] = (), inputs: Sequence[InputLayout] = ()
    ) -> sharding.ShardingReport:
        """Returns the report of every variable's sharding, with a header about this job.

        Args:
          attention: lines about attention and expert kernels (`report_parts.of_forward_pass`), for the header.
          inputs: the layouts of the job's inputs (`report_parts.of_inputs`).
        """
        about = {
            "experiment": self.config.experiment.name,
            "date": time.strftime("%Y-%m-%d %H:%M"),
            "spmd-trainer": installed_version("spmd-trainer") or "from its source tree",
            "praxis": installed_version("praxis") or "from its source tree",
            **{name: kernel for name, _, kernel in (line.partition(": ") for line in attention)},
        }
        return sharding.ShardingReport(
            self.partitioner.metadata.records(), self.partitioner.mesh, about=about, inputs=inputs
        )


def make_partitioner(experiment: BaseExperiment) -> Partitioner:
    return experiment.partitioner() or pjit.PjitPartitioner()


@contextlib.contextmanager
def _errors_of_building(config: RunConfig) -> Iterator[None]:
    """Context manager that turns errors about settings into UserErrors that name the experiment and the user's line of code."""
    try:
        yield
    except MissingCompilerError:
        raise
    except UserError as error:
        raise UserError(first_paragraph(error)) from error
    except (ValueError, AssertionError) as error:  # praxis asserts what its layers need of their settings
        raised_by = user_code.library_line(error) if isinstance(error, AssertionError) else None
        parts = [first_paragraph(error), f"an assertion failed in {raised_by}" if raised_by else ""]
        where = user_code.where(error, type(config.experiment.experiment))
        raise UserError(f"experiment {config.experiment.label}: {'; '.join(filter(None, parts))}{where}") from error


def _use_mesh(
    config: RunConfig, task: SingleTask, partitioner: Partitioner, devices: Sequence[jax.Device] | None
) -> None:
    """Chooses the mesh, gives it to the partitioner, and logs the choice with its reason."""
    if not (config.mesh or devices is not None) and partitioner.has_own_mesh:
        return  # `partitioner()` chose the mesh; `setup` builds it
    experiment = config.experiment
    mesh, reason = choose_mesh(
        experiment.experiment, task.model, name=experiment.label, given=config.mesh, devices=devices
    )
    partitioner.use_mesh(mesh)
    device, is_host = mesh.devices.flat[0], mesh.devices.flat[0].platform == "cpu"
    count = count_text(mesh.size, "host device" if is_host else "device")
    what = f"{count} ({'no accelerator' if is_host else device.device_kind})"
    logging.info("%s: mesh %s on %s, %s", experiment.label, mesh_text(mesh.shape), what, reason)


def _topology_devices(topology: str, num_slices: int) -> Sequence[jax.Device]:
    devices: Sequence[jax.Device] = rooms.need("planner.topologies").topology_devices(topology, num_slices)
    return devices


def _declared_inputs(experiment: BaseExperiment) -> PyTree:
    """Returns ShapeDtypeStructs of one process's training batch, as the experiment declares it."""
    provider = pax_fiddle.build(experiment.get_input_specs_provider_params())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(tuple(x.shape), x.dtype), provider.get_input_specs())


def _scaled(rows: int, batch: BatchSettings, num_devices: int) -> int:
    scaled = rows * batch.batch_scale
    if scaled.denominator != 1:
        raise UserError(
            f"elastic_batch='scale': {rows} rows of each process become {scaled}, no whole number, on {num_devices} devices; "
            "choose another batch size, or 'whole' or 'accumulate'"
        )
    return int(scaled)


def _check_vocabulary(built: Any, task: SingleTask) -> None:
    """Refuses an input with a larger vocabulary than the model, because JAX allows out-of-bounds embedding lookups."""
    vocab_size = vocabulary_size(task)
    if vocab_size is None:
        return
    # A tokenizer may have further tokens that occur in few texts; a text with such a token is refused when it is read.
    tokens = getattr(built, "encoded_vocab_size", getattr(built, "vocab_size", None))
    if isinstance(tokens, int) and tokens > vocab_size:
        raise UserError(
            f"input {built.name!r} ({type(built).__name__}) gives tokens from 0 to {tokens - 1}, and "
            f"the model's vocab_size is {vocab_size}; set it to {tokens} or more"
        )
    if isinstance(built, CheckpointedInput):
        built.limit_vocabulary(vocab_size)
