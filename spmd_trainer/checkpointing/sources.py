"""The checkpoints that warm starts read from: steps of this trainer, or anything else with the same methods."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import jax
from absl import logging
from etils import epath
from jax.sharding import Mesh

from spmd_trainer.checkpointing import manifest, records, step_files, steps
from spmd_trainer.checkpointing.agreement import agreed_problem, decided_by_process_0
from spmd_trainer.checkpointing.errors import CheckpointNotFoundError, DamagedCheckpointError

if TYPE_CHECKING:
    from spmd_trainer.sharding.variables import VariableSpec
    from spmd_trainer.train_states import TrainState


class Source(Protocol):
    """A step to load variables from."""

    @property
    def name(self) -> str:
        """The step in messages."""

    @property
    def saved(self) -> Mapping[str, records.SavedVariable]:
        """Its variables by path."""

    def fits(self, path: str, shape: Sequence[int]) -> bool:
        """Returns True if a saved variable can have this logical shape."""

    def read(self, wanted: Mapping[str, VariableSpec], mesh: Mesh, source: Mapping[str, str]) -> dict[str, jax.Array]:
        """Reads variables onto a mesh.

        Args:
          wanted: the model's variables by path. A saved array of another dtype is converted.
          mesh: the mesh.
          source: {wanted path: saved path}.

        Returns:
          {wanted path: array at its padded shape}.
        """


# Opens a checkpoint of another trainer: (directory, step or None, the model's VariableSpecs) -> None if it is none.
OpenForeign: TypeAlias = "Callable[[epath.Path, int | None, TrainState], Source | None]"


@dataclasses.dataclass(frozen=True)
class OwnSource:
    """A step that this trainer saved.

    Attributes:
      name: names the step in messages.
      step_dir: its directory.
      saved: its variables by path.
      metadata: what the run noted in its record.
    """

    name: str
    step_dir: epath.Path
    saved: dict[str, records.SavedVariable]
    metadata: dict[str, Any]

    def fits(self, path: str, shape: Sequence[int]) -> bool:
        """Returns True if a saved variable has this logical shape."""
        return self.saved[path].shape == tuple(shape)

    def read(self, wanted: Mapping[str, VariableSpec], mesh: Mesh, source: Mapping[str, str]) -> dict[str, jax.Array]:
        """Reads variables onto a mesh; see `Source.read`."""
        # Importing Orbax takes 0.4 s: not before arrays are read.
        from spmd_trainer.checkpointing import orbax_io

        return orbax_io.read_arrays(self.step_dir / orbax_io.STATE_ITEM, self.saved, wanted, mesh, source=source)


def open_source(directory: epath.Path, step: int | None, check_contents: bool) -> OwnSource:
    """Finds the step to load from: the named step, or the newest whole one. Called by every process.

    Args:
      directory: a run's `job_log_dir`, its `checkpoints`, or one step in it.
      step: the step; None for the newest whole one.
      check_contents: True compares the checksums of the files; False compares sizes only.

    Raises:
      CheckpointNotFoundError: there is no such step, or no whole one.
      DamagedCheckpointError: the named step is damaged.
      CheckpointReadError: storage does not answer, or refuses.
    """
    name, own_step = decided_by_process_0(lambda: _find(directory))
    directory = epath.Path(name)
    step = own_step if own_step is not None else step
    for candidate in steps.agreed_newest_first(directory) if step is None else [step]:
        found: list[records.Record] = []
        check = functools.partial(_problem, directory, candidate, check_contents, found)
        try:
            problem = agreed_problem(check)
        except CheckpointNotFoundError:
            if step is not None:
                raise
            continue  # deleted since it was listed
        if problem is None:
            record, name = found[0], f"step {candidate} in {directory}"
            saved = records.saved_variables(record)
            return OwnSource(name, steps.step_dir(directory, candidate), saved, record["metadata"])
        if step is not None:
            raise DamagedCheckpointError(
                f"init_from_checkpoint_rules: step {step} in {directory} is refused: {problem}."
            )
        logging.warning("Checkpoint step %d in %s is refused: %s.", candidate, directory, problem)
    raise CheckpointNotFoundError(f"init_from_checkpoint_rules: no whole checkpoint in {directory}.")


def _find(directory: epath.Path) -> tuple[str, int | None]:
    """Returns the directory of checkpoints that is meant, and the step if the directory of one step was given."""

    def find() -> tuple[str, int | None]:
        if directory.name.isdigit() and (directory / records.RECORD_ITEM).exists():
            return str(directory.parent), int(directory.name)
        below = directory / "checkpoints"
        return str(below if below.exists() else directory), None

    return step_files.read(f"looking for checkpoints in {directory}", find)


def _problem(directory: epath.Path, step: int, check_contents: bool, found: list[records.Record]) -> str | None:
    """Returns what is wrong with the part of a step that this process checks. Appends its record to `found`."""
    step_dir = steps.step_dir(directory, step)
    try:
        # Checksums come first: they say which file is damaged.
        if check_contents and (problem := steps.contents_problem(directory, step)):
            return problem
        found.append(records.read(step_dir, step))
    except DamagedCheckpointError as error:
        return str(error).removesuffix(".")
    return None if check_contents else manifest.quick_problem(step_dir, step)
