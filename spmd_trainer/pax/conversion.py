"""Writes a Pax checkpoint as one of this trainer's."""

from __future__ import annotations

from collections.abc import Mapping

import jax
from absl import logging
from etils import epath
from jax.sharding import Mesh, PartitionSpec

from spmd_trainer.checkpointing import Checkpointer, check_storage, checkpoint_bytes, records, steps
from spmd_trainer.pax import placing
from spmd_trainer.pax.arrays import PaxArray
from spmd_trainer.pax.checkpoints import PaxSource, open_checkpoint
from spmd_trainer.pax.contents import Contents
from spmd_trainer.pax.errors import PaxError, PaxMismatchError
from spmd_trainer.sharding import create_device_mesh
from spmd_trainer.sharding.variables import VariableSpec, make_variable_spec
from spmd_trainer.train_states import TrainState

_MAX_LISTED = 10


def convert(
    src: epath.PathLike,
    dst: epath.PathLike,
    *,
    step: int | None = None,
    variables: TrainState | None = None,
    mesh: Mesh | None = None,
) -> int:
    """Writes a step of a Pax checkpoint as a step of this trainer. `src` is only read.

    Args:
      src: a directory of Pax checkpoints, the run's directory above it, or the directory of one step.
      dst: a directory of checkpoints of this trainer, e.g. 'runs/mine/checkpoints'.
      step: the step; None for the newest.
      variables: a TrainState of VariableSpecs: the model's state. Without it, the logical shapes of optimizer states are
        derived from those of the model variables.
      mesh: the mesh of `variables`.

    Returns:
      The step.

    Raises:
      PaxMismatchError: the checkpoint has other variables than `variables`, its padding is not zero, or without `variables`,
        some logical shape can't be derived.
      PaxError: `dst` is the Pax directory, or already has the step; or see `read_checkpoint`.
      CheckpointError: the step can't be written.
    """
    contents, target = open_checkpoint(src, step), epath.Path(dst)
    _check_target(contents, target)
    if variables is None or mesh is None:
        mesh = create_device_mesh([("data", 1)], devices=jax.local_devices()[:1])
        wanted, arrays = _described(contents, mesh)
    else:
        wanted = records.by_path(variables)
        source = PaxSource.of(contents, wanted)
        source.require_fit(wanted)
        arrays = source.arrays
    check_storage(target, checkpoint_bytes(wanted), None)  # type: ignore[arg-type]
    state = placing.read_onto_mesh(wanted, arrays, mesh, contents.label)
    about = {"pax_checkpoint": {"path": str(contents.path), "version": contents.version}}
    with Checkpointer(target, save_max_to_keep=None) as checkpointer:
        # A flat dictionary is a tree of its own: only the paths count in a checkpoint.
        saved = checkpointer.save(contents.step, state, wanted, input_state=None, metadata=about)  # type: ignore[arg-type]
    if not saved:
        raise PaxError(
            f"{target} has a step {contents.step} or a newer one, so nothing was written; give another directory"
        )
    logging.info("wrote step %d of %s to %s", contents.step, contents.label, target)
    return contents.step


def _check_target(contents: Contents, target: epath.Path) -> None:
    inside = contents.path.parent
    if target == inside or inside in target.parents:
        raise PaxError(f"{target} is in the directory of the Pax checkpoints, which is only read; give another one")
    if contents.step in steps.present(target):
        raise PaxError(f"{target} has a step {contents.step} already; give another directory, or move that step away")


def _described(contents: Contents, mesh: Mesh) -> tuple[dict[str, VariableSpec], Mapping[str, PaxArray]]:
    """Returns the variables of a checkpoint as it describes itself, on one device."""
    arrays = contents.by_path()
    unknown = [array for array in arrays.values() if array.logical_shape is None]
    if unknown:
        names = ", ".join(f"{array.path} {array.stored_shape}" for array in unknown[:_MAX_LISTED])
        more = f" and {len(unknown) - _MAX_LISTED} more" if len(unknown) > _MAX_LISTED else ""
        raise PaxMismatchError(
            f"{contents.label} does not tell how much of these variables is padding: {names}{more}. Give the experiment, which "
            "does: --exp=NAME, or convert(..., variables=..., mesh=...)"
        )
    return _specs(arrays, mesh), arrays


def _specs(arrays: Mapping[str, PaxArray], mesh: Mesh) -> dict[str, VariableSpec]:
    shape = dict(mesh.shape)
    return {
        path: make_variable_spec(path, array.shape, array.dtype, PartitionSpec(), shape, "read from a Pax checkpoint")
        for path, array in arrays.items()
    }
