"""Keeps optimizer states in pinned host memory. A train step copies them to the devices in parts, and copies the new states back.

First the step updates repeated (stacked) variables in a loop, one layer at a time. Then it updates all others together. The loop
enforces this order: the compiler's scheduler starts copies as early as it can, and without a loop it would start all of them
before the first update. So a device never holds more states than those of one layer, or of all variables outside repeated layers.

Large states in 8 bits are updated in the same loop, wherever they are. Decoding and encoding them takes several float32 arrays of
a variable's size, and the loop needs them for one layer at a time.

The optimizer gets the same arrays as if it updated all layers together, with its states on the devices. So the results are the
same, but for the last bit: the compiler may join products and sums in a loop and not outside, or the other way round.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from absl import logging
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from praxis import base_layer
from praxis import optimizer_prefix_vectorization as opt_vec

from spmd_trainer.errors import UserError
from spmd_trainer.sharding.variables import VariableSpec
from spmd_trainer.step import opt_state_dtypes
from spmd_trainer.step.layout import Layout, is_host_part
from spmd_trainer.train_states import PyTree

if TYPE_CHECKING:
    from spmd_trainer.step.learner import Learner
    from spmd_trainer.tasks_lib import SingleTask

# States in 8 bits are updated layer by layer if a layer of one has this many elements for each device of the mesh. A loop takes
# time, and saves little memory for smaller ones.
_LARGE_LAYER = 2**19
DEVICE, PINNED_HOST = "device", "pinned_host"
MEMORY_KINDS = (DEVICE, PINNED_HOST)
# A lowered program's name for a move between memories; a compiled program's line that makes a host buffer (memory space 5).
_PLACED = "annotate_device_placement"
_HOST_BUFFER = re.compile(r"^\s+%?[\w.-]+ = [^=]*?S\(5\)\}? (?!parameter|get-tuple-element|tuple)", re.MULTILINE)


def memory_kind(learner: Any, variable: VariableSpec) -> str | None:
    """Returns the JAX memory kind of an array of the train state; None for the device's default memory.

    Large arrays of the optimizer state get the learner's `opt_state_memory_kind`. Small arrays, and moving averages, which
    evaluation reads, stay on the devices.
    """
    if learner.opt_state_memory_kind == DEVICE or not variable.path.startswith("opt_states/"):
        return None
    # For a small array, the time of a separate copy costs more than its memory.
    is_small = math.prod(variable.logical_shape) < opt_state_dtypes.LEAST_ELEMENTS
    return None if is_small or opt_state_dtypes.is_average(variable.path) else str(learner.opt_state_memory_kind)


def why_at_once(learner: Any, hparams: PyTree) -> str:
    """Returns the reason why a step copies all optimizer states to the devices at once; '' if it copies them layer by layer.

    Args:
      learner: the learner.
      hparams: WeightHParams of the variables.
    """
    if learner.sees_stacks:
        return f"{type(learner.optimizer).__name__} updates all matrices of equal shape together, those of all layers"
    if not learner.vectorize_on_repeat_prefix:
        return "with vectorize_on_repeat_prefix=False the optimizer updates all layers of a stack together"
    if not any(map(_in_a_loop, map(_stacking, jax.tree.leaves(hparams)))):
        return "the model has no repeated layers, which the step could copy one by one"
    return ""


def warn_if_at_once(learner: Any, hparams: PyTree) -> None:
    """Warns if a step copies all optimizer states from host memory to the devices at once. Arguments as for `why_at_once`."""
    if learner.opt_state_memory_kind != DEVICE and (why := why_at_once(learner, hparams)):
        logging.warning(
            "task.train.learner.opt_state_memory_kind=%r saves %s: all optimizer states are on the devices together while a step "
            "updates the variables, because %s. --mode=plan gives the bytes; a smaller opt_state_dtype saves memory too",
            learner.opt_state_memory_kind,
            "nothing at the peak of a step"
            if learner.sees_stacks
            else "less at the peak of a step than it does layer by layer",
            why,
        )


def check_devices(task: SingleTask, mesh: Mesh) -> None:
    """Checks that a mesh's devices have pinned host memory if the task's settings need it.

    Raises:
      UserError: the devices have no pinned host memory; the message names the device kind and the memories that it has.
    """
    asked = {
        f"task.train.learner.opt_state_memory_kind={PINNED_HOST!r}": task.learner.opt_state_memory_kind == PINNED_HOST,
        f"task.train.offloaded_activations={list(task.train.offloaded_activations)}": task.train.offloaded_activations,
    }
    if not any(asked.values()) or isinstance(mesh, AbstractMesh):
        return
    device = mesh.devices.flat[0]
    try:
        kinds = sorted(memory.kind for memory in device.addressable_memories())
    except Exception:  # compile-only devices of GPUs have none, and each kind of device raises an error of its own
        kinds = []
    if PINNED_HOST not in kinds:
        raise UserError(
            f"{next(setting for setting, is_set in asked.items() if is_set)}: the devices ({device.device_kind}) have "
            f"{'the memory kinds ' + ', '.join(kinds) if kinds else 'no memory kinds'}, not {PINNED_HOST}, so a step with "
            "host memory can't be compiled for them. GPUs have it when they are here; a --topology of GPUs has not. Leave the "
            "setting at its default, or plan for TPUs"
        )


def check_program(layout: Layout, lowered: jax.stages.Lowered, compiled: jax.stages.Compiled) -> None:
    """Checks that a compiled train step keeps states and activations in host memory as the task's settings say.

    Args:
      layout: the layout of the step's state.
      lowered, compiled: the lowered and the compiled train step, (state, key, inputs) -> (new state, outputs).

    Raises:
      UserError: a state array isn't in host memory, or no activation is moved there; the message names setting and device.
    """
    offloaded = list(layout.task.train.offloaded_activations)
    if not offloaded and not any(variable.memory_kind for variable in layout.records()):
        return
    device = layout.mesh.devices.flat[0].device_kind
    # A variable that the step writes and never reads is no input of the program: its sharding is None.
    given, made = (
        jax.tree.leaves(shardings, is_leaf=lambda x: x is None)
        for shardings in (compiled.input_shardings[0][0], compiled.output_shardings[0])
    )
    for variable, *shardings in zip(layout.records(), given, made, strict=True):
        kinds = [variable.memory_kind if sharding is None else sharding.memory_kind for sharding in shardings]
        if variable.memory_kind and set(kinds) != {variable.memory_kind}:
            raise UserError(
                f"task.train.learner.opt_state_memory_kind={variable.memory_kind!r}: in the program for {device}, "
                f"{variable.path} is in memory {kinds[0]} before a step and {kinds[1]} after it; set opt_state_memory_kind="
                f"{DEVICE!r}, or use a smaller opt_state_dtype"
            )
    if not offloaded:
        return
    # The CPU's compiler drops the marks of moves inside a program, whose memory is the host's anyway.
    on_cpu = layout.mesh.devices.flat[0].platform == "cpu"
    moves = _PLACED in lowered.as_text() if on_cpu else bool(_HOST_BUFFER.search(compiled.as_text() or ""))
    if not moves:
        raise UserError(
            f"task.train.offloaded_activations={offloaded}: the program for {device} moves no activation to host memory; "
            "use saved_activations, or leave both lists empty, so that they are computed again"
        )


@dataclasses.dataclass(frozen=True)
class _Kept:
    """Runs the optimizer on states that are kept in their stored form between steps (see `opt_state_dtypes.stored`).

    Attributes:
      learner: the learner.
      dtypes: {path: dtype} of the state arrays that are stored in fewer bits than float32, from `opt_state_dtypes.kept_dtypes`.
      valid: bool scalar; False skips the step: updates are zero and the state does not change.
    """

    learner: Learner
    dtypes: Mapping[str, str]
    valid: jax.Array

    def update(
        self, tx: Any, grads: PyTree, states: PyTree, mdl_vars: PyTree, row: opt_state_dtypes.Row | None = None
    ) -> tuple[PyTree, PyTree]:
        """Returns the updates and the new stored states. `states` are on the devices; with `row`, they belong to one layer."""
        loaded = opt_state_dtypes.loaded(self.dtypes, states, row)
        updates, new = tx.update(grads, loaded, mdl_vars)
        updates, new = self.learner.if_valid(self.valid, updates, new, loaded)
        return updates, opt_state_dtypes.stored(self.dtypes, new, row)


def update(
    learner: Learner, grads: PyTree, states: PyTree, mdl_vars: PyTree, hparams: PyTree, valid: jax.Array
) -> tuple[PyTree, PyTree]:
    """Runs the optimizer on a stored state (`opt_state_dtypes.stored`). See the module for what is updated layer by layer.

    Args:
      learner: the learner.
      grads: clipped gradients.
      states: the stored optimizer state; arrays in host memory are `HostPart`s.
      mdl_vars, hparams: the variables and their WeightHParams, in the structure of `grads`.
      valid: bool scalar; False skips the step.

    Returns:
      The updates, in the structure of `grads`, and the new stored state.
    """
    kept = _Kept(learner, opt_state_dtypes.kept_dtypes(learner, learner.get_grad_tx(hparams).init, mdl_vars), valid)
    repeated = _repeated(learner, states, mdl_vars, hparams)
    updates, new_states = grads, dict(states) if repeated else states
    left = grads, mdl_vars, hparams
    for key, others in repeated.items():
        mine_grads, mine_vars = (_without(tree, others) for tree in (grads, mdl_vars))
        found, new_states[key] = _by_row(kept, key, states[key], mine_grads, mine_vars, hparams)
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
    found, new_rest = _whole(kept, tx, rest, left[0], left[1])
    if not repeated:
        return found, new_rest
    is_left = jax.tree.map(lambda *others: all(others), *repeated.values())
    updates = jax.tree.map(lambda mine, old, new: new if mine else old, is_left, updates, found)
    return updates, type(states)(new_states | new_rest)


def _repeated(learner: Learner, states: PyTree, mdl_vars: PyTree, hparams: PyTree) -> dict[str, PyTree]:
    """Returns the groups of repeated layers that are updated layer by layer, as {key in `states`: mask}. The mask is a tree of
    bools, True for variables outside the group."""
    if not learner.vectorize_on_repeat_prefix or not isinstance(states, dict) or opt_vec.NO_PREFIX_KEY not in states:
        return {}
    if not any(map(_is_stored_part, jax.tree.leaves(states, is_leaf=_is_stored_part))):
        return {}
    stackings = {_stacking(p) for p in jax.tree.leaves(hparams)}
    found = {}
    for stacking in sorted(stackings, key=str):
        if not _in_a_loop(stacking):
            continue
        others = jax.tree.map(lambda p, of=stacking: _stacking(p) != of, hparams)
        tx = opt_vec.get_transformations_with_vectorized_repeat_prefix(
            learner.raw_grad_tx(hparams), _without(hparams, others), learner.repeat_prefix_sep
        )
        (key,) = set(jax.eval_shape(tx.init, _without(mdl_vars, others))) - {opt_vec.NO_PREFIX_KEY}
        if _needs_loop(states[key]):
            found[key] = others
    return found


def _is_stored_part(x: Any) -> bool:
    return is_host_part(x) or isinstance(x, opt_state_dtypes.Bytes)


def _needs_loop(states: PyTree) -> bool:
    """Returns True if a part of repeated layers' state is in host memory, or if it is large and in 8 bits.

    Returns False if a part in 8 bits has one number per layer: the scale of its row is that of all layers.
    """
    stored = jax.tree.leaves(states, is_leaf=_is_stored_part)
    codes = [x.codes_8bit for x in stored if isinstance(x, opt_state_dtypes.Bytes)]
    of_layers = [(x.array if is_host_part(x) else x).shape[1:] for x in codes]
    if not all(of_layers):
        return False
    large = _LARGE_LAYER * max(1, jax.sharding.get_abstract_mesh().size)
    return any(map(is_host_part, (*stored, *codes))) or any(math.prod(shape) >= large for shape in of_layers)


def _without(tree: PyTree, others: PyTree) -> PyTree:
    """Returns a tree with an `optax.MaskedNode` in place of each leaf where `others` is True."""
    return jax.tree.map(lambda other, x: optax.MaskedNode() if other else x, others, tree)


def _stacking(p: base_layer.WeightHParams) -> tuple[Any, ...]:
    """Returns what praxis groups variables by: (sizes, mesh axes, mesh axes of the optimizer state) of the stack dimensions."""
    sizes = tuple(p.repeat_prefix or ())
    axes = tuple(p.repeat_prefix_split_dims_mapping or [-1] * len(sizes))
    of_states = tuple(p.repeat_optimizer_dims_mapping or ())
    return sizes, axes, of_states if any(axis != -1 for axis in of_states) else ()


def _in_a_loop(stacking: tuple[Any, ...]) -> bool:
    """Returns True if variables with this `_stacking` have exactly one stack dimension, and it is not sharded."""
    prefix, mapping, _ = stacking
    return len(prefix) == 1 and all(entry in (None, -1) for entry in mapping)


def _whole(kept: _Kept, tx: Any, states: PyTree, grads: PyTree, mdl_vars: PyTree) -> tuple[PyTree, PyTree]:
    """Copies all of `states` to the devices at once, and runs the optimizer. Returns the updates and the new state."""
    given = jax.tree.map(lambda x: x.on_device() if is_host_part(x) else x, states, is_leaf=is_host_part)
    updates, new = kept.update(tx, grads, given, mdl_vars)
    return updates, _back(states, new, None)


def _back(states: PyTree, new: PyTree, row: jax.Array | None) -> PyTree:
    """Returns `states` updated with `new`, only at index `row` of dimension 0 if given. Host arrays stay in host memory."""

    def back(old: Any, value: jax.Array) -> Any:
        if is_host_part(old):
            return old.updated(value, row)
        return value if row is None else lax.dynamic_update_index_in_dim(old, value, row, 0)

    return jax.tree.map(back, states, new, is_leaf=is_host_part)


def _by_row(
    kept: _Kept, key: str, states: PyTree, grads: PyTree, mdl_vars: PyTree, hparams: PyTree
) -> tuple[PyTree, PyTree]:
    """Runs the optimizer on repeated variables in a loop, one layer (row) at a time. Returns the updates and the new states.

    The results are equal to those of praxis' vectorized optimizer. `key` is the group's key from `_repeated`.
    """
    tx = kept.learner.raw_grad_tx(hparams)
    count = jax.tree.leaves(grads)[0].shape[0]

    def at(tree: PyTree, row: jax.Array) -> PyTree:
        def one(x: Any) -> jax.Array:
            moved: jax.Array = (
                x.on_device(row) if is_host_part(x) else lax.dynamic_index_in_dim(x, row, 0, keepdims=False)
            )
            return moved

        return jax.tree.map(one, tree, is_leaf=is_host_part)

    def updated(grads: PyTree, states: PyTree, row: jax.Array) -> tuple[PyTree, PyTree, dict[str, jax.Array]]:
        place = opt_state_dtypes.Row(key, row, count)
        with base_layer.JaxContext.new_context():
            updates, new = kept.update(tx, at(grads, row), at(states, row), at(mdl_vars, row), place)
            summaries = dict(base_layer.all_global_summaries())
        return updates, new, summaries

    def body(carry: tuple[PyTree, PyTree], row: jax.Array) -> tuple[tuple[PyTree, PyTree], dict[str, jax.Array]]:
        room, states = carry
        left = jax.tree.map(lambda old, new: new if old.dtype == new.dtype else old, grads, room)
        updates, new, summaries = updated(left, states, row)
        return (_back(room, updates, row), _back(states, new, row)), summaries

    # An update overwrites its gradient, if the two have the same dtype.
    made, _, _ = jax.eval_shape(updated, grads, states, jnp.zeros((), jnp.int32))
    room = jax.tree.map(lambda g, u: g if g.dtype == u.dtype else jnp.zeros(g.shape, u.dtype), grads, made)
    (updates, new_states), summaries = lax.scan(body, (room, states), jnp.arange(count))
    for name, value in summaries.items():
        kind, plain = base_layer.get_summary_type_from_key(name), base_layer.trim_summary_type_from_key(name)
        base_layer.add_global_summary(f"{plain}.{[count]}", value, kind)
    return updates, new_states
