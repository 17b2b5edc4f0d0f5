"""What every partitioner offers: the protocol that training, evaluation and decoding are written against.

`pjit.PjitPartitioner` and `shard_map.ShardMapPartitioner` implement it side by side; `mesh_partitioner.py` and `mesh_steps.py`
hold what they share. A partitioner of your own can use these too, wrap one of the two, or share nothing with them. An
experiment's `partitioner()` returns it.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import jax
from jax.sharding import Mesh

from spmd_trainer.sharding.specs import AnyMesh
from spmd_trainer.step.state_layout import StateMetadata
from spmd_trainer.tasks_lib import SingleTask
from spmd_trainer.train_states import NestedJTensor, NestedPartitionSpec, NestedShapeDtypeStruct, TrainState

# A pure step: (task, state, key, inputs, var_weight_hparams, ...) -> (new state or None, outputs). A partitioner may pass further
# arguments (`step_fns.train_step`), so a step of your own takes `*rest` and passes it on.
StepFn: TypeAlias = Callable[..., tuple[TrainState | None, Any]]
# What happens to the global batch on fewer devices: each device holds more rows; the same rows in more minibatches; fewer rows.
ElasticBatch: TypeAlias = Literal["whole", "accumulate", "scale"]


class CompiledStep(Protocol):
    """A jitted step on a mesh."""

    def __call__(self, state: TrainState, prng_key: jax.Array, inputs: NestedJTensor, /) -> tuple[Any, Any]:
        """Returns (new state or None, outputs); dispatches asynchronously."""

    def lower(
        self, state: TrainState, prng_key: jax.Array | jax.ShapeDtypeStruct, inputs: NestedJTensor, /
    ) -> jax.stages.Lowered:
        """Lowers the step for arrays or ShapeDtypeStructs, as `jax.jit(f).lower`."""

    def trace(
        self, state: TrainState, prng_key: jax.Array | jax.ShapeDtypeStruct, inputs: NestedJTensor, /
    ) -> jax.stages.Traced:
        """Traces the step for arrays or ShapeDtypeStructs, as `jax.jit(f).trace`."""


@dataclasses.dataclass(frozen=True)
class PartitionedStep:
    """A jitted step and how its inputs arrive.

    Attributes:
      fn: (state, prng_key, inputs) -> (new state or None, outputs).
      inputs_partition_spec: PartitionSpecs of the inputs, same structure.
      inputs_shape_dtype: padded global shapes of the inputs.
    """

    fn: CompiledStep
    inputs_partition_spec: NestedPartitionSpec
    inputs_shape_dtype: NestedShapeDtypeStruct


@runtime_checkable
class Partitioner(Protocol):
    """Puts a task's state and steps on a mesh.

    Attributes:
      task: the built task; set by `setup`.
      mesh: the device mesh; set by `setup`.
      metadata: one `VariableSpec` per variable; set by `setup`.
      num_minibatches: number of parts that training divides its rows into, one after the other.
      elastic: whether the run asks its experiment after each step which devices are available, and continues on them.
      elastic_batch: what happens to the global batch when the number of devices changes; see `PjitPartitioner`.
    """

    task: SingleTask
    mesh: Mesh
    metadata: StateMetadata
    num_minibatches: int
    elastic: bool
    elastic_batch: ElasticBatch

    @property
    @abc.abstractmethod
    def has_own_mesh(self) -> bool:
        """Whether the partitioner was given a mesh, or the devices for one, instead of using the mesh that the model declares."""

    @abc.abstractmethod
    def use_mesh(self, mesh: AnyMesh) -> None:
        """Replaces the mesh that the model declares. Call it before `setup`.

        Args:
          mesh: the mesh. An AbstractMesh is enough to read `metadata`; nothing can be compiled or placed on it.
        """

    @abc.abstractmethod
    def setup(self, task: SingleTask, inputs_shape_dtype: NestedShapeDtypeStruct) -> None:
        """Works out the layout of every variable. Allocates nothing on devices.

        Args:
          task: the built task.
          inputs_shape_dtype: ShapeDtypeStructs of the global training batch.

        Raises:
          ValueError: the mesh, a mapping, the batch or a setting don't fit each other; names the variable, input or field.
        """

    @abc.abstractmethod
    def eval_metadata(self) -> StateMetadata:
        """Returns the metadata of a state without optimizer states."""

    @abc.abstractmethod
    def mesh_shape(self) -> Mapping[str, int]:
        """Returns the size of each mesh axis, by name."""

    @abc.abstractmethod
    def init_fn(self, *, with_opt_states: bool = True) -> jax.stages.Wrapped:
        """Returns the jitted initialiser: key -> state, padded and sharded; no device holds a whole split variable.

        Values depend on the key alone, not on the mesh.
        """

    @abc.abstractmethod
    def initialize_train_state(self, prng_key: jax.Array, *, with_opt_states: bool = True) -> TrainState:
        """Runs `init_fn`. The layout of the state is the one in `metadata`."""

    @abc.abstractmethod
    def pad_inputs_shape_dtype(self, inputs_shape_dtype: NestedShapeDtypeStruct) -> NestedShapeDtypeStruct:
        """Returns the inputs' shapes with the batch dimension raised to the next multiple of the device count."""

    @abc.abstractmethod
    def inputs_partition_spec(self, inputs_shape_dtype: NestedShapeDtypeStruct) -> NestedPartitionSpec:
        """Returns how inputs arrive: dimension 0 over every mesh axis."""

    @abc.abstractmethod
    def preprocess_inputs(self, batch: Any, specs: NestedPartitionSpec) -> NestedJTensor:
        """Puts one process's rows of a batch on the devices, as part of the global batch.

        Adds rows up to a multiple of the process's devices; the step does not count them.

        Args:
          batch: numpy arrays [rows of this process, ...].
          specs: PartitionSpecs of the inputs.
        """

    @abc.abstractmethod
    def partition(self, step_fn: StepFn, inputs_shape_dtype: NestedShapeDtypeStruct, is_eval: bool) -> PartitionedStep:
        """Wraps a pure step for the mesh and jits it.

        Args:
          step_fn: the pure step.
          inputs_shape_dtype: ShapeDtypeStructs of the global batch, before any padding.
          is_eval: True for steps that take a state without optimizer states and return no state.
        """

    @abc.abstractmethod
    def abstract_state(self, *, with_opt_states: bool = True) -> TrainState:
        """Returns ShapeDtypeStructs of the padded state, with shardings, for ahead-of-time compilation."""

    @abc.abstractmethod
    def abstract_inputs(self, step: PartitionedStep) -> NestedShapeDtypeStruct:
        """Returns ShapeDtypeStructs of a step's padded global inputs, with shardings."""

    @abc.abstractmethod
    def rows_to_split(self, num_rows: int, num_devices: int) -> int:
        """Returns the number of rows that `num_minibatches` must divide.

        Args:
          num_rows: rows of the global batch.
          num_devices: devices of the mesh.
        """
