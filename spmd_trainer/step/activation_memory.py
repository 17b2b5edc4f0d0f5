"""Chooses the named activations that a step keeps for the backward pass, offloads to host memory, or recomputes.

Models name activations with `jax.ad_checkpoint.checkpoint_name` inside rematerialized blocks (`jax.checkpoint`, `nn.remat`,
praxis' repeated layers). The decoder's names are 'query_proj', 'key_proj', 'value_proj', 'context', 'out_proj', 'ffn1',
'ffn2', and with latent attention also 'key_value_down'. `task.train.saved_activations` and `offloaded_activations` are lists
of such names. If either isn't empty, the `jax.checkpoint` policies of the blocks are replaced by one that saves and offloads
the listed activations and recomputes all others. This works for any model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast

import jax
import jax.extend

from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.sharding.jaxprs import REMAT
from spmd_trainer.train_states import PyTree

if TYPE_CHECKING:
    from spmd_trainer.tasks_lib import SingleTask

Fn = TypeVar("Fn", bound=Callable[..., PyTree])


def with_policy(task: SingleTask, fn: Fn) -> Fn:
    """Returns a version of `fn` whose rematerialized blocks save and offload the activations that the task lists.

    Args:
      task: the task; if `train.saved_activations` and `train.offloaded_activations` are both empty, `fn` is not changed.
      fn: a function of pytrees of arrays, to be differentiated afterwards.

    Raises (when the returned function is traced):
      UserError: `fn` has no rematerialized block, or a listed name isn't the name of any activation in these blocks.
    """
    saved, offloaded = list(task.train.saved_activations), list(task.train.offloaded_activations)
    if not saved and not offloaded:
        return fn
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=saved,
        names_which_can_be_offloaded=offloaded,
        offload_src="device",
        offload_dst="pinned_host",
    )

    def run(*args: PyTree) -> PyTree:
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        _check_names([*saved, *offloaded], set(_names(closed.jaxpr, inside=False)))
        changed = closed.replace(jaxpr=_changed(closed.jaxpr, policy))
        found = jax.extend.core.jaxpr_as_fun(changed)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    return cast(Fn, run)


def check_lists(saved: Any, offloaded: Any) -> None:
    """Checks the values of `task.train.saved_activations` and `task.train.offloaded_activations`.

    Raises:
      ValueError: a value is not a list of strings, or a name is in both lists.
    """
    for field, names in {"saved_activations": saved, "offloaded_activations": offloaded}.items():
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"task.train.{field} is {names!r}; give a list of names, e.g. ['context']")
    both = sorted(set(saved) & set(offloaded))
    if both:
        raise ValueError(
            f"task.train.saved_activations and offloaded_activations both have {both[0]!r}; an activation is kept on the "
            "device, or moved to the host"
        )


def _check_names(asked: list[str], known: set[str]) -> None:
    for name in asked:
        if name not in known:
            problem = (
                f"the model names {', '.join(sorted(known))}{did_you_mean(name, known)}"
                if known
                else "the model has no rematerialised part (jax.checkpoint, nn.remat) that names one with checkpoint_name"
            )
            raise UserError(
                f"task.train.saved_activations or offloaded_activations has {name!r}, and no activation of a rematerialised "
                f"part has this name (parts in custom derivatives keep their own policy): {problem}"
            )


def _names(jaxpr: Any, *, inside: bool) -> Iterator[str]:
    """Yields the names of activations in a jaxpr's rematerialized blocks. `inside`: True if the jaxpr is in such a block."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name" and inside:
            yield eqn.params["name"]
        if not inside and _has_own_derivative(eqn):
            continue
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from _names(inner, inside=inside or eqn.primitive.name in REMAT)


def _has_own_derivative(eqn: Any) -> bool:
    """Returns True for custom derivatives. A rematerialized block inside one keeps its own policy."""
    return bool(eqn.primitive.name.startswith("custom_"))


def _changed(jaxpr: Any, policy: Callable[..., Any]) -> Any:
    """Returns the jaxpr with `policy` as the `jax.checkpoint` policy of its rematerialized blocks."""

    def changed(value: Any) -> Any:
        if isinstance(value, jax.extend.core.ClosedJaxpr):
            return value.replace(jaxpr=_changed(value.jaxpr, policy))
        if isinstance(value, jax.extend.core.Jaxpr):
            return _changed(value, policy)
        return tuple(map(changed, value)) if type(value) is tuple else value

    def one(eqn: Any) -> Any:
        if _has_own_derivative(eqn):
            return eqn
        params = {name: changed(value) for name, value in eqn.params.items()}
        return eqn.replace(params={**params, "policy": policy} if eqn.primitive.name in REMAT else params)

    return jaxpr.replace(eqns=[one(eqn) for eqn in jaxpr.eqns])
