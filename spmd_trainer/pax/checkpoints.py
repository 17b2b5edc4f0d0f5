"""Restores Pax checkpoints onto any mesh."""

from __future__ import annotations

import dataclasses
from types import TracebackType
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from absl import logging
from etils import epath
from jax.sharding import Mesh

from spmd_trainer.checkpointing import mismatch, records, step_files
from spmd_trainer.checkpointing.agreement import agreed_problem, decided_by_process_0
from spmd_trainer.checkpointing.reading import Restored
from spmd_trainer.checkpointing.records import SavedVariable
from spmd_trainer.pax import placing, shapes, steps
from spmd_trainer.pax.arrays import PaxArray
from spmd_trainer.pax.contents import Contents, open_step
from spmd_trainer.pax.errors import PaxDamagedError, PaxMismatchError, PaxNotFoundError, of_pax
from spmd_trainer.train_states import TrainState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from spmd_trainer.sharding.variables import VariableSpec

FIX = (
    "Fix: build the model as Pax had it, with the same optimizer, or load the parts that fit with "
    "task.train.init_from_checkpoint_rules"
)


class PaxCheckpoints:
    """The Pax checkpoints of a directory, with the reading methods of `Checkpointer`. Never writes there.

    Every process of the job makes the same calls.
    """

    def __init__(self, found: steps.PaxDirectory) -> None:
        """Opens what `steps.find` found. Reads nothing yet."""
        self._found = found

    @property
    def directory(self) -> epath.Path:
        """The directory that holds the steps."""
        return self._found.path

    def __enter__(self) -> PaxCheckpoints:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del exc_type, exc, traceback  # Nothing is kept open.

    def holds_steps(self) -> bool:
        """Returns True: a directory of Pax has steps, finished or not."""
        return True

    def restore(
        self,
        variables: TrainState,
        mesh: Mesh,
        *,
        step: int | None = None,
        partial: bool = False,
        with_input: bool = True,
    ) -> Restored:
        """Restores a step onto a mesh.

        Args:
          variables: a TrainState of VariableSpecs: the state to read.
          mesh: the mesh.
          step: the step; None for the one whose directory was given, or the newest finished one.
          partial: do not read saved variables that `variables` lacks.
          with_input: read the position of the input too, if Pax saved one that its input wrote itself.

        Raises:
          PaxNotFoundError: there is no such step.
          PaxDamagedError: it is not complete.
          PaxMismatchError: its variables are not those of `variables`.
          PaxError: its version is unknown.
          CheckpointReadError: storage does not answer, or refuses.
        """
        contents = self.open(step)
        specs = records.by_path(variables)
        arrays: dict[str, PaxArray] = {}
        read: dict[str, jax.Array] = {}

        def match() -> None:
            arrays.update(matching(contents, specs, partial=partial))

        def place() -> None:
            read.update(placing.read_onto_mesh(specs, arrays, mesh, contents.label))

        agreed_problem(match)
        agreed_problem(place)
        state: TrainState = jax.tree.unflatten(jax.tree.structure(variables), [read[path] for path in specs])
        position = _input_position(contents) if with_input else None
        about = {"pax_checkpoint": {"path": str(contents.path), "version": contents.version}}
        record = records.make(contents.step, state, specs, None, about)
        return Restored(state, contents.step, position, record)

    def open(self, step: int | None = None) -> Contents:
        """Opens a step without reading an array; see `restore`."""
        wanted = self.step_to_read(step)
        with of_pax():
            chosen, path = decided_by_process_0(lambda: [str(part) for part in steps.require(self.directory, wanted)])
        opened: list[Contents] = []
        agreed_problem(lambda: opened.append(open_step(int(chosen), epath.Path(path))))
        return opened[0]

    def step_to_read(self, step: int | None) -> int | None:
        """Returns the step that is meant: the given one, or that of the directory.

        Raises:
          PaxNotFoundError: the directory of another step was given.
        """
        own = self._found.step
        if step is not None and own is not None and step != own:
            raise PaxNotFoundError(
                f"step {step} was asked for, and the directory given is that of step {own} in {self.directory}; give "
                f"{self.directory}"
            )
        return own if step is None else step


def matching(contents: Contents, wanted: Mapping[str, VariableSpec], *, partial: bool) -> dict[str, PaxArray]:
    """Returns the array of each variable of a model.

    Args:
      contents: the checkpoint.
      wanted: the model's variables by path, in the order of the state's leaves.
      partial: True if the checkpoint may have other variables too.

    Raises:
      PaxMismatchError: paths, shapes or dtypes differ.
    """
    # Pax saves no arrays without elements.
    stored = contents.by_path([path for path, spec in wanted.items() if 0 not in spec.logical_shape])
    saved = {path: as_saved(array, wanted.get(path), stored) for path, array in stored.items()}
    in_model = {path: SavedVariable.from_spec(spec) for path, spec in wanted.items()}
    empty = {path: in_model[path] for path in wanted if 0 in wanted[path].logical_shape and path not in saved}
    compared = {path: v for path, v in saved.items() if path in wanted} if partial else saved
    if message := mismatch.explain({**compared, **empty}, in_model, contents.label, fix=FIX):
        raise PaxMismatchError(message)
    return {path: stored[path] if path in stored else _without_elements(wanted[path]) for path in wanted}


def as_saved(array: PaxArray, spec: VariableSpec | None, others: Mapping[str, PaxArray]) -> SavedVariable:
    """Describes an array: with the model's logical shape if it can have it, otherwise with what the checkpoint tells.

    Args:
      array: the array.
      spec: the model's variable of the same path, or None.
      others: all arrays of the checkpoint by path.
    """
    shape = array.shape
    if spec is not None:
        fits = shapes.can_be(array, spec.logical_shape) and not _padded_unlike_its_variable(array, spec, others)
        shape = tuple(spec.logical_shape) if fits else shape
        if not fits and shape == tuple(spec.logical_shape):
            shape = array.stored_shape
    return SavedVariable(tuple(shape), records.dtype_name(array.dtype), array.stored_shape, "")


def _padded_unlike_its_variable(array: PaxArray, spec: VariableSpec, others: Mapping[str, PaxArray]) -> bool:
    """Returns True for an optimizer state of its variable's logical shape that is stored with another shape."""
    variable = shapes.variable_of(array.path, others)
    same = variable is not None and variable.logical_shape == tuple(spec.logical_shape)
    return same and variable is not None and variable.stored_shape != array.stored_shape


def _without_elements(spec: VariableSpec) -> PaxArray:
    empty = np.zeros(spec.logical_shape, spec.dtype)
    return PaxArray(
        spec.path, spec.path, empty.shape, empty.dtype, empty.shape, None, lambda index: lambda: empty[index]
    )


def _input_position(contents: Contents) -> dict[str, Any] | None:
    """Returns the position of this process' input, if Pax saved one as bytes: those that the input itself wrote."""
    folder = contents.path / steps.INPUT
    name = f"process_{jax.process_index()}-of-{jax.process_count()}"
    try:
        return {"state": step_files.read(f"reading {folder / name}", (folder / name).read_bytes)}
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        logging.warning(
            "%s has no position of the training input that could be read (%s), so the input starts from the beginning",
            contents.label,
            folder / name,
        )
        return None


def read_checkpoint(directory: epath.PathLike, step: int | None = None) -> TrainState:
    """Opens a Pax checkpoint without a model.

    Args:
      directory: a directory of Pax checkpoints, the run's directory above it, or the directory of one step.
      step: the step; None for the newest.

    Returns:
      A TrainState whose leaves are PaxArrays, in dicts and lists: `tree.mdl_vars['params']['lm']`, `tree.opt_states[0]`. They
      are read when NumPy asks (`np.asarray(leaf)`, `leaf[:10]`). Their shapes are logical ones as far as the checkpoint tells.

    Raises:
      PaxNotFoundError: there is no such checkpoint.
      PaxDamagedError: it is not complete.
      PaxError: its version is unknown.
      CheckpointReadError: storage does not answer, or refuses.
    """
    arrays = open_checkpoint(directory, step).by_path()
    root: dict[str, Any] = {}
    for path, array in arrays.items():
        *parents, last = path.split("/")
        node = root
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = array
    parts = {field.name: _with_lists(root.pop(field.name, {})) for field in dataclasses.fields(TrainState)}
    if root or isinstance(parts["step"], dict):
        raise PaxDamagedError(
            f"{directory} holds no train state of Pax: its arrays are {', '.join(sorted(arrays)[:5])} ..., and Pax saves step, "
            "mdl_vars and opt_states"
        )
    opt_states = parts["opt_states"] if isinstance(parts["opt_states"], list) else []
    return TrainState(parts["step"], parts["mdl_vars"], opt_states, parts["extra_state"] or ())


def open_checkpoint(directory: epath.PathLike, step: int | None = None) -> Contents:
    """Opens a step; see `read_checkpoint`."""
    found = steps.find(epath.Path(directory))
    if found is None:
        raise PaxNotFoundError(
            f"{directory} holds no Pax checkpoint; give a directory with checkpoint_00000020 or the like in it"
        )
    return PaxCheckpoints(found).open(step)


def _with_lists(node: Any) -> Any:
    """Turns dicts whose keys are numbers into lists. An index without variables becomes None."""
    if not isinstance(node, dict):
        return node
    children = {key: _with_lists(child) for key, child in node.items()}
    if not children or not all(key.isdigit() for key in children):
        return children
    return [children.get(str(i)) for i in range(max(map(int, children)) + 1)]
