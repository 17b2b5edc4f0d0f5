"""Pax's way to make a partitioner, for files that call it."""

from __future__ import annotations

from typing import Any

from spmd_trainer.errors import UserError
from spmd_trainer.step.pjit import PjitPartitioner
from spmd_trainer.tasks_lib import SingleTask


def create_partitioner(
    jax_task: SingleTask,
    init_is_eval: bool = False,
    reshard_inputs: bool = False,
    auto_sharding_mode: Any = None,
    auto_sharding_input_params: Any = None,
) -> PjitPartitioner:
    """Returns a partitioner for the mesh that a task's model declares, or for one axis over all devices without a mesh.

    Args:
      jax_task: the built task.
      init_is_eval: not used; `task.train.always_use_train_for_model_init` decides how variables are initialised.
      reshard_inputs: not used: inputs are always resharded by rank.
      auto_sharding_mode: must be None.
      auto_sharding_input_params: must be None.

    Raises:
      UserError: auto-sharding is asked for.
    """
    del jax_task, init_is_eval, reshard_inputs
    if auto_sharding_mode is not None or auto_sharding_input_params is not None:
        raise UserError(
            "auto-sharding by the compiler is not supported; give rules instead, e.g. task.train.sharding_strategy="
            "[('.*', 'fsdp(axis=\"data\")')]"
        )
    return PjitPartitioner()
