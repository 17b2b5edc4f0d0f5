"""`Layout`: shapes, padding and shardings of a task's train state and batches on a mesh. It holds no arrays."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from praxis import base_layer

from spmd_trainer import sharding
from spmd_trainer.sharding.even_values import put_back, slice_off
from spmd_trainer.sharding.variables import VariableSpec
from spmd_trainer.step import masks
from spmd_trainer.train_states import (
    NestedJTensor,
    NestedPartitionSpec,
    NestedShapeDtypeStruct,
    NestedWeightHParams,
    PyTree,
    TrainState,
)

if TYPE_CHECKING:
    from spmd_trainer.tasks_lib import SingleTask

# How `numpy.pad` fills the rows that make a batch a multiple of the device count: with zeros, or with the first rows again.
RowPadding: TypeAlias = Literal["constant", "wrap"]


@dataclasses.dataclass(frozen=True)
class LogicalLayout:
    """The part of a layout that a pure step needs; it has neither mesh nor padding.

    Attributes:
      task: the built task.
      var_weight_hparams: praxis' WeightHParams of the model's variables.
    """

    task: SingleTask
    var_weight_hparams: NestedWeightHParams


@functools.partial(jax.tree_util.register_dataclass, data_fields=("array",), meta_fields=("record", "mesh"))
@dataclasses.dataclass(frozen=True)
class HostPart:
    """An array of the train state in host memory, as a step gets it. It is padded; `on_device` slices the padding off.

    Attributes:
      array: the padded array.
      record: the array's VariableSpec in the layout.
      mesh: the device mesh.
    """

    array: jax.Array
    record: VariableSpec
    mesh: Mesh

    def on_device(self, row: jax.Array | None = None) -> jax.Array:
        """Copies the array to the devices and slices off its padding. Use under jit.

        Args:
          row: index of dimension 0, integer scalar; only the slice at this index is copied. None copies the whole array.
        """
        record = self._record(row)
        x = self.array if row is None else lax.dynamic_index_in_dim(self.array, row, 0, keepdims=False)
        x = jax.device_put(x, jax.memory.Space.Device)
        return slice_off(self._split(x, record), record.logical_shape)

    def updated(self, value: jax.Array, row: jax.Array | None = None) -> HostPart:
        """Returns the HostPart with `value` copied back to host memory. Use under jit.

        Args:
          value: the new value of the array that `on_device(row)` returned.
          row: as for `on_device`.
        """
        record = self._record(row)
        moved = jax.device_put(self._split(put_back(value, record.padded_shape), record), jax.memory.Space.Host)
        array = moved if row is None else lax.dynamic_update_index_in_dim(self.array, moved, row, 0)
        return dataclasses.replace(self, array=array)

    def _record(self, row: jax.Array | None) -> VariableSpec:
        return self.record if row is None else _row(self.record)

    def _split(self, x: jax.Array, record: VariableSpec) -> jax.Array:
        split: jax.Array = lax.with_sharding_constraint(x, NamedSharding(self.mesh, record.spec))
        return split


def is_host_part(x: Any) -> bool:
    """Returns True for a `HostPart`."""
    return isinstance(x, HostPart)


def _row(variable: VariableSpec) -> VariableSpec:
    """Returns the VariableSpec of a slice at one index of dimension 0; dimension 0 must not be sharded."""
    return dataclasses.replace(
        variable,
        logical_shape=variable.logical_shape[1:],
        spec=PartitionSpec(*variable.spec[1:]),
        paddings=variable.paddings[1:],
    )


@dataclasses.dataclass(frozen=True)
class Layout(LogicalLayout):
    """The layout of a task's train state and of its batches on a mesh.

    Attributes:
      mesh: the device mesh.
      variables: a TrainState whose leaves are VariableSpecs.
      init_variables: PRNG key -> initial variables; see `state_layout.variables_initialiser`.
      row_padding: the content of the rows that `put` adds to a batch: zeros ('constant'), or the first rows again ('wrap').
    """

    mesh: Mesh
    variables: TrainState
    init_variables: Callable[[jax.Array], NestedJTensor]
    row_padding: RowPadding

    # --- the train state --------------------------------------------------------------------------------------------------

    @functools.cached_property
    def partition_specs(self) -> TrainState:
        """PartitionSpecs of the train state."""
        specs: TrainState = jax.tree.map(lambda v: v.spec, self.variables)
        return specs

    @functools.cached_property
    def shardings(self) -> TrainState:
        """NamedShardings of the train state; arrays with the same PartitionSpec share one NamedSharding object."""
        shardings: TrainState = sharding.named_shardings(self.variables, self.mesh)
        return shardings

    @functools.cached_property
    def padded_shapes(self) -> TrainState:
        """ShapeDtypeStructs of the padded train state, with shardings."""
        shapes: TrainState = jax.tree.map(
            lambda v, s: jax.ShapeDtypeStruct(v.padded_shape, v.dtype, sharding=s), self.variables, self.shardings
        )
        return shapes

    def slice(self, state: TrainState) -> TrainState:
        """Returns a padded state without its padding; arrays in host memory stay there, as `HostPart`s. Use under jit."""
        on_device = jax.tree.map(lambda v, x: None if v.memory_kind else x, self.variables, state)
        logical: TrainState = jax.tree.map(
            lambda v, x, whole: HostPart(whole, v, self.mesh) if v.memory_kind else x,
            self.variables,
            sharding.slice_uneven(on_device, self.variables, self.variables),
            state,
        )
        return logical

    def pad(self, state: TrainState) -> TrainState:
        """Inverts `slice`: returns the padded state, with zeros in the padding. Use under jit."""
        on_device = jax.tree.map(lambda x: None if is_host_part(x) else x, state, is_leaf=is_host_part)
        padded: TrainState = jax.tree.map(
            lambda _, x, given: given.array if is_host_part(given) else x,
            self.variables,
            sharding.pad_uneven(on_device, self.variables, self.variables, self.mesh),
            state,
        )
        return padded

    def without_opt_states(self) -> Layout:
        """Returns the layout of the eval state, which has no optimizer states."""
        return dataclasses.replace(self, variables=self.variables.to_eval_state())

    def records(self) -> list[VariableSpec]:
        """Returns the VariableSpecs of all arrays of the train state, in the order of its leaves."""
        return jax.tree.leaves(self.variables)

    def check_state(self, state: TrainState, specs: TrainState) -> None:
        """Checks that a state whose PartitionSpecs are `specs` is a padded state of this layout.

        Args:
          state: arrays or ShapeDtypeStructs.
          specs: PartitionSpecs, in the structure of `state`.

        Raises:
          ValueError: an array's shape or PartitionSpec differs from the layout; the message names the first such array.
        """

        def check(variable: VariableSpec, array: jax.Array, spec: PartitionSpec) -> None:
            if array.shape != variable.padded_shape or spec != variable.spec:
                raise ValueError(
                    f"{variable.path} of the train state has shape {array.shape} and spec {spec}, but the task's model "
                    f"declares {variable.padded_shape} (logical {variable.logical_shape}) and {variable.spec}; give the "
                    "task that made it"
                )

        jax.tree.map(check, self.variables, state, specs)

    def num_params(self, *, per_token: bool = False) -> int:
        """Returns the number of elements of the trainable variables, at logical shapes.

        With `per_token`, counts only elements used for one token: if a token uses k of E experts, k / E of the experts' elements.
        """
        return self._num_elements(frozen=False, per_token=per_token)

    def num_frozen_params(self, *, per_token: bool = False) -> int:
        """Returns the number of elements of frozen parameters, e.g. the base of a model with adapters. See `num_params`."""
        return self._num_elements(frozen=True, per_token=per_token)

    def _num_elements(self, *, frozen: bool, per_token: bool) -> int:
        params, hparams = (
            jax.tree.leaves(tree.get(base_layer.PARAMS, {}))
            for tree in (self.variables.mdl_vars, self.var_weight_hparams)
        )
        counted = ((v, p) for v, p in zip(params, hparams, strict=True) if masks.is_frozen(p) == frozen)
        shares = ((v, masks.read_per_token(p) if per_token else 1) for v, p in counted)
        return sum(round(int(np.prod(v.logical_shape)) * share) for v, share in shares)

    # --- batches ----------------------------------------------------------------------------------------------------------

    def pad_inputs_shape_dtype(self, inputs_shape_dtype: NestedShapeDtypeStruct) -> NestedShapeDtypeStruct:
        """Returns the inputs' shapes with the batch dimension rounded up to a multiple of the device count."""

        def padded(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((-(-x.shape[0] // self.mesh.size) * self.mesh.size, *x.shape[1:]), x.dtype)

        return jax.tree.map(padded, inputs_shape_dtype)

    def inputs_partition_spec(self, inputs: PyTree) -> NestedPartitionSpec:
        """Returns the PartitionSpecs of a step's inputs: dimension 0 is sharded over all mesh axes.

        Args:
          inputs: arrays or ShapeDtypeStructs.
        """
        return jax.tree.map(functools.partial(sharding.shard_on_batch_dim_partition_spec, self.mesh.axis_names), inputs)

    def inputs_shardings(self, inputs: PyTree) -> PyTree:
        """Returns the NamedShardings of a step's inputs, made from the PartitionSpecs of `inputs_partition_spec`."""
        specs = self.inputs_partition_spec(inputs)
        is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
        return jax.tree.map(functools.partial(NamedSharding, self.mesh), specs, is_leaf=is_spec)

    def put(self, batch: PyTree) -> NestedJTensor:
        """Puts one process's rows of a batch on the devices, as part of the global batch.

        Adds rows, filled as `row_padding` says, up to a multiple of the process's device count. The step removes these rows.

        Args:
          batch: numpy arrays [rows of this process, ...].
        """
        shards = max(1, self.mesh.size // jax.process_count())

        def padded(x: Any) -> np.ndarray[Any, Any]:
            array = np.asarray(x)
            widths = [(0, -len(array) % shards)] + [(0, 0)] * (array.ndim - 1)
            return np.pad(array, widths, mode=self.row_padding) if widths[0][1] else array

        rows = jax.tree.map(padded, batch)
        shardings = self.inputs_shardings(rows)
        if jax.process_count() == 1:
            return jax.device_put(rows, shardings)
        return jax.tree.map(lambda x, s: jax.make_array_from_process_local_data(s, x), rows, shardings)

    def without_added(self, x: jax.Array, logical: jax.ShapeDtypeStruct) -> jax.Array:
        """Removes the rows that `put` added after the rows of each process. Use under jit.

        Args:
          x: an array of the global batch, with added rows.
          logical: the array's ShapeDtypeStruct without added rows.
        """
        rows = logical.shape[0]
        if x.shape[0] == rows:
            return x
        if jax.process_count() == 1:
            return slice_off(x, (rows, *x.shape[1:]))
        # The batch is split over the mesh's devices in order, and the devices of a process need not be adjacent.
        per_device, own_rows = x.shape[0] // self.mesh.size, rows // jax.process_count()
        seen: dict[int, int] = collections.Counter()
        kept: list[int] = []
        added: list[int] = []
        for position, device in enumerate(self.mesh.devices.flat):
            first = seen[device.process_index]
            seen[device.process_index] += per_device
            for i in range(per_device):
                (kept if first + i < own_rows else added).append(position * per_device + i)
        return slice_off(x[np.array(kept + added)], (rows, *x.shape[1:]))

    def reshard(self, inputs: NestedJTensor) -> NestedJTensor:
        """Reshards inputs by the task's `inputs_split_mapping`. Use under jit."""
        mapping = self.task.train.inputs_split_mapping
        # If the axes don't divide the batch, `evenly` pads it.
        return sharding.reshard_inputs(mapping, dict(self.mesh.shape), inputs, mesh=self.mesh, allow_uneven=True)
