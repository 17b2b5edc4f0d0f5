"""The training state: input and output of a train step, and the content of a checkpoint."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

# JAX has no static type for pytrees and praxis is untyped, so these names tell a reader what a tree holds.
PyTree: TypeAlias = Any
NestedJTensor: TypeAlias = PyTree  # jax.Arrays, in nested dicts or praxis NestedMaps (praxis' name)
NestedShapeDtypeStruct: TypeAlias = PyTree  # jax.ShapeDtypeStructs
NestedPartitionSpec: TypeAlias = PyTree  # PartitionSpecs
NestedWeightHParams: TypeAlias = PyTree  # praxis WeightHParams

# The paths of the variables of adapters (`task.lora`) begin with this.
_ADAPTERS = "params/lora/"


def is_adapter(path: str) -> bool:
    """Returns True if a variable's path belongs to an adapter. The path may have the prefix 'mdl_vars/'."""
    return path.removeprefix("mdl_vars/").startswith(_ADAPTERS)


@struct.dataclass
class TrainState:
    """Step counter, model variables and optimizer states. "Step n" is the state after n training steps.

    The leaves are arrays in a live state. Elsewhere the same structure has shapes, specs, shardings or VariableSpecs as leaves.

    Attributes:
      step: scalar uint32, the number of steps taken.
      mdl_vars: the model's variables by collection, e.g. {'params': {...}, 'non_trainable': {...}}.
      opt_states: one optimizer state per learner and chained transformation.
      extra_state: a tuple with further values that an experiment adds; empty by default.
    """

    step: Any
    mdl_vars: PyTree
    opt_states: list[PyTree]
    extra_state: PyTree = ()

    def __repr__(self) -> str:
        """Returns counts of arrays and elements instead of all values."""
        variables = jax.tree.leaves(self.mdl_vars)
        elements = sum(math.prod(getattr(x, "shape", ())) for x in variables)
        return (
            f"TrainState(step={_step_text(self.step)}, mdl_vars={len(variables)} arrays of {elements:,} elements, "
            f"opt_states={len(jax.tree.leaves(self.opt_states))} arrays)"
        )

    @classmethod
    def create(cls, mdl_vars: PyTree, opt_states: list[PyTree], extra_state: PyTree = ()) -> TrainState:
        """Returns the state before the first step."""
        return cls(step=jnp.zeros((), jnp.uint32), mdl_vars=mdl_vars, opt_states=opt_states, extra_state=extra_state)

    def new_state(self, mdl_vars: PyTree, opt_states: list[PyTree], extra_state: PyTree = ()) -> TrainState:
        """Returns the state one step later."""
        return TrainState(step=self.step + 1, mdl_vars=mdl_vars, opt_states=opt_states, extra_state=extra_state)

    def to_eval_state(self) -> TrainState:
        """Returns the state without optimizer states, which evaluation does not need."""
        return TrainState(step=self.step, mdl_vars=self.mdl_vars, opt_states=[], extra_state=())


def _step_text(step: Any) -> str:
    """Returns the step number, 'deleted' for a donated buffer, or the type's name for a tracer, a shape or a spec."""
    if isinstance(step, jax.core.Tracer) or not isinstance(step, int | np.generic | np.ndarray | jax.Array):
        return type(step).__name__
    return "deleted" if isinstance(step, jax.Array) and step.is_deleted() else str(int(step))
