"""`PjitPartitioner`: runs a pure step on a mesh with `jax.jit` and shardings; the compiler chooses the collectives."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax

from spmd_trainer.errors import UserError
from spmd_trainer.step import minibatches
from spmd_trainer.step.compiled_step import CompiledStep, StepFn, compile_step
from spmd_trainer.step.partitioner import Partitioner
from spmd_trainer.train_states import NestedShapeDtypeStruct

if TYPE_CHECKING:
    from spmd_trainer.tasks_lib import SingleTask


class PjitPartitioner(Partitioner):
    """Partitions a task's steps over its mesh with `jax.jit`. See `Partitioner` for settings, attributes and methods."""

    def setup(self, task: SingleTask, inputs_shape_dtype: NestedShapeDtypeStruct) -> None:
        """See `Partitioner.setup`. The layers or `task.train.sharding_strategy` decide the sharding of variables."""
        # Added rows hold zeros; the step slices them off.
        self.layout = self.make_layout(task, inputs_shape_dtype, "constant")
        if self.num_minibatches > 1:
            minibatches.check_count(self.num_minibatches, jax.tree.leaves(inputs_shape_dtype)[0].shape[0])
            minibatches.check_no_overwritten(self.layout, f"num_minibatches={self.num_minibatches}")

    def partition(self, step_fn: StepFn, inputs_shape_dtype: NestedShapeDtypeStruct, is_eval: bool) -> CompiledStep:
        """See `Partitioner.partition`. With several minibatches, a train step gets a `grad_fn` that accumulates gradients."""
        layout = self.layout.without_opt_states() if is_eval else self.layout
        if is_eval or self.num_minibatches == 1:
            return compile_step(layout, step_fn, inputs_shape_dtype, is_eval=is_eval)
        grad_fn = functools.partial(minibatches.accumulated_gradients, layout, self.num_minibatches)
        return compile_step(layout, step_fn, inputs_shape_dtype, is_eval=False, own_pass=lambda *padded: grad_fn)

    def rows_to_split(self, num_rows: int, num_devices: int) -> int:
        """See `Partitioner.rows_to_split`. The global batch is divided into minibatches."""
        del num_devices
        return num_rows


def create_partitioner(
    jax_task: SingleTask,
    init_is_eval: bool = False,
    reshard_inputs: bool = False,
    auto_sharding_mode: Any = None,
    auto_sharding_input_params: Any = None,
) -> PjitPartitioner:
    """Returns a partitioner with default settings. Kept for files that call Pax's function of this name.

    Args:
      jax_task: not used; `setup` takes the task.
      init_is_eval: not used; `task.train.always_use_train_for_model_init` decides how variables are initialized.
      reshard_inputs: not used; inputs are always resharded by `task.train.inputs_split_mapping`.
      auto_sharding_mode: must be None.
      auto_sharding_input_params: must be None.

    Raises:
      UserError: one of the two auto-sharding arguments is not None.
    """
    del jax_task, init_is_eval, reshard_inputs
    if auto_sharding_mode is not None or auto_sharding_input_params is not None:
        raise UserError(
            "auto-sharding by the compiler is not supported; give rules instead, e.g. task.train.sharding_strategy="
            "[('.*', 'fsdp(axis=\"data\")')]"
        )
    return PjitPartitioner()
