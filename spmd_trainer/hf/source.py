"""Presents a Hugging Face folder as a checkpoint for `checkpointing.restore` and `init_from_checkpoint_rules`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import numpy as np
from absl import logging
from etils import epath
from jax.sharding import Mesh, NamedSharding

from spmd_trainer.checkpointing import records
from spmd_trainer.checkpointing.agreement import agreed, decided_by_process_0
from spmd_trainer.checkpointing.records import SavedVariable
from spmd_trainer.checkpointing.sources import CheckpointSource
from spmd_trainer.hf import folder as hf_folder
from spmd_trainer.hf import placing
from spmd_trainer.hf.errors import HfMismatchError, HfNotFoundError
from spmd_trainer.hf.families.family import MTP_ROOTS, ROOT
from spmd_trainer.hf.folder import HfFolder
from spmd_trainer.train_states import TrainState

if TYPE_CHECKING:
    from spmd_trainer.sharding.variables import VariableSpec

_VARS, _STEP = "mdl_vars/", "step"


@dataclasses.dataclass(frozen=True)
class HfSource(CheckpointSource):
    """A Hugging Face folder, presented as a checkpoint at step 0 whose variables have the dtypes of the stored tensors.

    Attributes:
      folder: the opened folder.
    """

    folder: HfFolder

    fix = (
        "Fix: build the model from the folder (lm.hf.FromFolder), or load the parts that fit with "
        "task.train.init_from_checkpoint_rules"
    )
    mismatch_error = HfMismatchError

    def require_fit(self, wanted: Mapping[str, VariableSpec], *, partial: bool = False) -> None:
        """Checks that the folder holds the variables `wanted`, in any floating-point dtype. See `CheckpointSource.require_fit`.

        Raises:
          HfMismatchError: paths or shapes differ; `wanted` has optimizer states or EMAs; or it has no decoder variables.
        """
        in_folder = {path: spec for path, spec in wanted.items() if path != _STEP}
        if rest := [path for path in in_folder if not path.startswith(_VARS)]:
            raise HfMismatchError(f"{self.name} has no optimizer states and no moving averages, such as {rest[0]}")
        if not any(path.startswith(ROOT) for path in in_folder):
            raise HfMismatchError(
                f"{self.name} holds variables of a decoder below {ROOT}, and the model has none there. {self.fix}"
            )
        saved = {p: variable for p, variable in self.saved.items() if p in in_folder or not p.startswith(MTP_ROOTS)}
        for path in saved.keys() & in_folder.keys():
            # Stored values are converted to the model's dtype when they are read.
            saved[path] = dataclasses.replace(saved[path], dtype=records.dtype_name(in_folder[path].dtype))
        super(HfSource, dataclasses.replace(self, saved=saved)).require_fit(in_folder, partial=partial)

    def read(self, wanted: Mapping[str, VariableSpec], mesh: Mesh, source: Mapping[str, str]) -> dict[str, jax.Array]:
        """Reads variables onto a mesh. If `wanted` includes the step counter, it becomes 0. See `CheckpointSource.read`."""
        variables = {path: self.folder.variables[source[path]] for path in wanted if path != _STEP}
        read = {source[path] for path in variables}
        if left_out := [path for path in self.saved if path.startswith(MTP_ROOTS) and path not in read]:
            logging.warning(
                "%s: layers that predict further tokens are not read, as spec.mtp_layers of the model is smaller than theirs: "
                "%d variables, e.g. %s",
                self.name,
                len(left_out),
                left_out[0],
            )
        specs = {path: wanted[path] for path in variables}
        result = agreed(lambda: placing.read_onto_mesh(specs, variables, self.folder.tensors, mesh))
        if _STEP in wanted:
            zero = np.zeros(wanted[_STEP].padded_shape, wanted[_STEP].dtype)
            result[_STEP] = jax.device_put(zero, NamedSharding(mesh, wanted[_STEP].spec))
        return result


def find_agreed(directory: epath.Path) -> bool:
    """Returns True on every process if process 0 sees that `directory` is a Hugging Face folder. Called by every process."""
    return decided_by_process_0(lambda: hf_folder.is_folder(directory))


def open_source(directory: epath.Path, step: int | None, variables: TrainState | None = None) -> HfSource | None:
    """Opens a Hugging Face folder as a checkpoint source. Called by every process.

    Args:
      directory: the folder.
      step: must be None or 0, because a folder has no training steps.
      variables: not used; the functions that open other kinds of checkpoints need the model's variables.

    Returns:
      The source, or None if the directory is not a Hugging Face folder.

    Raises:
      HfError: the folder can't be opened (see `folder.open_folder`), or `step` is neither None nor 0.
      CheckpointReadError: storage does not answer, or refuses access.
    """
    del variables
    if not find_agreed(directory):
        return None
    if step:
        raise HfNotFoundError(f"step {step} was asked for, and a Hugging Face folder has no steps: {directory}")
    folder = agreed(lambda: hf_folder.open_folder(directory))
    saved = {}
    for path, variable in folder.variables.items():
        dtype = folder.tensors[variable.pieces[0].name].dtype
        saved[path] = SavedVariable(variable.shape, records.dtype_name(dtype), variable.shape, "")
    about = {"hugging_face_folder": {"path": str(directory)}}
    return HfSource(folder.label, 0, saved, about, folder)
