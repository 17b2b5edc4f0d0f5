"""Hugging Face folders as checkpoints: in `init_from_checkpoint_rules`, and with the reading methods of `Checkpointer`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh, NamedSharding

from spmd_trainer.checkpointing import mismatch, records
from spmd_trainer.checkpointing.agreement import agreed_problem, decided_by_process_0
from spmd_trainer.checkpointing.reading import Restored
from spmd_trainer.checkpointing.records import SavedVariable
from spmd_trainer.hf import folder as hf_folder
from spmd_trainer.hf import placing
from spmd_trainer.hf.errors import HfMismatchError, HfNotFoundError
from spmd_trainer.hf.folder import HfFolder
from spmd_trainer.hf.tensor_names import ROOT
from spmd_trainer.train_states import TrainState

if TYPE_CHECKING:
    from spmd_trainer.sharding.variables import VariableSpec

_VARS, _STEP = "mdl_vars/", "step"
FIX = (
    "Fix: build the model from the folder (lm.hf.FromFolder), or load the parts that fit with "
    "task.train.init_from_checkpoint_rules"
)


@dataclasses.dataclass(frozen=True)
class HfSource:
    """A folder to load variables from; see `checkpointing.sources.Source`.

    Attributes:
      folder: the folder.
      saved: its variables by path, with the dtypes of the stored tensors.
    """

    folder: HfFolder
    saved: dict[str, SavedVariable]

    @property
    def name(self) -> str:
        """The folder in messages."""
        return self.folder.label

    def fits(self, path: str, shape: Sequence[int]) -> bool:
        """Returns True if a variable has this logical shape."""
        return self.saved[path].shape == tuple(shape)

    def read(self, wanted: Mapping[str, VariableSpec], mesh: Mesh, source: Mapping[str, str]) -> dict[str, jax.Array]:
        """Reads variables onto a mesh: {wanted path: array}. `source` maps wanted paths to those of `saved`."""
        variables = {path: self.folder.variables[source[path]] for path in wanted}
        result: dict[str, jax.Array] = {}
        agreed_problem(lambda: result.update(placing.read_onto_mesh(wanted, variables, self.folder.tensors, mesh)))
        return result


def find_agreed(directory: epath.Path) -> bool:
    """Returns True if a directory is a Hugging Face folder, as process 0 sees it. Called by every process."""
    return decided_by_process_0(lambda: hf_folder.is_folder(directory))


def open_source(directory: epath.Path, step: int | None, variables: TrainState | None = None) -> HfSource | None:
    """Opens a folder. Called by every process.

    Args:
      directory: the folder.
      step: must be None or 0, because a folder has no steps.
      variables: not used; other kinds of checkpoints need the model.

    Returns:
      The source, or None if the directory is no Hugging Face folder.

    Raises:
      HfError: it can't be opened; see `folder.open_folder`. Or a step was asked for.
      CheckpointReadError: storage does not answer, or refuses.
    """
    del variables
    if not find_agreed(directory):
        return None
    if step:
        raise HfNotFoundError(f"step {step} was asked for, and a Hugging Face folder has no steps: {directory}")
    opened: list[HfFolder] = []
    agreed_problem(lambda: opened.append(hf_folder.open_folder(directory)))
    folder = opened[0]
    saved = {}
    for path, variable in folder.variables.items():
        dtype = folder.tensors[variable.pieces[0].name].dtype
        saved[path] = SavedVariable(variable.shape, records.dtype_name(dtype), variable.shape, "")
    return HfSource(folder, saved)


class HfCheckpoints:
    """A Hugging Face folder with the reading methods of `Checkpointer`: its variables are step 0 of a run.

    Every process of the job makes the same calls.
    """

    def __init__(self, directory: epath.Path) -> None:
        """Reads nothing yet."""
        self.directory = directory

    def __enter__(self) -> HfCheckpoints:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del exc_type, exc, traceback  # Nothing is kept open.

    def holds_steps(self) -> bool:
        """Returns True: the folder is one."""
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
        """Reads the folder onto a mesh.

        Args:
          variables: a TrainState of VariableSpecs without optimizer states.
          mesh: the mesh.
          step: None or 0.
          partial: do not read tensors of variables that `variables` lacks.
          with_input: not used; a folder has no position of an input.

        Raises:
          HfMismatchError: the folder holds another model, or `variables` has optimizer states.
          HfError, CheckpointReadError: see `open_source`.
        """
        del with_input
        source = open_source(self.directory, step)
        if source is None:
            raise HfNotFoundError(f"{self.directory} is no Hugging Face folder any more: it has no config.json")
        specs = records.by_path(variables)
        wanted = {path: spec for path, spec in specs.items() if path.startswith(_VARS)}
        rest = [path for path in specs if path not in wanted and path != _STEP]
        if rest:
            raise HfMismatchError(f"{source.name} has no optimizer states and no moving averages, such as {rest[0]}")
        check_variables(source, wanted, partial=partial)
        read = source.read(wanted, mesh, {path: path for path in wanted})
        if _STEP in specs:
            read[_STEP] = _step_zero(specs[_STEP], mesh)
        state: TrainState = jax.tree.unflatten(jax.tree.structure(variables), [read[path] for path in specs])
        record = records.make(0, state, specs, None, {"hugging_face_folder": {"path": str(self.directory)}})
        return Restored(state, 0, None, record)


def check_variables(source: HfSource, wanted: Mapping[str, VariableSpec], *, partial: bool = False) -> None:
    """Makes sure that a folder holds a model's variables.

    Args:
      source: the folder.
      wanted: the model's variables by path, without optimizer states.
      partial: True if the folder may hold further ones.

    Raises:
      HfMismatchError: paths or shapes differ.
    """
    in_model = {path: SavedVariable.from_spec(spec) for path, spec in wanted.items()}
    saved = {path: saved for path, saved in source.saved.items() if path in wanted or not partial}
    # A model's variables are converted to its own dtype.
    alike = {
        path: dataclasses.replace(saved[path], dtype=in_model[path].dtype) if path in in_model else saved[path]
        for path in saved
    }
    if not any(path.startswith(ROOT) for path in wanted):
        raise HfMismatchError(
            f"{source.name} holds variables of a decoder below {ROOT}, and the model has none there. {FIX}"
        )
    if message := mismatch.explain(alike, in_model, source.name, fix=FIX):
        raise HfMismatchError(message)


def _step_zero(spec: VariableSpec, mesh: Mesh) -> jax.Array:
    zero = np.zeros(spec.padded_shape, spec.dtype)
    return jax.make_array_from_callback(zero.shape, NamedSharding(mesh, spec.spec), lambda index: zero[index])
