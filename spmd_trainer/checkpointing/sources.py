"""`restore(source, layout)`: checks that a checkpoint fits a state, then reads it onto the state's mesh.

Every kind of checkpoint is a `CheckpointSource`: a step of this trainer or of Pax, plain Flax arrays, Hugging Face folders,
PEFT adapters.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

import jax
from etils import epath
from jax.sharding import Mesh

from spmd_trainer.checkpointing import frozen_base, mismatch, records
from spmd_trainer.checkpointing.agreement import agreed_problem
from spmd_trainer.checkpointing.errors import CheckpointMismatchError

if TYPE_CHECKING:
    from spmd_trainer.sharding.variables import VariableSpec
    from spmd_trainer.train_states import TrainState


class Layout(Protocol):
    """The variables of a state and their mesh; for example, the `Layout` of a compiled training step."""

    @property
    def variables(self) -> TrainState:
        """A TrainState (or another tree) of VariableSpecs."""

    @property
    def mesh(self) -> Mesh:
        """The mesh of the variables."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """A restored checkpoint.

    Attributes:
      state: the state, in the structure of the requested variables, at padded shapes on the requested mesh.
      step: the number of training updates that led to the state.
      input_state: this process' input position, as given to `Checkpointer.save`; None if it was not requested or not saved.
      metadata: the whole JSON record, as `Checkpointer.read_metadata` returns it.
    """

    state: TrainState
    step: int
    input_state: dict[str, Any] | None
    metadata: records.Record


@dataclasses.dataclass(frozen=True)
class CheckpointSource(abc.ABC):
    """A checkpoint from which variables can be read. Every process of the job must open it and make the same calls.

    Attributes:
      name: the name of the checkpoint in messages.
      step: the number of training updates that led to the saved state.
      saved: the checkpoint's variables by path.
      metadata: the metadata from the program that wrote the checkpoint, e.g. the resolved config.
    """

    name: str
    step: int
    saved: Mapping[str, records.SavedVariable]
    metadata: Mapping[str, Any]

    # The last sentence of the error message if the checkpoint does not fit, and the class of this error.
    fix: ClassVar[str] = mismatch.FIX
    mismatch_error: ClassVar[type[CheckpointMismatchError]] = CheckpointMismatchError

    @property
    def label(self) -> str:
        """The beginning of a message about this checkpoint."""
        return self.name

    @abc.abstractmethod
    def read(self, wanted: Mapping[str, VariableSpec], mesh: Mesh, source: Mapping[str, str]) -> dict[str, jax.Array]:
        """Reads variables onto a mesh. Each process reads the shards of its own devices.

        Args:
          wanted: the model's variables by path. A saved array of a different dtype is converted.
          mesh: the mesh.
          source: {wanted path: saved path}.

        Returns:
          {wanted path: array at its padded shape}, with zeros in the padding.
        """

    def fits(self, path: str, shape: Sequence[int]) -> bool:
        """Returns True if a saved variable can be read at this logical shape."""
        return self.saved[path].shape == tuple(shape)

    def require_fit(self, wanted: Mapping[str, VariableSpec], *, partial: bool = False) -> None:
        """Checks that the checkpoint holds the model's variables.

        Args:
          wanted: the model's variables by path.
          partial: True if the checkpoint may hold more variables.

        Raises:
          CheckpointMismatchError: paths, logical shapes or dtypes differ; the message lists them with the likely cause.
        """
        saved = {path: variable for path, variable in self.saved.items() if path in wanted or not partial}
        in_model = {path: records.SavedVariable.from_spec(spec) for path, spec in wanted.items()}
        if message := mismatch.explain(saved, in_model, self.label, fix=self.fix):
            raise self.mismatch_error(message)

    def input_state(self) -> dict[str, Any] | None:
        """Returns the position from which this process resumes the training input; None if the checkpoint has none."""
        return None

    def record(self, state: TrainState, specs: Mapping[str, VariableSpec]) -> records.Record:
        """Returns the JSON record of a state that was read from this source. `specs` are its VariableSpecs by path."""
        return records.make(self.step, state, specs, None, self.metadata)


# Opens another trainer's checkpoint: (directory, step or None, the model's VariableSpecs) -> source, or None if there is none.
OpenForeign: TypeAlias = "Callable[[epath.Path, int | None, TrainState], CheckpointSource | None]"


def restore(source: CheckpointSource, layout: Layout, *, partial: bool = False, with_input: bool = True) -> Restored:
    """Reads a checkpoint onto a mesh. All processes must call it.

    A state with adapters is restored without its frozen base, which its checkpoints lack: the result has None in place of the
    base. Optimizer states that were saved in a different dtype (of `opt_state_dtypes.DTYPES`) are converted; this is logged.

    Args:
      source: the checkpoint.
      layout: the state to restore, and its mesh.
      partial: True ignores saved variables that the layout lacks, e.g. optimizer states in evaluation. The checkpoint must
        still hold all variables of the layout.
      with_input: True also reads the position in the training input.

    Raises:
      CheckpointMismatchError: the checkpoint lacks variables, has additional ones, or has one with a different shape or dtype;
        or the input position was saved by a different number of processes.
      CheckpointError: the source cannot be read; see its class.
    """
    # `opt_state_conversion` imports praxis, which reading a checkpoint's record doesn't need.
    from spmd_trainer.checkpointing import opt_state_conversion

    variables = frozen_base.trained_part(layout.variables, layout.variables)
    wanted = records.by_path(variables)
    changed = opt_state_conversion.conversion(source.saved, wanted)
    positions: list[dict[str, Any] | None] = []

    def check() -> None:
        if message := mismatch.explain_adapters(source.saved, wanted, source.label):
            raise CheckpointMismatchError(message)
        source.require_fit(changed.read, partial=partial)
        positions.append(source.input_state() if with_input else None)

    # Each process has opened the source itself and reads its own input position. If one fails, all fail.
    agreed_problem(check)
    arrays = source.read(changed.read, layout.mesh, changed.source)
    arrays = changed.made(arrays, layout.mesh, source.step)
    state: TrainState = jax.tree.unflatten(jax.tree.structure(variables), [arrays[path] for path in wanted])
    return Restored(state, source.step, positions[0], source.record(state, wanted))
