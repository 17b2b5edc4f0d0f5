"""A compiled step on a mesh, and how it is made of a pure step and a layout."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmd_trainer.sharding.even_program import evenly
from spmd_trainer.step.layout import Layout
from spmd_trainer.train_states import NestedJTensor, NestedPartitionSpec, NestedShapeDtypeStruct, TrainState

# A pure step: (layout, state, key, inputs, ...) -> (new state or None, outputs). A partitioner may pass a pass of its own as a
# fifth argument (`step_fns.train_step`), so a step of your own takes `*rest` and passes it on.
StepFn: TypeAlias = Callable[..., tuple[TrainState | None, Any]]
# Padded variables and inputs, as the devices hold them -> its own `step_fns.GradFn` or `EvalFn`.
OwnPass: TypeAlias = Callable[[NestedJTensor, NestedJTensor], Callable[..., Any]]


class CompiledStep:
    """A jitted step. It is traced with the mesh set, so that layers' own sharding constraints apply.

    Attributes:
      layout: the layout of the state that it takes.
      inputs_shape_dtype: padded global shapes of the inputs.
      inputs_partition_spec: PartitionSpecs of the inputs, same structure.
    """

    def __init__(self, jitted: jax.stages.Wrapped, layout: Layout, inputs_shape_dtype: NestedShapeDtypeStruct):
        """Compiles nothing yet.

        Args:
          jitted: (state, prng_key, inputs) -> (new state or None, outputs).
          layout: the layout of the state.
          inputs_shape_dtype: padded global shapes of the inputs.
        """
        self._jitted = jitted
        self.layout = layout
        self.inputs_shape_dtype = inputs_shape_dtype
        self.inputs_partition_spec: NestedPartitionSpec = layout.inputs_partition_spec(inputs_shape_dtype)

    def __call__(self, state: TrainState, prng_key: jax.Array, inputs: NestedJTensor, /) -> Any:
        """Returns (new state or None, outputs); dispatches asynchronously.

        Args:
          state: a padded state of `layout`; a step that returns a new one donates it.
          prng_key: the run's key.
          inputs: the batch, as `layout.put` returns it.
        """
        with jax.set_mesh(self.layout.mesh):
            return self._jitted(state, prng_key, inputs)

    def lower(self, prng_key: jax.Array | jax.ShapeDtypeStruct) -> jax.stages.Lowered:
        """Lowers the step as `jax.jit(f).lower`; needs no arrays."""
        with jax.set_mesh(self.layout.mesh):
            return self._jitted.lower(*self.arguments(prng_key))

    def trace(self, prng_key: jax.Array | jax.ShapeDtypeStruct) -> jax.stages.Traced:
        """Traces the step as `jax.jit(f).trace`; needs no arrays."""
        with jax.set_mesh(self.layout.mesh):
            return self._jitted.trace(*self.arguments(prng_key))

    def arguments(self, prng_key: jax.Array | jax.ShapeDtypeStruct) -> tuple[TrainState, Any, NestedShapeDtypeStruct]:
        """Returns the step's arguments for a key: ShapeDtypeStructs of the padded state and inputs, with shardings."""
        inputs = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            self.inputs_shape_dtype,
            self.layout.inputs_shardings(self.inputs_shape_dtype),
        )
        return self.layout.padded_shapes, prng_key, inputs


def compile_step(
    layout: Layout,
    step_fn: StepFn,
    inputs_shape_dtype: NestedShapeDtypeStruct,
    *,
    is_eval: bool,
    own_pass: OwnPass | None = None,
) -> CompiledStep:
    """Wraps a pure step for the mesh and jits it.

    The step, in order: inputs arrive split on the batch dimension over the whole mesh; added rows are removed; the inputs
    are resharded by rank; padding is sliced off the state; the pure step runs on logical shapes; the new state is padded.
    The state leaves in its own shardings, with its buffers donated; everything else leaves replicated.

    Args:
      layout: the layout of the state, as the pure step sees it.
      step_fn: the pure step.
      inputs_shape_dtype: ShapeDtypeStructs of the global batch, before any padding.
      is_eval: True for steps that return no state.
      own_pass: makes what the partitioner passes to `step_fn` instead of the pass of `step_fns`.
    """

    def step(state: TrainState, prng_key: jax.Array, inputs: NestedJTensor) -> tuple[TrainState | None, Any]:
        rows = layout.reshard(jax.tree.map(layout.without_added, inputs, inputs_shape_dtype))
        logical = layout.slice(state)
        own = () if own_pass is None else (own_pass(state.mdl_vars, inputs),)
        new_state, outputs = step_fn(layout, logical, prng_key, rows, *own)
        return (None if new_state is None else layout.pad(new_state)), outputs

    padded = layout.pad_inputs_shape_dtype(inputs_shape_dtype)
    replicated = NamedSharding(layout.mesh, PartitionSpec())
    jitted = jax.jit(
        evenly(
            step,
            layout.mesh,
            None if is_eval else _recommend_verify,
            [x.spec for x in jax.tree.leaves(layout.shardings)],
            returns_variables=not is_eval,
        ),
        in_shardings=(layout.shardings, replicated, layout.inputs_shardings(padded)),
        out_shardings=(None if is_eval else layout.shardings, replicated),
        donate_argnums=() if is_eval else (0,),
        compiler_options=_options_without_gpus(layout.mesh),
    )
    return CompiledStep(jitted, layout, padded)


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
