"""From a pure step to a step on a mesh: specs, padding, sharded initialisation, jit.

What a partitioned step does, in order (`PjitPartitioner._wrap`): inputs arrive split on the batch dimension over the whole
mesh; they are resharded by rank; padding is sliced off the state; the pure step of `step_fns` runs on logical shapes; the new
state is padded again. The state goes out in its own shardings, its buffers donated; everything else comes out replicated.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmd_trainer import sharding, state_specs, step_fns
from spmd_trainer.state_specs import StateMetadata
from spmd_trainer.tasks_lib import SingleTask
from spmd_trainer.train_states import TrainState

StepFn = Callable[..., tuple[Any, Any]]
# (state, key, inputs) -> (new state or None, outputs)
PartitionedStepFn = Callable[[TrainState, jax.Array, Any], tuple[Any, Any]]
# Name of the one axis of a model that declares no mesh: data-parallel over all devices.
DEFAULT_AXIS = "data"


def mesh_from_model(model: Any, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Builds the mesh a praxis model (or its config) declares.

    Args:
      model: has `ici_mesh_shape`, `dcn_mesh_shape` (over slices or hosts; may be None) and `mesh_axis_names`.
      devices: the devices to use; None for all.

    Raises:
      ValueError: names and sizes don't fit each other or the devices.
    """
    ici, dcn, names = model.ici_mesh_shape, model.dcn_mesh_shape, model.mesh_axis_names
    if ici is None:
        return sharding.create_device_mesh([(DEFAULT_AXIS, -1)], devices=devices)
    if names is None or len(names) != len(ici):
        raise ValueError(
            f"task.model.mesh_axis_names is {names} and task.model.ici_mesh_shape is {list(ici)}: one name per size is needed"
        )
    if dcn is not None and any(size != 1 for size in dcn):
        return sharding.create_hybrid_mesh(list(ici), list(dcn), list(names), devices=devices)
    return sharding.create_device_mesh(list(zip(names, ici, strict=True)), devices=devices)


@dataclasses.dataclass(frozen=True)
class PartitionedStep:
    """A jitted step and how its inputs arrive.

    Attributes:
      fn: (state, prng_key, inputs) -> (new state or None, outputs); dispatches asynchronously.
      inputs_partition_spec: PartitionSpecs of the inputs, same structure.
      inputs_shape_dtype: padded global shapes of the inputs.
    """

    fn: Any
    inputs_partition_spec: Any
    inputs_shape_dtype: Any


class PjitPartitioner:
    """Partitions a task's steps over its mesh with `jax.jit`.

    Attributes:
      task: the built task.
      mesh: the device mesh.
      metadata: one `VariableSpec` per variable, set by `setup`.
    """

    def __init__(self, mesh: Mesh | None = None, *, devices: Sequence[jax.Device] | None = None):
        """Uses `mesh`, or builds the one that the task's model declares out of `devices` (None for all)."""
        self._given_mesh = mesh
        self._devices = devices
        self.task: SingleTask
        self.mesh: Mesh
        self.metadata: StateMetadata
        self._inputs_shape_dtype: Any = None

    def setup(self, task: SingleTask, inputs_shape_dtype: Any) -> None:
        """Works out where every variable lives. Nothing is allocated.

        Args:
          task: the built task.
          inputs_shape_dtype: ShapeDtypeStructs of the global training batch.

        Raises:
          ValueError: a mapping that the mesh or a variable doesn't allow, with the path.
        """
        self.task = task
        self.mesh = self._given_mesh or mesh_from_model(task.model, self._devices)
        mapping = task.train.inputs_split_mapping
        if mapping is not None:
            sharding.validate_split_mapping(mapping, self.mesh.axis_names)
            sharding.input_partition_specs(mapping, dict(self.mesh.shape), inputs_shape_dtype)
        self._inputs_shape_dtype = inputs_shape_dtype
        self.metadata = state_specs.build(task, inputs_shape_dtype, self.mesh)

    def eval_metadata(self) -> StateMetadata:
        """The metadata of a state without optimizer states."""
        return self.metadata.without_opt_states()

    def _shardings(self, specs: Any) -> Any:
        return jax.tree.map(
            functools.partial(NamedSharding, self.mesh), specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
        )

    # --- initialisation -------------------------------------------------------------------------------------------

    def init_fn(self, *, with_opt_states: bool = True) -> Any:
        """Returns the jitted initialiser: key -> state, padded and sharded; no device holds a whole split variable.

        Values depend on the key alone, not on the mesh.
        """
        metadata = self.metadata if with_opt_states else self.eval_metadata()

        def init(prng_key: jax.Array) -> TrainState:
            inputs = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self._inputs_shape_dtype)
            mdl_vars = step_fns.init_model_vars(self.task, prng_key, inputs)
            state = step_fns.create_train_state(
                self.task, mdl_vars, metadata.var_weight_hparams, with_opt_states=with_opt_states
            )
            return metadata.pad(state)

        return jax.jit(init, out_shardings=metadata.shardings)

    def initialize_train_state(self, prng_key: jax.Array, *, with_opt_states: bool = True) -> TrainState:
        """Runs `init_fn`. The state is laid out as `metadata` says."""
        return self.init_fn(with_opt_states=with_opt_states)(prng_key)

    # --- inputs ---------------------------------------------------------------------------------------------------

    def pad_inputs_shape_dtype(self, inputs_shape_dtype: Any) -> Any:
        """Returns the inputs' shapes with the batch dimension raised to the next multiple of the device count."""
        devices = self.mesh.size

        def pad(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((-(-x.shape[0] // devices) * devices, *x.shape[1:]), x.dtype)

        return jax.tree.map(pad, inputs_shape_dtype)

    def inputs_partition_spec(self, inputs_shape_dtype: Any) -> Any:
        """Returns how inputs arrive: dimension 0 over every mesh axis."""
        return jax.tree.map(
            functools.partial(sharding.shard_on_batch_dim_partition_spec, self.mesh.axis_names), inputs_shape_dtype
        )

    def preprocess_inputs(self, batch: Any, specs: Any) -> Any:
        """Puts one process's rows of a batch on the devices, as part of the global batch.

        Rows that are missing to a multiple of the devices are filled with zeros; the step slices them off again.

        Args:
          batch: numpy arrays [rows of this process, ...].
          specs: PartitionSpecs of the inputs.
        """
        shards = max(1, self.mesh.size // jax.process_count())

        def pad(x: Any) -> np.ndarray:
            missing = -len(x) % shards
            return np.pad(x, [(0, missing)] + [(0, 0)] * (np.ndim(x) - 1)) if missing else np.asarray(x)

        batch = jax.tree.map(pad, batch)
        shardings = self._shardings(specs)
        if jax.process_count() == 1:
            return jax.device_put(batch, shardings)
        return jax.tree.map(lambda x, s: jax.make_array_from_process_local_data(s, x), batch, shardings)

    # --- steps ----------------------------------------------------------------------------------------------------

    def partition(self, step_fn: StepFn, inputs_shape_dtype: Any, is_eval: bool) -> PartitionedStep:
        """Wraps a pure step for the mesh and jits it.

        Args:
          step_fn: (task, state, key, inputs, var_weight_hparams) -> (new state or None, outputs), as in `step_fns`.
          inputs_shape_dtype: ShapeDtypeStructs of the global batch, before any padding.
          is_eval: True for steps that take a state without optimizer states and give none back.
        """
        metadata = self.eval_metadata() if is_eval else self.metadata
        padded = self.pad_inputs_shape_dtype(inputs_shape_dtype)
        specs = self.inputs_partition_spec(padded)
        replicated = NamedSharding(self.mesh, PartitionSpec())
        jitted = jax.jit(
            self._wrap(step_fn, metadata, inputs_shape_dtype),
            in_shardings=(metadata.shardings, replicated, self._shardings(specs)),
            out_shardings=(None if is_eval else metadata.shardings, replicated),
            donate_argnums=() if is_eval else (0,),
        )
        return PartitionedStep(_InMesh(jitted, self.mesh), specs, padded)

    def _wrap(self, step_fn: StepFn, metadata: StateMetadata, inputs_shape_dtype: Any) -> PartitionedStepFn:
        mapping = self.task.train.inputs_split_mapping

        def step(state: TrainState, prng_key: jax.Array, inputs: Any) -> tuple[Any, Any]:
            inputs = jax.tree.map(lambda x, logical: x[: logical.shape[0]], inputs, inputs_shape_dtype)
            # A batch that its axes don't divide is padded by the compiler inside the program, at its own cost.
            inputs = sharding.reshard_inputs(mapping, dict(self.mesh.shape), inputs, mesh=self.mesh, allow_uneven=True)
            state = metadata.slice(state)
            new_state, outputs = step_fn(self.task, state, prng_key, inputs, metadata.var_weight_hparams)
            return (None if new_state is None else metadata.pad(new_state)), outputs

        return step

    # --- what other layers ask ------------------------------------------------------------------------------------

    def abstract_state(self, *, with_opt_states: bool = True) -> TrainState:
        """Returns ShapeDtypeStructs of the padded state, with shardings, for ahead-of-time compilation."""
        return (self.metadata if with_opt_states else self.eval_metadata()).padded_shapes

    def abstract_inputs(self, step: PartitionedStep) -> Any:
        """Returns ShapeDtypeStructs of a step's padded global inputs, with shardings."""
        return jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self.mesh, spec)),
            step.inputs_shape_dtype,
            step.inputs_partition_spec,
        )

    def mesh_shape(self) -> Mapping[str, int]:
        """The mesh's sizes by axis name."""
        return dict(self.mesh.shape)


class _InMesh:
    """A jitted function whose tracing sees the mesh, so that layers' own sharding constraints apply."""

    def __init__(self, jitted: Any, mesh: Mesh):
        self._jitted = jitted
        self._mesh = mesh

    def __call__(self, *args: Any) -> Any:
        with jax.set_mesh(self._mesh):
            return self._jitted(*args)

    def lower(self, *args: Any) -> Any:
        """As `jax.jit(f).lower`."""
        with jax.set_mesh(self._mesh):
            return self._jitted.lower(*args)


def build_task(task_p: Any) -> SingleTask:
    """Builds a task from its config, or returns a built one."""
    if isinstance(task_p, SingleTask):
        return task_p
    from praxis import pax_fiddle

    return pax_fiddle.build(task_p)
