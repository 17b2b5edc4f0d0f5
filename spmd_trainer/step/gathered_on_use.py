"""Gathers sharded parameters where a Flax module or praxis layer reads them, without changes to the model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Set
from typing import Any, TypeAlias

import jax
import jax.extend
from flax.core import meta
from praxis import base_layer

from spmd_trainer.errors import UserError
from spmd_trainer.sharding.jaxprs import REMAT, equations
from spmd_trainer.sharding.specs import axes_by_dim
from spmd_trainer.sharding.variables import VariableSpec
from spmd_trainer.step import collectives

# (axes that the dimension is split over, the split dimension, its logical size), as `collectives.gather_array` takes them
GatherArgs: TypeAlias = tuple[tuple[str, ...], int, int]


@jax.tree_util.register_pytree_node_class
class GatheredOnUse(meta.AxisMetadata[Any]):
    """A box around a device's shard of a Flax or praxis parameter. A layer that reads the box gets the whole parameter.

    Flax calls `unbox` when a module reads a parameter. Loops over stacked layers slice the shard and leave it boxed, so
    each layer's parameter is gathered inside the loop.
    """

    def __init__(self, shard: jax.Array, axes: tuple[str, ...], dim: int, size: int):
        """Boxes a shard of a parameter. Arguments as for `collectives.gather_array`."""
        self._shard = shard
        self._gather_args: GatherArgs = (axes, dim, size)

    @classmethod
    def box(cls, shard: jax.Array, variable: VariableSpec) -> jax.Array | GatheredOnUse:
        """Returns `shard`, a device's shard of `variable`, in a box; returns `shard` itself if the variable is replicated."""
        for dim, axes in enumerate(axes_by_dim(variable.spec, len(variable.logical_shape))):
            if axes:
                return cls(shard, axes, dim, variable.logical_shape[dim])
        return shard

    @property
    def value(self) -> jax.Array:
        """The gathered parameter."""
        return collectives.gather_array(self._shard, *self._gather_args)

    def unbox(self) -> jax.Array:
        """Returns the gathered parameter."""
        return self.value

    def replace_boxed(self, val: Any) -> Any:
        """Returns the new value `val` as it is, without a box, because it is not sharded."""
        return val

    def add_axis(self, index: int, params: dict[Any, Any]) -> GatheredOnUse:
        """Returns a box in which the number of the sharded dimension accounts for a new dimension at `index`."""
        axes, dim, size = self._gather_args
        return GatheredOnUse(self._shard, axes, dim + (index <= dim), size)

    def remove_axis(self, index: int, params: dict[Any, Any]) -> GatheredOnUse:
        """Returns a box in which the number of the sharded dimension accounts for the removal of dimension `index`.

        Raises:
          UserError: the parameter is sharded on dimension `index`, so a loop over this dimension needs other devices' slices.
        """
        axes, dim, size = self._gather_args
        if index % self._shard.ndim == dim:
            raise UserError(
                f"a loop of the model runs over dimension {dim} of a parameter, which 'fsdp' has split; set gather='step' of "
                "the partitioner, or use PjitPartitioner"
            )
        return GatheredOnUse(self._shard, axes, dim - (index < dim), size)

    def tree_flatten(self) -> tuple[tuple[jax.Array], GatherArgs]:
        """Returns the shard as the only leaf, and (axes, dim, size) as auxiliary data."""
        return (self._shard,), self._gather_args

    @classmethod
    def tree_unflatten(cls, gather_args: GatherArgs, children: tuple[jax.Array]) -> GatheredOnUse:
        """Inverts `tree_flatten`."""
        return cls(children[0], *gather_args)


# praxis unboxes its own BoxedParam only, by reading `.value`, so this class must count as one.
base_layer.BoxedParam.register(GatheredOnUse)

# Primitives whose results are computed again in the backward pass: gathering parameters, and plain data movement.
_NOT_KEPT = frozenset(
    {
        *("all_gather", "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "dynamic_slice", "name"),
        *("pad", "reshape", "rev", "slice", "split", "squeeze", "transpose", "unstack"),
    }
)


def without_keeping_gathered(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a version of `fn` whose backward pass gathers parameters again, instead of keeping the gathered parameters.

    A function that contains `jax.checkpoint` is not changed, because an outer `jax.checkpoint` would overrule the inner policy.
    """

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        jaxpr, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        flat: Callable[..., Any] = jax.extend.core.jaxpr_as_fun(jaxpr)
        if not _contains(jaxpr.jaxpr, REMAT):
            flat = jax.checkpoint(flat, policy=_is_kept)
        return jax.tree.unflatten(jax.tree.structure(shapes), flat(*jax.tree.leaves(args)))

    return run


def _is_kept(primitive: Any, *_: Any, **params: Any) -> bool:
    """A `jax.checkpoint` policy: returns True if results of this primitive are kept for the backward pass."""
    if primitive.name == "custom_vjp_call":  # that of `collectives.gather_array`, or one of the model
        return not _contains(params["call_jaxpr"].jaxpr, {"all_gather"})
    return primitive.name not in _NOT_KEPT


def _contains(jaxpr: Any, names: Set[str]) -> bool:
    return any(eqn.primitive.name in names for eqn in equations(jaxpr))
