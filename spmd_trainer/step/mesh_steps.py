"""What all partitioners share: sharded initialisation, padded inputs, and jit of a step on a mesh."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from praxis import base_layer

from spmd_trainer import sharding
from spmd_trainer.sharding.even_program import evenly
from spmd_trainer.step import batch_padding, initialization, state_layout
from spmd_trainer.step.partitioner import CompiledStep, PartitionedStep, StepFn
from spmd_trainer.step.state_layout import StateMetadata
from spmd_trainer.step.step_fns import Padded
from spmd_trainer.step.step_view import StepView
from spmd_trainer.tasks_lib import SingleTask
from spmd_trainer.train_states import (
    NestedJTensor,
    NestedPartitionSpec,
    NestedShapeDtypeStruct,
    PyTree,
    TrainState,
)

# How `numpy.pad` fills the rows that a batch lacks to a multiple of the devices.
RowPadding: TypeAlias = Literal["constant", "wrap"]
# Padded variables and inputs -> the arguments of a step function after `var_weight_hparams`.
ExtraArgs: TypeAlias = Callable[[Padded], tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class MeshSteps:
    """A task on a mesh.

    Attributes:
      task: the built task.
      mesh: the device mesh.
      metadata: the layout of the train state.
      init_variables: `initialization.variables_initialiser` of the task.
      row_padding: how missing rows of a batch are filled.
    """

    task: SingleTask
    mesh: Mesh
    metadata: StateMetadata
    init_variables: Callable[[jax.Array], NestedJTensor]
    row_padding: RowPadding

    @classmethod
    def build(
        cls,
        task: SingleTask,
        mesh: Mesh,
        inputs_shape_dtype: NestedShapeDtypeStruct,
        row_padding: RowPadding,
        plan: state_layout.Plan | None = None,
    ) -> MeshSteps:
        """Checks the task's input mappings and works out the layout of its state. Allocates nothing on devices.

        Args:
          task: the built task.
          mesh: the device mesh.
          inputs_shape_dtype: ShapeDtypeStructs of the global training batch.
          row_padding: how missing rows of a batch are filled.
          plan: see `state_layout.build`.

        Raises:
          ValueError: a mapping that the mesh or a variable doesn't allow, with the path.
        """
        mapping = task.train.inputs_split_mapping
        if mapping is not None:
            sharding.validate_split_mapping(mapping, mesh.axis_names, inputs_shape_dtype)
            specs = sharding.input_partition_specs(mapping, dict(mesh.shape), inputs_shape_dtype)
            for note in batch_padding.notes(inputs_shape_dtype, specs, dict(mesh.shape)):
                logging.warning("%s", note)
        init_variables = initialization.variables_initialiser(task, inputs_shape_dtype)
        metadata = state_layout.build(task, init_variables, mesh, plan)
        return cls(task, mesh, metadata, init_variables, row_padding)

    def metadata_for(self, *, with_opt_states: bool) -> StateMetadata:
        """Returns the metadata of the state, with or without optimizer states."""
        return self.metadata if with_opt_states else self.metadata.without_opt_states()

    def init_fn(self, *, with_opt_states: bool) -> jax.stages.Wrapped:
        """See `Partitioner.init_fn`."""
        metadata = self.metadata_for(with_opt_states=with_opt_states)

        def init(prng_key: jax.Array) -> TrainState:
            mdl_vars = base_layer.maybe_unbox_value(self.init_variables(prng_key))
            state = initialization.create_train_state(
                self.task, mdl_vars, metadata.var_weight_hparams, with_opt_states=with_opt_states
            )
            return metadata.pad(state)

        # It runs once, so compiling it must be cheap: on CPU this level halves the compile time and gives the same values.
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        options: dict[str, Any] | None = {"xla_backend_optimization_level": 1} if on_cpu else None
        return jax.jit(init, out_shardings=metadata.shardings, compiler_options=options)

    def pad_inputs_shape_dtype(self, inputs_shape_dtype: NestedShapeDtypeStruct) -> NestedShapeDtypeStruct:
        """See `Partitioner.pad_inputs_shape_dtype`."""
        return jax.tree.map(functools.partial(batch_padding.padded_shape, self.mesh.size), inputs_shape_dtype)

    def inputs_partition_spec(self, inputs_shape_dtype: NestedShapeDtypeStruct) -> NestedPartitionSpec:
        """See `Partitioner.inputs_partition_spec`."""
        spec_of = functools.partial(sharding.shard_on_batch_dim_partition_spec, self.mesh.axis_names)
        return jax.tree.map(spec_of, inputs_shape_dtype)

    def preprocess_inputs(self, batch: Any, specs: NestedPartitionSpec) -> NestedJTensor:
        """See `Partitioner.preprocess_inputs`. Missing rows are filled as `row_padding` says."""
        shards = max(1, self.mesh.size // jax.process_count())
        batch = jax.tree.map(lambda x: batch_padding.pad(x, shards, self.row_padding), batch)
        return batch_padding.place(batch, self._shardings(specs))

    def reshard_inputs(self, inputs: NestedJTensor) -> NestedJTensor:
        """Splits inputs as the task's `inputs_split_mapping` says. Under jit."""
        mapping = self.task.train.inputs_split_mapping
        # If the axes don't divide the batch, `evenly` pads it.
        return sharding.reshard_inputs(mapping, dict(self.mesh.shape), inputs, mesh=self.mesh, allow_uneven=True)

    def partition(
        self,
        step_fn: StepFn,
        inputs_shape_dtype: NestedShapeDtypeStruct,
        view: StepView,
        *,
        is_eval: bool,
        extra_args: ExtraArgs = lambda padded: (),
    ) -> PartitionedStep:
        """Wraps a pure step for the mesh and jits it.

        The step, in order: inputs arrive split on the batch dimension over the whole mesh; added rows are removed; the inputs
        are resharded by rank; padding is sliced off the state; the pure step runs on logical shapes; the new state is padded.
        The state leaves in its own shardings, with its buffers donated; everything else leaves replicated.

        Args:
          step_fn: the pure step.
          inputs_shape_dtype: ShapeDtypeStructs of the global batch, before any padding.
          view: the state as the pure step sees it.
          is_eval: True for steps that return no state.
          extra_args: padded variables and inputs -> further arguments of `step_fn`.
        """

        def step(state: TrainState, prng_key: jax.Array, inputs: NestedJTensor) -> tuple[TrainState | None, Any]:
            rows = jax.tree.map(functools.partial(batch_padding.without_added, self.mesh), inputs, inputs_shape_dtype)
            rows, logical = self.reshard_inputs(rows), view.slice(state)
            extra = extra_args(Padded(state.mdl_vars, inputs))
            new_state, outputs = step_fn(view.task, logical, prng_key, rows, view.metadata.var_weight_hparams, *extra)
            return (None if new_state is None else view.pad(new_state)), outputs

        padded = self.pad_inputs_shape_dtype(inputs_shape_dtype)
        specs = self.inputs_partition_spec(padded)
        replicated = NamedSharding(self.mesh, PartitionSpec())
        jitted = jax.jit(
            evenly(
                step,
                self.mesh,
                None if is_eval else _recommend_verify,
                [x.spec for x in jax.tree.leaves(view.logical.shardings)],
            ),
            in_shardings=(view.logical.shardings, replicated, self._shardings(specs)),
            out_shardings=(None if is_eval else view.logical.shardings, replicated),
            donate_argnums=() if is_eval else (0,),
            compiler_options=_options_without_gpus(self.mesh),
        )
        return PartitionedStep(_InMesh(jitted, self.mesh), specs, padded)

    def abstract_inputs(self, step: PartitionedStep) -> NestedShapeDtypeStruct:
        """See `Partitioner.abstract_inputs`."""
        return jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self.mesh, spec)),
            step.inputs_shape_dtype,
            step.inputs_partition_spec,
        )

    def _shardings(self, specs: NestedPartitionSpec) -> PyTree:
        return jax.tree.map(
            functools.partial(NamedSharding, self.mesh), specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
        )


def _recommend_verify(places: Sequence[str], padded: Sequence[str]) -> None:
    """Logs what is known of the program's own sharding constraints."""
    for note in padded:
        logging.warning("%s", note)
    if places:
        logging.info(
            "the model has sharding constraints of its own (%s); --mode=verify compares a few steps with one device",
            ", ".join(places[:3]) + (", ..." if len(places) > 3 else ""),
        )


def _options_without_gpus(mesh: Mesh) -> dict[str, Any] | None:
    """Returns the compiler's options for a mesh of GPUs that are not here; None for other meshes.

    Triton's products need tile sizes, which the compiler measures on a GPU. Without one it finds none for small shapes.
    """
    platform = mesh.devices.flat[0].platform
    is_here = platform in ("cpu", "tpu") or jax.default_backend() == "gpu"
    return None if is_here else {"xla_gpu_enable_triton_gemm": False}


class _InMesh(CompiledStep):
    """A jitted step that is traced with the mesh set, so that layers' own sharding constraints apply."""

    def __init__(self, jitted: jax.stages.Wrapped, mesh: Mesh):
        self._jitted = jitted
        self._mesh = mesh

    def __call__(self, state: TrainState, prng_key: jax.Array, inputs: NestedJTensor, /) -> Any:
        with jax.set_mesh(self._mesh):
            return self._jitted(state, prng_key, inputs)

    def lower(
        self, state: TrainState, prng_key: jax.Array | jax.ShapeDtypeStruct, inputs: NestedJTensor, /
    ) -> jax.stages.Lowered:
        """As `jax.jit(f).lower`."""
        with jax.set_mesh(self._mesh):
            return self._jitted.lower(state, prng_key, inputs)

    def trace(
        self, state: TrainState, prng_key: jax.Array | jax.ShapeDtypeStruct, inputs: NestedJTensor, /
    ) -> jax.stages.Traced:
        """As `jax.jit(f).trace`."""
        with jax.set_mesh(self._mesh):
            return self._jitted.trace(state, prng_key, inputs)
