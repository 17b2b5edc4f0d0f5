"""`CompiledStep`, a jitted step on a mesh, and `compile_step`, which makes it from a pure step and a layout."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmd_trainer.sharding.even_program import evenly
from spmd_trainer.step.layout import Layout
from spmd_trainer.train_states import NestedJTensor, NestedPartitionSpec, NestedShapeDtypeStruct, TrainState

# A pure step: (layout, state, key, inputs, ...) -> (new state or None, outputs). A partitioner may give its own forward (and
# backward) pass as fifth argument, see `step_fns.train_step`, so a step of your own takes `*rest` and hands it on.
StepFn: TypeAlias = Callable[..., tuple[TrainState | None, Any]]
# Padded variables and inputs, as the devices hold them -> the partitioner's `step_fns.GradFn` or `EvalFn`.
OwnPass: TypeAlias = Callable[[NestedJTensor, NestedJTensor], Callable[..., Any]]


class CompiledStep:
    """A jitted train, eval or decode step, traced under `jax.set_mesh`, so that sharding constraints inside layers apply.

    Attributes:
      layout: the layout of the state that the step takes.
      inputs_shape_dtype: ShapeDtypeStructs of the padded global batch.
      inputs_partition_spec: PartitionSpecs of the global batch, in the structure of `inputs_shape_dtype`.
    """

    def __init__(self, jitted: jax.stages.Wrapped, layout: Layout, inputs_shape_dtype: NestedShapeDtypeStruct):
        """Wraps a jitted function. Compilation happens at the first call.

        Args:
          jitted: the function, (state, prng_key, inputs) -> (new state or None, outputs).
          layout: the layout of the state.
          inputs_shape_dtype: ShapeDtypeStructs of the padded global batch.
        """
        self._jitted = jitted
        self.layout = layout
        self.inputs_shape_dtype = inputs_shape_dtype
        self.inputs_partition_spec: NestedPartitionSpec = layout.inputs_partition_spec(inputs_shape_dtype)

    def __call__(self, state: TrainState, prng_key: jax.Array, inputs: NestedJTensor, /) -> Any:
        """Runs the step and returns (new state or None, outputs); dispatches asynchronously.

        Args:
          state: a padded state of `layout`; it is donated if the step returns a new state.
          prng_key: the run's PRNG key.
          inputs: the batch, as `layout.put` returns it.
        """
        with jax.set_mesh(self.layout.mesh):
            return self._jitted(state, prng_key, inputs)

    def lower(self, prng_key: jax.Array | jax.ShapeDtypeStruct) -> jax.stages.Lowered:
        """Lowers the step for abstract arguments, like `jax.jit(f).lower`."""
        with jax.set_mesh(self.layout.mesh):
            return self._jitted.lower(*self.arguments(prng_key))

    def trace(self, prng_key: jax.Array | jax.ShapeDtypeStruct) -> jax.stages.Traced:
        """Traces the step for abstract arguments, like `jax.jit(f).trace`."""
        with jax.set_mesh(self.layout.mesh):
            return self._jitted.trace(*self.arguments(prng_key))

    def arguments(self, prng_key: jax.Array | jax.ShapeDtypeStruct) -> tuple[TrainState, Any, NestedShapeDtypeStruct]:
        """Returns abstract arguments (state, prng_key, inputs) for the step: padded ShapeDtypeStructs with shardings."""
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

    The jitted step takes inputs whose batch dimension is sharded over the whole mesh. It removes the rows that `Layout.put`
    added, reshards the inputs by `inputs_split_mapping`, slices the padding off the state, runs the pure step on logical
    (unpadded) shapes, and pads the new state. The new state has the shardings of the old one, whose buffers are donated. All
    other outputs are replicated.

    Args:
      layout: the layout of the state that the step takes.
      step_fn: the pure step.
      inputs_shape_dtype: ShapeDtypeStructs of the global batch, before any padding.
      is_eval: True for steps that return no state.
      own_pass: (padded variables, padded inputs) -> a `step_fns.GradFn` or `EvalFn`. If given, `step_fn` gets this GradFn or
        EvalFn as its last argument, and calls it instead of its default forward (and backward) pass.
    """

    def step(state: TrainState, prng_key: jax.Array, inputs: NestedJTensor) -> tuple[TrainState | None, Any]:
        rows = layout.reshard(jax.tree.map(layout.without_added, inputs, inputs_shape_dtype))
        logical = layout.slice(state)
        own = () if own_pass is None else (own_pass(state.mdl_vars, inputs),)
        new_state, outputs = step_fn(layout, logical, prng_key, rows, *own)
        return (None if new_state is None else layout.pad(new_state)), outputs

    padded = layout.pad_inputs_shape_dtype(inputs_shape_dtype)
    replicated = NamedSharding(layout.mesh, PartitionSpec())
    in_shardings = (layout.shardings, replicated, layout.inputs_shardings(padded))
    jitted = jax.jit(
        evenly(
            step,
            layout.mesh,
            None if is_eval else _recommend_verify,
            [x.spec for x in jax.tree.leaves(layout.shardings)],
            returns_variables=not is_eval,
            others=jax.tree.leaves(in_shardings[1:]),
        ),
        in_shardings=in_shardings,
        out_shardings=(None if is_eval else layout.shardings, replicated),
        donate_argnums=() if is_eval else (0,),
        compiler_options=_options_without_gpus(layout.mesh),
    )
    return CompiledStep(jitted, layout, padded)


def _recommend_verify(places: Sequence[str], padded: Sequence[str]) -> None:
    """Logs the warnings `padded`. Recommends --mode=verify if the model has its own sharding constraints, at `places`."""
    for note in padded:
        logging.warning("%s", note)
    if places:
        logging.info(
            "the model has sharding constraints of its own (%s); --mode=verify compares a few steps with one device",
            ", ".join(places[:3]) + (", ..." if len(places) > 3 else ""),
        )


def _options_without_gpus(mesh: Mesh) -> dict[str, Any] | None:
    """Returns compiler options that turn off Triton's matrix products if a mesh has GPUs and this process has none; else None.

    The compiler chooses the tile sizes of these products by measuring on a GPU. Without a GPU, small shapes get no tile size.
    """
    platform = mesh.devices.flat[0].platform
    is_here = platform in ("cpu", "tpu") or jax.default_backend() == "gpu"
    return None if is_here else {"xla_gpu_enable_triton_gemm": False}
