"""A Pax checkpoint in `init_from_checkpoint_rules`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
from etils import epath
from jax.sharding import Mesh

from spmd_trainer.checkpointing import records
from spmd_trainer.checkpointing.agreement import agreed_problem
from spmd_trainer.checkpointing.records import SavedVariable
from spmd_trainer.pax import placing, shapes, steps
from spmd_trainer.pax.arrays import PaxArray
from spmd_trainer.pax.checkpoints import PaxCheckpoints, as_saved
from spmd_trainer.sharding.variables import VariableSpec
from spmd_trainer.train_states import TrainState


@dataclasses.dataclass(frozen=True)
class PaxSource:
    """A step of a Pax checkpoint to load variables from; see `checkpointing.sources.Source`.

    Attributes:
      name: names the step in messages.
      saved: its variables by path.
      arrays: where they are.
    """

    name: str
    saved: dict[str, SavedVariable]
    arrays: Mapping[str, PaxArray]

    def fits(self, path: str, shape: Sequence[int]) -> bool:
        """Returns True if a saved variable can have this logical shape."""
        return self.saved[path].shape == tuple(shape) or shapes.can_be(self.arrays[path], shape)

    def read(self, wanted: Mapping[str, VariableSpec], mesh: Mesh, source: Mapping[str, str]) -> dict[str, jax.Array]:
        """Reads variables onto a mesh: {wanted path: array}. `source` maps wanted paths to saved ones."""
        arrays = {path: self.arrays[source[path]] for path in wanted}
        result: dict[str, jax.Array] = {}
        # Each variable's padding is checked by one process, and all end with what it found.
        agreed_problem(lambda: result.update(placing.read_onto_mesh(wanted, arrays, mesh, self.name)))
        return result


def open_source(directory: epath.Path, step: int | None, variables: TrainState) -> PaxSource | None:
    """Opens a step of a Pax checkpoint. Called by every process.

    Args:
      directory: a directory of Pax checkpoints, the run's directory above it, or the directory of one step.
      step: the step; None for the newest.
      variables: a TrainState of VariableSpecs: the model.

    Returns:
      The source, or None if the directory holds no Pax checkpoint.

    Raises:
      PaxNotFoundError, PaxDamagedError, PaxError: it can't be opened.
      CheckpointReadError: storage does not answer, or refuses.
    """
    found = steps.find_agreed(directory)
    if found is None:
        return None
    contents = PaxCheckpoints(found).open(step)
    specs = records.by_path(variables)
    # Pax saves no variables without elements.
    arrays = contents.by_path([path for path, spec in specs.items() if 0 not in spec.logical_shape])
    saved = {path: as_saved(array, specs.get(path), arrays) for path, array in arrays.items()}
    return PaxSource(f"step {contents.step} of the Pax checkpoints in {found.path}", saved, arrays)
