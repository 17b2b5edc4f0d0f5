"""Host devices stand in for a mesh where there is no accelerator; they must be asked for before any device is touched."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from spmd_trainer.base_experiment import BaseExperiment
from spmd_trainer.errors import UserError
from spmd_trainer.step import mesh_choice
from spmd_trainer.training import experiment_config
from spmd_trainer.training.experiment_config import ResolvedExperiment

_HOST_DEVICES_FLAG = "xla_force_host_platform_device_count"
# XLA can't start with arbitrarily many. A mesh that needs more is refused later: it doesn't fit the devices that are there.
_MAX_HOST_DEVICES = 2**14


def resolve(
    exp: str | type[BaseExperiment] | BaseExperiment,
    overrides: Iterable[str],
    mesh: Sequence[tuple[str, int]] | None,
    join: Callable[[], int] = lambda: 1,
) -> ResolvedExperiment:
    """Resolves an experiment; lets host devices stand in for its mesh before it is asked for its datasets.

    Pax's experiments count the devices there, to size their batches.

    Args:
      exp: see `experiment_config.resolve`.
      overrides: see `experiment_config.resolve`.
      mesh: what `--mesh` says, or None.
      join: joins the job's processes and returns how many there are.

    Raises:
      UserError: see `experiment_config.resolve` and `let_host_devices_stand_in`.
    """
    return experiment_config.resolve(
        exp, overrides, before_datasets=lambda task_p: let_host_devices_stand_in(task_p, mesh, join())
    )


def let_host_devices_stand_in(task_p: Any, mesh: Sequence[tuple[str, int]] | None, processes: int = 1) -> None:
    """Lets host devices stand in for the mesh's if there is no accelerator. Touches no device.

    A device count that XLA_FLAGS gives is left alone.

    Args:
      task_p: the task's config, whose model declares the mesh.
      mesh: what `--mesh` replaces it with, or None.
      processes: how many processes share the mesh, each with as many devices.

    Raises:
      UserError: the processes don't divide the mesh.
    """
    declared = mesh_choice.declared_mesh(task_p.model)
    needed = None if declared is None else declared.num_devices
    if mesh:
        sizes = [size for _, size in mesh]
        needed = None if -1 in sizes else math.prod(sizes)
    if needed is None or not 1 < needed <= _MAX_HOST_DEVICES or _HOST_DEVICES_FLAG in os.environ.get("XLA_FLAGS", ""):
        return
    if needed % processes:
        raise UserError(f"{processes} processes can't share a mesh of {needed} devices evenly; change one of the two")
    # Only the CPU backend reads this; on an accelerator the mesh is made of its own devices.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{_HOST_DEVICES_FLAG}={needed // processes}".strip()
