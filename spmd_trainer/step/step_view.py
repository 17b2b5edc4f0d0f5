"""How a pure step sees the train state: this is where a step slices the padding off, and puts it back."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from spmd_trainer.sharding.variables import VariableSpec
from spmd_trainer.step.state_layout import StateMetadata
from spmd_trainer.tasks_lib import SingleTask
from spmd_trainer.train_states import TrainState


@dataclasses.dataclass(frozen=True)
class StepView:
    """The state as the pure step sees it: with some padding kept, or with none.

    Attributes:
      task: the task to run. If padding is kept, its model has the padded vocabulary.
      metadata: the state as the step sees it: logical shapes, except for the dimensions that keep their padding.
      logical: the state as everything else sees it.
    """

    task: SingleTask
    metadata: StateMetadata
    logical: StateMetadata

    def slice(self, state: TrainState) -> TrainState:
        """Padded state -> the state as the step sees it. Under jit."""
        return self.metadata.slice(state)

    def pad(self, state: TrainState) -> TrainState:
        """The step's new state -> padded state. All padding is set to zero, even if the step wrote to it. Under jit."""
        padded: TrainState = jax.tree.map(
            _zero_beyond, self.logical.variables, self.metadata.variables, self.metadata.pad(state)
        )
        return padded


def _zero_beyond(logical: VariableSpec, seen: VariableSpec, x: jax.Array) -> jax.Array:
    """Sets the padding to zero in the dimensions whose padding the step keeps."""
    for dim, (size, kept) in enumerate(zip(logical.logical_shape, seen.logical_shape, strict=True)):
        if size != kept:
            x = jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, dim) < size, x, jnp.zeros((), x.dtype))
    return x
