"""The training state: what a step reads and returns, and what a checkpoint holds."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct


@struct.dataclass
class TrainState:
    """Step counter, model variables and optimizer states. "Step n" is the state after n training steps.

    Attributes:
      step: scalar uint32, the number of steps taken.
      mdl_vars: the model's variables by collection, e.g. {'params': {...}, 'non_trainable': {...}}.
      opt_states: one optimizer state per learner and chained transformation.
      extra_state: a tuple of whatever an experiment adds; empty by default.
    """

    step: Any
    mdl_vars: Any
    opt_states: list[Any]
    extra_state: Any = ()

    def __repr__(self) -> str:
        """What there is, instead of every number of every array."""
        variables = jax.tree.leaves(self.mdl_vars)
        elements = sum(math.prod(getattr(x, "shape", ())) for x in variables)
        return (
            f"TrainState(step={_step_text(self.step)}, mdl_vars={len(variables)} arrays of {elements:,} elements, "
            f"opt_states={len(jax.tree.leaves(self.opt_states))} arrays)"
        )

    @classmethod
    def create(cls, mdl_vars: Any, opt_states: list[Any], extra_state: Any = ()) -> TrainState:
        """Returns the state before the first step."""
        return cls(step=jnp.zeros((), jnp.uint32), mdl_vars=mdl_vars, opt_states=opt_states, extra_state=extra_state)

    def new_state(self, mdl_vars: Any, opt_states: list[Any], extra_state: Any = ()) -> TrainState:
        """Returns the state one step later."""
        return TrainState(step=self.step + 1, mdl_vars=mdl_vars, opt_states=opt_states, extra_state=extra_state)

    def to_eval_state(self) -> TrainState:
        """Returns the state without optimizer states, all that evaluation needs."""
        return TrainState(step=self.step, mdl_vars=self.mdl_vars, opt_states=[], extra_state=())


def _step_text(step: Any) -> str:
    """The number, where there is one: not while tracing, nor in a state of shapes or of buffers that a step has used up."""
    if isinstance(step, jax.core.Tracer) or not isinstance(step, int | np.generic | np.ndarray | jax.Array):
        return type(step).__name__
    return "used up" if isinstance(step, jax.Array) and step.is_deleted() else str(int(step))
