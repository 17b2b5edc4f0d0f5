"""The part that both partitioners have in common: settings, mesh, initialisation and inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import jax

from spmd_trainer.sharding.specs import AnyMesh
from spmd_trainer.step import state_layout
from spmd_trainer.step.mesh_steps import MeshSteps, RowPadding
from spmd_trainer.step.model_mesh import MeshSource
from spmd_trainer.step.partitioner import ElasticBatch, PartitionedStep, Partitioner
from spmd_trainer.step.state_layout import StateMetadata
from spmd_trainer.tasks_lib import SingleTask
from spmd_trainer.train_states import NestedJTensor, NestedPartitionSpec, NestedShapeDtypeStruct, TrainState


class MeshPartitioner(Partitioner):
    """A partitioner on `MeshSteps`. A concrete one adds `setup`, `partition` and `rows_to_split`.

    Attributes:
      steps: the task on the mesh; set by `build_steps`.
    """

    def __init__(
        self,
        mesh: AnyMesh | None,
        devices: Sequence[jax.Device] | None,
        num_minibatches: int,
        elastic: bool,
        elastic_batch: ElasticBatch,
    ):
        """Stores the settings.

        Args:
          mesh: the mesh; None for the one that the task's model declares.
          devices: the devices for the mesh that the model declares; None for all.
          num_minibatches: see `Partitioner`.
          elastic: see `Partitioner`.
          elastic_batch: see `Partitioner`.

        Raises:
          ValueError: a setting has a value that doesn't exist.
        """
        name = type(self).__name__
        if num_minibatches < 1:
            raise ValueError(f"{name}: num_minibatches is {num_minibatches}; it must be at least 1")
        if elastic_batch not in get_args(ElasticBatch):
            raise ValueError(f"{name}: elastic_batch is {elastic_batch!r}; it must be one of {get_args(ElasticBatch)}")
        self.num_minibatches = num_minibatches
        self.elastic = elastic
        self.elastic_batch = elastic_batch
        self._mesh_source = MeshSource(mesh, devices)
        self.steps: MeshSteps

    @property
    def has_own_mesh(self) -> bool:
        """See `Partitioner.has_own_mesh`."""
        return self._mesh_source.is_given

    def use_mesh(self, mesh: AnyMesh) -> None:
        """See `Partitioner.use_mesh`."""
        self._mesh_source = MeshSource(mesh)

    def build_steps(
        self,
        task: SingleTask,
        inputs_shape_dtype: NestedShapeDtypeStruct,
        row_padding: RowPadding,
        plan: state_layout.Plan | None = None,
    ) -> None:
        """Sets `task`, `mesh`, `steps` and `metadata`; the part of `setup` that all partitioners share.

        Args:
          task: the built task.
          inputs_shape_dtype: ShapeDtypeStructs of the global training batch.
          row_padding: how the rows that a batch lacks to a multiple of the devices are filled.
          plan: decides the layout of every variable, instead of the layers; see `state_layout.build`.

        Raises:
          ValueError: as `setup`.
        """
        self.task = task
        self.mesh = self._mesh_source.resolve(task.model)
        self.steps = MeshSteps.build(task, self.mesh, inputs_shape_dtype, row_padding, plan)
        self.metadata = self.steps.metadata

    def eval_metadata(self) -> StateMetadata:
        """See `Partitioner.eval_metadata`."""
        return self.metadata.without_opt_states()

    def mesh_shape(self) -> Mapping[str, int]:
        """See `Partitioner.mesh_shape`."""
        return dict(self.mesh.shape)

    def init_fn(self, *, with_opt_states: bool = True) -> jax.stages.Wrapped:
        """See `Partitioner.init_fn`."""
        return self.steps.init_fn(with_opt_states=with_opt_states)

    def initialize_train_state(self, prng_key: jax.Array, *, with_opt_states: bool = True) -> TrainState:
        """See `Partitioner.initialize_train_state`."""
        state: TrainState = self.init_fn(with_opt_states=with_opt_states)(prng_key)
        return state

    def pad_inputs_shape_dtype(self, inputs_shape_dtype: NestedShapeDtypeStruct) -> NestedShapeDtypeStruct:
        """See `Partitioner.pad_inputs_shape_dtype`."""
        return self.steps.pad_inputs_shape_dtype(inputs_shape_dtype)

    def inputs_partition_spec(self, inputs_shape_dtype: NestedShapeDtypeStruct) -> NestedPartitionSpec:
        """See `Partitioner.inputs_partition_spec`."""
        return self.steps.inputs_partition_spec(inputs_shape_dtype)

    def preprocess_inputs(self, batch: Any, specs: NestedPartitionSpec) -> NestedJTensor:
        """See `Partitioner.preprocess_inputs`."""
        return self.steps.preprocess_inputs(batch, specs)

    def abstract_state(self, *, with_opt_states: bool = True) -> TrainState:
        """See `Partitioner.abstract_state`."""
        return self.steps.metadata_for(with_opt_states=with_opt_states).padded_shapes

    def abstract_inputs(self, step: PartitionedStep) -> NestedShapeDtypeStruct:
        """See `Partitioner.abstract_inputs`."""
        return self.steps.abstract_inputs(step)
