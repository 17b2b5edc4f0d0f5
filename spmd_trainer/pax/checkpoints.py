"""Restores Pax checkpoints into a model, opens them without a model, and converts them to checkpoints of this trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from etils import epath
from flax import traverse_util
from jax.sharding import Mesh, PartitionSpec

from spmd_trainer.checkpointing import Checkpointer, check_storage, checkpoint_bytes, records, step_files
from spmd_trainer.checkpointing import steps as own_steps
from spmd_trainer.checkpointing.agreement import agreed, decided_by_process_0
from spmd_trainer.checkpointing.errors import CheckpointNotFoundError
from spmd_trainer.checkpointing.records import SavedVariable
from spmd_trainer.checkpointing.sources import CheckpointSource
from spmd_trainer.pax import placing, shapes, steps
from spmd_trainer.pax.arrays import PaxArray
from spmd_trainer.pax.contents import Contents, open_step
from spmd_trainer.pax.errors import PaxDamagedError, PaxError, PaxMismatchError, PaxNotFoundError
from spmd_trainer.sharding import create_device_mesh
from spmd_trainer.sharding.variables import VariableSpec, make_variable_spec
from spmd_trainer.train_states import TrainState

_MAX_LISTED = 10


@dataclasses.dataclass(frozen=True)
class PaxSource(CheckpointSource):
    """A step of a Pax checkpoint, opened as a source from which variables are restored.

    Attributes:
      contents: the opened step.
      arrays: the stored array of each variable, by path.
    """

    contents: Contents
    arrays: Mapping[str, PaxArray]

    fix = (
        "Fix: build the model as Pax had it, with the same optimizer, or load the parts that fit with "
        "task.train.init_from_checkpoint_rules"
    )
    mismatch_error = PaxMismatchError

    @classmethod
    def of(cls, contents: Contents, wanted: Mapping[str, VariableSpec]) -> PaxSource:
        """Returns the source from which `restore` reads a step. The model's shapes tell which part of an array is padding.

        Args:
          contents: the opened step.
          wanted: the model's variables by path, in the order of the state's leaves.

        Raises:
          PaxMismatchError: the step is a msgpack file whose structure can't be parsed, and its number of leaves doesn't fit the
            model.
          PaxDamagedError: the step lacks an array that its metadata lists, and no variable in `wanted` has elements. With other
            variables, `require_fit` reports the missing arrays later.
        """
        # Pax saves no arrays without elements.
        stored = contents.by_path([path for path, spec in wanted.items() if 0 not in spec.logical_shape])
        saved = {path: _as_saved(array, wanted.get(path), stored) for path, array in stored.items()}
        arrays = dict(stored)
        for path, spec in wanted.items():
            if 0 in spec.logical_shape and path not in stored:
                saved[path], arrays[path] = SavedVariable.from_spec(spec), _without_elements(spec)
        about = {"pax_checkpoint": {"path": str(contents.path), "version": contents.version}}
        return cls(contents.label, contents.step, saved, about, contents, arrays)

    def fits(self, path: str, shape: Sequence[int]) -> bool:
        """Returns True if the saved variable at `path` can have this logical shape."""
        return super().fits(path, shape) or shapes.can_be(self.arrays[path], shape)

    def read(self, wanted: Mapping[str, VariableSpec], mesh: Mesh, source: Mapping[str, str]) -> dict[str, jax.Array]:
        """Reads variables onto a mesh; see `CheckpointSource.read`."""
        arrays = {path: self.arrays[source[path]] for path in wanted}
        # Each variable's padding is checked by one process. If it finds a fault, all processes raise an error.
        return agreed(lambda: placing.read_onto_mesh(wanted, arrays, mesh, self.name))

    def input_state(self) -> dict[str, Any] | None:
        """Returns {'state': bytes}, the position of this process's training input. If it is missing, warns and returns None."""
        folder = self.contents.path / steps.INPUT
        name = f"process_{jax.process_index()}-of-{jax.process_count()}"
        try:
            return {"state": step_files.read(f"reading {folder / name}", (folder / name).read_bytes)}
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            logging.warning(
                "%s has no position of the training input that could be read (%s), so the input starts from the beginning",
                self.name,
                folder / name,
            )
            return None


def open_source(directory: epath.Path, step: int | None, variables: TrainState) -> PaxSource | None:
    """Opens a step of a Pax checkpoint. Every process must call this function.

    Args:
      directory: a directory of Pax checkpoints, the run's directory above it, or the directory of one step.
      step: the step number; None for the step whose directory is given, if any, and otherwise for the newest finished step.
      variables: the model's variables, as a TrainState of VariableSpecs.

    Returns:
      The source, or None if the directory holds no Pax checkpoint.

    Raises:
      PaxNotFoundError: there is no such step.
      PaxDamagedError: the step is not complete.
      PaxMismatchError: see `PaxSource.of`.
      PaxError: the step's version is unknown.
    """
    found = steps.find_agreed(directory)
    if found is None:
        return None
    contents = _open(found, step)
    return agreed(lambda: PaxSource.of(contents, records.by_path(variables)))


def _open(found: steps.PaxDirectory, step: int | None) -> Contents:
    if step is not None and found.step is not None and step != found.step:
        raise PaxNotFoundError(
            f"step {step} was asked for, and the directory given is that of step {found.step} in {found.path}; give "
            f"{found.path}"
        )
    wanted = found.step if step is None else step
    try:
        chosen, path = decided_by_process_0(lambda: [str(part) for part in steps.require(found.path, wanted)])
    except CheckpointNotFoundError as error:  # on all processes; it is not a UserError
        raise PaxNotFoundError(str(error)) from error
    return agreed(lambda: open_step(int(chosen), epath.Path(path)))


def _as_saved(array: PaxArray, spec: VariableSpec | None, others: Mapping[str, PaxArray]) -> SavedVariable:
    """Describes a stored array. Its shape is the model's logical shape if that fits, otherwise the checkpoint's shape.

    Args:
      array: the stored array.
      spec: the model's variable with the same path; None if it has none.
      others: all arrays of the checkpoint by path, among them the model variable that an optimizer state belongs to.
    """
    shape = array.shape
    if spec is not None:
        fits = shapes.can_be(array, spec.logical_shape) and not _padded_unlike_its_variable(array, spec, others)
        shape = tuple(spec.logical_shape) if fits else shape
        if not fits and shape == tuple(spec.logical_shape):
            shape = array.stored_shape
    return SavedVariable(tuple(shape), records.dtype_name(array.dtype), array.stored_shape, "")


def _padded_unlike_its_variable(array: PaxArray, spec: VariableSpec, others: Mapping[str, PaxArray]) -> bool:
    """Returns True if an optimizer state has the same logical shape as its model variable, but a different stored shape."""
    variable = shapes.variable_of(array.path, others)
    same = variable is not None and variable.logical_shape == tuple(spec.logical_shape)
    return same and variable is not None and variable.stored_shape != array.stored_shape


def _without_elements(spec: VariableSpec) -> PaxArray:
    empty = np.zeros(spec.logical_shape, spec.dtype)
    return PaxArray(
        spec.path, spec.path, empty.shape, empty.dtype, empty.shape, None, lambda index: lambda: empty[index]
    )


def read_checkpoint(directory: epath.PathLike, step: int | None = None) -> TrainState:
    """Opens a Pax checkpoint without a model.

    Args:
      directory: a directory of Pax checkpoints, the run's directory above it, or the directory of one step.
      step: the step number; None for the newest step.

    Returns:
      A TrainState whose leaves are PaxArrays, in dicts and lists: `tree.mdl_vars['params']['lm']`, `tree.opt_states[0]`. A leaf
      is read on conversion (`np.asarray(leaf)`) or indexing (`leaf[:10]`). It has no padding if its logical shape is known.

    Raises:
      PaxNotFoundError: there is no such checkpoint.
      PaxDamagedError: the checkpoint is not complete.
      PaxError: the checkpoint's version is unknown.
    """
    arrays = open_checkpoint(directory, step).by_path()
    root = traverse_util.unflatten_dict(dict(arrays), sep="/")
    parts = {field.name: _with_lists(root.pop(field.name, {})) for field in dataclasses.fields(TrainState)}
    if root or isinstance(parts["step"], dict):
        raise PaxDamagedError(
            f"{directory} holds no train state of Pax: its arrays are {', '.join(sorted(arrays)[:5])} ..., and Pax saves step, "
            "mdl_vars and opt_states"
        )
    opt_states = parts["opt_states"] if isinstance(parts["opt_states"], list) else []
    return TrainState(parts["step"], parts["mdl_vars"], opt_states, parts["extra_state"] or ())


def open_checkpoint(directory: epath.PathLike, step: int | None = None) -> Contents:
    """Opens a step of a Pax checkpoint. Arguments and errors are those of `read_checkpoint`."""
    found = steps.find(epath.Path(directory))
    if found is None:
        raise PaxNotFoundError(
            f"{directory} holds no Pax checkpoint; give a directory with checkpoint_00000020 or the like in it"
        )
    return _open(found, step)


def _with_lists(node: Any) -> Any:
    """Turns dicts whose keys are numbers into lists, with None where a number is missing."""
    if not isinstance(node, dict):
        return node
    children = {key: _with_lists(child) for key, child in node.items()}
    if not children or not all(key.isdigit() for key in children):
        return children
    return [children.get(str(i)) for i in range(max(map(int, children)) + 1)]


def convert(
    src: epath.PathLike,
    dst: epath.PathLike,
    *,
    step: int | None = None,
    variables: TrainState | None = None,
    mesh: Mesh | None = None,
) -> int:
    """Converts a step of a Pax checkpoint to a checkpoint of this trainer. Does not change `src`.

    Args:
      src: a directory of Pax checkpoints, the run's directory above it, or the directory of one step.
      dst: a directory of checkpoints of this trainer, e.g. 'runs/mine/checkpoints'.
      step: the step number; None for the newest step.
      variables: the model's state, as a TrainState of VariableSpecs. Without it, the logical shapes of optimizer states are
        derived from those of the model variables.
      mesh: the mesh over which `variables` are sharded. If None, `variables` is ignored.

    Returns:
      The step number.

    Raises:
      PaxMismatchError: the checkpoint's variables don't match `variables`, its padding is not zero, or a logical shape can't be
        derived (without `variables`).
      PaxError: `dst` is in the Pax directory, or already has this step. For other reasons, see `read_checkpoint`.
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
        raise PaxError(f"{target} has a step {contents.step}, so nothing was written; give another directory")
    logging.info("wrote step %d of %s to %s", contents.step, contents.label, target)
    return contents.step


def _check_target(contents: Contents, target: epath.Path) -> None:
    inside = contents.path.parent
    if target == inside or inside in target.parents:
        raise PaxError(f"{target} is in the directory of the Pax checkpoints, which is only read; give another one")
    if contents.step in own_steps.present(target):
        raise PaxError(f"{target} has a step {contents.step} already; give another directory, or move that step away")


def _described(contents: Contents, mesh: Mesh) -> tuple[dict[str, VariableSpec], Mapping[str, PaxArray]]:
    """Returns {path: VariableSpec} and {path: array} from the checkpoint's metadata alone. The specs shard no dimension."""
    arrays = contents.by_path()
    unknown = [array for array in arrays.values() if array.logical_shape is None]
    if unknown:
        names = ", ".join(f"{array.path} {array.stored_shape}" for array in unknown[:_MAX_LISTED])
        more = f" and {len(unknown) - _MAX_LISTED} more" if len(unknown) > _MAX_LISTED else ""
        raise PaxMismatchError(
            f"{contents.label} does not tell how much of these variables is padding: {names}{more}. Give the experiment, which "
            "does: --exp=NAME, or convert(..., variables=..., mesh=...)"
        )
    shape = dict(mesh.shape)
    specs = {
        path: make_variable_spec(path, array.shape, array.dtype, PartitionSpec(), shape, "read from a Pax checkpoint")
        for path, array in arrays.items()
    }
    return specs, arrays
