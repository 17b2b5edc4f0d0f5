"""Optimizer states in pinned host memory: the step copies them to the devices part by part, and back.

The parts are the layers of repeated (stacked) variables, one after the other in a loop, and then all other variables together.
A loop is what keeps the order: a scheduler starts copies as early as it can, and without one it starts all of them before the
first update. So a device holds the states of one layer, or those of all variables outside of repeated layers.

The optimizer sees the same arrays as for states on the devices, so the results are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh
from praxis import base_layer
from praxis import optimizer_prefix_vectorization as opt_vec

from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.sharding.variables import VariableSpec
from spmd_trainer.step import opt_state_dtypes
from spmd_trainer.step.layout import HostPart
from spmd_trainer.train_states import PyTree

if TYPE_CHECKING:
    from spmd_trainer.step.learner import Learner

DEVICE, PINNED_HOST = "device", "pinned_host"
MEMORY_KINDS = (DEVICE, PINNED_HOST)
# Smaller parts stay on the devices: a copy of its own would cost more time than they take memory.
_LEAST_ELEMENTS = 4096


def check(learner: Any) -> None:
    """Checks a learner's `opt_state_memory_kind`.

    Raises:
      ValueError: an unknown memory kind.
    """
    kind = learner.opt_state_memory_kind
    if kind not in MEMORY_KINDS:
        raise ValueError(
            f"opt_state_memory_kind is {kind!r}; it is one of {MEMORY_KINDS}{did_you_mean(str(kind), MEMORY_KINDS)}"
        )


def memory_kind(learner: Any, variable: VariableSpec) -> str | None:
    """Returns the memory kind of a part of the train state: that of the learner for large parts of an optimizer state.

    Moving averages, which evaluation reads, stay on the devices, and so do parts that are split or padded in dimension 0 of
    repeated layers.
    """
    if learner.opt_state_memory_kind == DEVICE or not variable.path.startswith("opt_states/"):
        return None
    is_small = int(np.prod(variable.logical_shape)) < _LEAST_ELEMENTS
    return None if is_small or opt_state_dtypes.is_average(variable.path) else str(learner.opt_state_memory_kind)


def check_devices(learner: Any, mesh: Mesh) -> None:
    """Checks that a mesh's devices have the memory that the learner asks for.

    Raises:
      UserError: they don't; names them, and the memory kinds that they have.
    """
    if learner.opt_state_memory_kind == DEVICE or not isinstance(mesh, Mesh):
        return
    device = mesh.devices.flat[0]
    try:
        kinds = sorted(memory.kind for memory in device.addressable_memories())
    except Exception:  # compile-only devices of GPUs have none, and each kind of device raises an error of its own
        kinds = []
    if learner.opt_state_memory_kind not in kinds:
        raise UserError(
            f"task.train.learner.opt_state_memory_kind={learner.opt_state_memory_kind!r}: the devices ({device.device_kind}) "
            f"have {'the memory kinds ' + ', '.join(kinds) if kinds else 'no memory kinds'}, so that states in host memory "
            f"can't be compiled for them; set it to {DEVICE!r}, or use devices that are here, or a TPU topology"
        )


def is_host_part(x: Any) -> bool:
    """Returns True for a part of a state in host memory, as a step gets it."""
    return isinstance(x, HostPart)


def any_on_host(states: PyTree) -> bool:
    """Returns True if a part of an optimizer state is in host memory."""
    return any(map(is_host_part, jax.tree.leaves(states, is_leaf=is_host_part)))


def update(
    learner: Learner,
    grads: PyTree,
    states: PyTree,
    mdl_vars: PyTree,
    hparams: PyTree,
    step: jax.Array,
    valid: jax.Array,
) -> tuple[PyTree, PyTree]:
    """Runs the optimizer on stored states, part by part.

    Args:
      learner: the learner.
      grads: clipped gradients.
      states: the stored optimizer state, with `HostPart`s.
      mdl_vars, hparams: the variables and their WeightHParams, in the structure of `grads`.
      step: uint32, the number of the training step.
      valid: bool scalar; False keeps the state.

    Returns:
      The updates, in the structure of `grads`, and the new stored state.
    """
    repeated = _repeated(learner, states, mdl_vars, hparams)
    updates, new_states = grads, dict(states) if repeated else states
    left = grads, mdl_vars, hparams
    for key, others in repeated.items():
        parts = [_without(tree, others) for tree in (grads, mdl_vars)]
        found, new_states[key] = _by_row(learner, key, states[key], *parts, hparams, step, valid)
        updates = jax.tree.map(lambda other, old, new: old if other else new, others, updates, found)
        mine = jax.tree.map(lambda other: not other, others)
        left = tuple(_without(tree, mine) for tree in left)
    if repeated:
        rest = type(states)({key: state for key, state in states.items() if key not in repeated})
        tx = opt_vec.get_transformations_with_vectorized_repeat_prefix(
            learner.raw_grad_tx(hparams), left[2], learner.repeat_prefix_sep, force_prefix_structure=True
        )
    else:
        rest, tx = states, learner.get_grad_tx(hparams)
    found, new_rest = _whole(learner, tx, rest, left[0], left[1], step, valid)
    if not repeated:
        return found, new_rest
    is_left = jax.tree.map(lambda *others: all(others), *repeated.values())
    updates = jax.tree.map(lambda mine, old, new: new if mine else old, is_left, updates, found)
    return updates, type(states)(new_states | new_rest)


def _repeated(learner: Learner, states: PyTree, mdl_vars: PyTree, hparams: PyTree) -> dict[str, PyTree]:
    """Returns {key in the state: tree of bools, True for variables of other keys} of the layers that are updated in a loop."""
    if not learner.vectorize_on_repeat_prefix or not isinstance(states, dict) or opt_vec.NO_PREFIX_KEY not in states:
        return {}
    stackings = {_stacking(p) for p in jax.tree.leaves(hparams)}
    found = {}
    for stacking in sorted(stackings, key=str):
        if len(stacking[0]) != 1 or any(entry not in (None, -1) for entry in stacking[1]):
            continue
        others = jax.tree.map(lambda p, of=stacking: _stacking(p) != of, hparams)
        tx = opt_vec.get_transformations_with_vectorized_repeat_prefix(
            learner.raw_grad_tx(hparams), _without(hparams, others), learner.repeat_prefix_sep
        )
        (key,) = set(jax.eval_shape(tx.init, _without(mdl_vars, others))) - {opt_vec.NO_PREFIX_KEY}
        if any_on_host(states[key]):
            found[key] = others
    return found


def _without(tree: PyTree, others: PyTree) -> PyTree:
    """Returns a tree without the leaves where `others` is True, as praxis groups the variables of repeated layers."""
    return jax.tree.map(lambda other, x: optax.MaskedNode() if other else x, others, tree)


def _stacking(p: base_layer.WeightHParams) -> tuple[Any, ...]:
    entries = (p.repeat_prefix, p.repeat_prefix_split_dims_mapping, p.repeat_optimizer_dims_mapping)
    return tuple(tuple(entry or ()) for entry in entries)


def _whole(
    learner: Learner, tx: Any, states: PyTree, grads: PyTree, mdl_vars: PyTree, step: jax.Array, valid: jax.Array
) -> tuple[PyTree, PyTree]:
    """Copies all of a state to the devices, and updates it."""
    given = jax.tree.map(lambda x: x.on_device() if is_host_part(x) else x, states, is_leaf=is_host_part)
    loaded = opt_state_dtypes.loaded(learner, given)
    updates, new = tx.update(grads, loaded, mdl_vars)
    updates, new = learner.if_valid(valid, updates, new, loaded)
    kept = opt_state_dtypes.stored(learner, new, step)
    return updates, _back(states, kept, None)


def _back(states: PyTree, new: PyTree, row: jax.Array | None) -> PyTree:
    """Returns the state with new values, or with those of a row."""

    def back(old: Any, value: jax.Array) -> Any:
        if is_host_part(old):
            return old.updated(value, row)
        return value if row is None else lax.dynamic_update_index_in_dim(old, value, row, 0)

    return jax.tree.map(back, states, new, is_leaf=is_host_part)


def _by_row(
    learner: Learner,
    key: str,
    states: PyTree,
    grads: PyTree,
    mdl_vars: PyTree,
    hparams: PyTree,
    step: jax.Array,
    valid: jax.Array,
) -> tuple[PyTree, PyTree]:
    """Updates the layers of repeated variables one after the other; as the vectorised optimizer does, but in a loop."""
    tx = learner.raw_grad_tx(hparams)
    count = jax.tree.leaves(grads)[0].shape[0]

    def at(tree: PyTree, row: jax.Array) -> PyTree:
        def one(x: Any) -> jax.Array:
            return x.on_device(row) if is_host_part(x) else lax.dynamic_index_in_dim(x, row, 0, keepdims=False)

        return jax.tree.map(one, tree, is_leaf=is_host_part)

    def body(carry: tuple[PyTree, PyTree], row: jax.Array) -> tuple[tuple[PyTree, PyTree], dict[str, jax.Array]]:
        grads, states = carry
        place = opt_state_dtypes.Row(key, row, count)
        loaded = opt_state_dtypes.loaded(learner, at(states, row), place)
        with base_layer.JaxContext.new_context():
            updates, new = tx.update(at(grads, row), loaded, at(mdl_vars, row))
            summaries = dict(base_layer.all_global_summaries())
        updates, new = learner.if_valid(valid, updates, new, loaded)
        kept = opt_state_dtypes.stored(learner, new, step, place)
        return (_back(grads, updates, row), _back(states, kept, row)), summaries

    (updates, new_states), summaries = lax.scan(body, (grads, states), jnp.arange(count))
    for name, value in summaries.items():
        kind, plain = base_layer.get_summary_type_from_key(name), base_layer.trim_summary_type_from_key(name)
        base_layer.add_global_summary(f"{plain}.{[count]}", value, kind)
    return updates, new_states
