"""`Partitioner`, the base class of partitioners. `setup` makes the `Layout` of a task, `partition` makes a `CompiledStep`.

`pjit.PjitPartitioner` and `shard_map.ShardMapPartitioner` are its subclasses; you can write your own subclass too. An
experiment's `partitioner()` returns a partitioner.
"""

from __future__ import annotations

import abc
import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_args

import jax
from jax.sharding import Mesh, PartitionSpec
from praxis import base_layer

from spmd_trainer import sharding
from spmd_trainer.errors import require_one_of
from spmd_trainer.sharding.specs import AnyMesh, axes_by_dim, axes_text
from spmd_trainer.sharding.variables import named_leaves
from spmd_trainer.step import mup, state_layout
from spmd_trainer.step.compiled_step import CompiledStep, StepFn
from spmd_trainer.step.layout import Layout, RowPadding
from spmd_trainer.step.mesh_choice import mesh_from_model
from spmd_trainer.train_states import NestedPartitionSpec, NestedShapeDtypeStruct, TrainState

if TYPE_CHECKING:
    from spmd_trainer.tasks_lib import SingleTask

# What happens to the global batch on fewer devices: each device holds more rows, has more minibatches, or the batch is smaller.
ElasticBatch: TypeAlias = Literal["whole", "accumulate", "scale"]


class Partitioner(abc.ABC):
    """Shards a task's state and compiles its steps for a mesh.

    Attributes:
      layout: shapes and shardings of the task's variables and batches; set by `setup`.
      num_minibatches, elastic, elastic_batch: the arguments of the constructor.
    """

    layout: Layout

    def __init__(
        self,
        mesh: AnyMesh | None = None,
        *,
        devices: Sequence[jax.Device] | None = None,
        num_minibatches: int = 1,
        elastic: bool = False,
        elastic_batch: ElasticBatch = "whole",
    ):
        """Stores the settings.

        Args:
          mesh: the mesh; None for the one that the task's model declares.
          devices: the devices for the mesh that the model declares; None for all.
          num_minibatches: number of minibatches into which a train step divides the global batch, or each device's rows.
          elastic: True if the run calls the experiment's `available_devices` after each step, and continues on those devices.
          elastic_batch: what an elastic run does if 1 / n of its devices remain. 'whole': each device processes n times as many
            rows at once. 'accumulate': each device has n times as many minibatches. 'scale': the global batch has 1 / n of its
            rows, and the learning rate stays the same.

        Raises:
          ValueError: a setting has an unknown value.
        """
        name = type(self).__name__
        if num_minibatches < 1:
            raise ValueError(f"{name}: num_minibatches is {num_minibatches}; it must be at least 1")
        require_one_of(f"{name}: elastic_batch", elastic_batch, get_args(ElasticBatch))
        self.num_minibatches = num_minibatches
        self.elastic = elastic
        self.elastic_batch = elastic_batch
        self._mesh = mesh
        self._devices = devices

    @abc.abstractmethod
    def setup(self, task: SingleTask, inputs_shape_dtype: NestedShapeDtypeStruct) -> None:
        """Sets `layout`, with the sharding of every variable. Allocates nothing on devices.

        Args:
          task: the built task.
          inputs_shape_dtype: ShapeDtypeStructs of the global training batch.

        Raises:
          ValueError: mesh, split mappings, batch and settings don't fit each other; the message names the variable or field.
        """

    @abc.abstractmethod
    def partition(self, step_fn: StepFn, inputs_shape_dtype: NestedShapeDtypeStruct, is_eval: bool) -> CompiledStep:
        """Wraps a pure step for the mesh and jits it.

        Args:
          step_fn: the pure step.
          inputs_shape_dtype: ShapeDtypeStructs of the global batch, without padding.
          is_eval: True for steps that take a state without optimizer states and return no state.
        """

    @abc.abstractmethod
    def rows_to_split(self, num_rows: int, num_devices: int) -> int:
        """Returns the number of rows that `num_minibatches` must divide: those of the global batch, or of one device.

        Args:
          num_rows: rows of the global batch.
          num_devices: devices of the mesh.
        """

    @property
    def has_own_mesh(self) -> bool:
        """True if the partitioner was given a mesh, or devices for the mesh that the model declares."""
        return self._mesh is not None or self._devices is not None

    def use_mesh(self, mesh: AnyMesh) -> None:
        """Replaces the mesh that the model declares. Call it before `setup`.

        Args:
          mesh: the mesh. An AbstractMesh is enough to compute `layout`, but not to compile steps or to hold arrays.
        """
        self._mesh, self._devices = mesh, None

    def make_layout(
        self,
        task: SingleTask,
        inputs_shape_dtype: NestedShapeDtypeStruct,
        row_padding: RowPadding,
        plan: state_layout.Plan | None = None,
    ) -> Layout:
        """Checks the task's `inputs_split_mapping`, and returns the task's layout. `setup` calls this.

        Args:
          task: the built task.
          inputs_shape_dtype: ShapeDtypeStructs of the global training batch.
          row_padding: how to fill the rows that are added to a batch, up to a multiple of the device count; see `Layout`.
          plan: a function that decides the sharding of every variable, instead of the layers; see `state_layout.build`.

        Raises:
          ValueError: a split mapping doesn't fit the mesh, an input or a variable; the message names the path.
        """
        # An AbstractMesh has what a layout needs; nothing can be compiled for it.
        mesh = cast(Mesh, self._mesh) if self._mesh is not None else mesh_from_model(task.model, self._devices)
        mapping = task.train.inputs_split_mapping
        if mapping is not None:
            sharding.validate_split_mapping(mapping, mesh.axis_names, inputs_shape_dtype)
            specs = sharding.input_partition_specs(mapping, dict(mesh.shape), inputs_shape_dtype)
            for note in batch_notes(inputs_shape_dtype, specs, dict(mesh.shape)):
                logging.warning("%s", note)
        init_variables = state_layout.variables_initialiser(task, inputs_shape_dtype)
        hparams, variables = state_layout.build(task, init_variables, inputs_shape_dtype, mesh, plan)
        if task.mup is not None:
            of_base = state_layout.variables_initialiser(mup.base_task(task), inputs_shape_dtype)
            init_variables = mup.rescaled(init_variables, of_base, hparams)
        return Layout(task, hparams, mesh, variables, init_variables, row_padding)

    @property
    def metadata(self) -> Layout:
        """The same as `layout`; Pax's name for it is `metadata`."""
        return self.layout

    @property
    def task(self) -> SingleTask:
        """The built task."""
        return self.layout.task

    @property
    def mesh(self) -> Mesh:
        """The device mesh."""
        return self.layout.mesh

    def mesh_shape(self) -> Mapping[str, int]:
        """Returns {name: size} of the mesh axes."""
        return dict(self.mesh.shape)

    def init_fn(self, *, with_opt_states: bool = True) -> jax.stages.Wrapped:
        """Returns the jitted initializer: PRNG key -> padded, sharded state. No device holds all of a sharded variable.

        Values depend only on the key, not on the mesh.
        """
        layout = self.layout if with_opt_states else self.layout.without_opt_states()

        def init(prng_key: jax.Array) -> TrainState:
            mdl_vars = base_layer.maybe_unbox_value(layout.init_variables(prng_key))
            return layout.pad(state_layout.create_train_state(layout, mdl_vars, with_opt_states=with_opt_states))

        # `init` runs once, so compiling it must be cheap: on CPU, this level halves the compile time and gives the same values.
        on_cpu = layout.mesh.devices.flat[0].platform == "cpu"
        options: dict[str, Any] | None = {"xla_backend_optimization_level": 1} if on_cpu else None
        return jax.jit(init, out_shardings=layout.shardings, compiler_options=options)

    def initialize_train_state(self, prng_key: jax.Array, *, with_opt_states: bool = True) -> TrainState:
        """Returns the initial state, padded and sharded as in `layout`; runs `init_fn`."""
        state: TrainState = self.init_fn(with_opt_states=with_opt_states)(prng_key)
        return state


def batch_notes(inputs: NestedShapeDtypeStruct, specs: NestedPartitionSpec, sizes: Mapping[str, int]) -> list[str]:
    """Returns a warning for each batch dimension that its mesh axes don't divide, with the cost of padding and sizes that fit.

    Args:
      inputs: ShapeDtypeStructs of the global batch.
      specs: PartitionSpecs of the batch in the step, same structure.
      sizes: {axis: size} of the mesh.
    """
    found: dict[tuple[int, int, tuple[str, ...]], str] = {}
    is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
    for (path, x), spec in zip(named_leaves(inputs), jax.tree.leaves(specs, is_leaf=is_spec), strict=True):
        for dim, (size, axes) in enumerate(zip(x.shape, axes_by_dim(spec, len(x.shape)), strict=True)):
            shards = math.prod(sizes[axis] for axis in axes)
            if not size % shards:
                continue
            each = -(-size // shards)
            held, idle = each * shards, shards - -(-size // each)
            what = f"the batch has {size} rows" if dim == 0 else f"dimension {dim} of input {path!r} has size {size}"
            only_padding = f", and {idle} of {shards} parts hold nothing but padding" if idle else ""
            below = f"{held - shards} or " if held > shards else ""
            # All inputs have the same number of rows, which is therefore named once.
            found.setdefault(
                (dim, size, axes) if dim == 0 else (dim, id(x), axes),
                f"{what}, which {axes_text(axes, sizes)} does not divide: each step computes {held} "
                f"({held / size - 1:.1%} more){only_padding}. {below}{held} cost nothing.",
            )
    return list(found.values())
