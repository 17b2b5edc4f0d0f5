"""Collectives for data-parallel training under `jax.shard_map`. They need only JAX, and work for any model.

All devices of a mesh call these functions together. `axis_name` is one mesh axis or a tuple of mesh axes. The ideas come from
Phillip Lippe's tutorials on training at scale (https://uvadlc-notebooks.readthedocs.io, 2024), after ZeRO (Rajbhandari et al.
2020, https://arxiv.org/abs/1910.02054) and FSDP (Zhao et al. 2023, https://arxiv.org/abs/2304.11277). In this example, `loss`
returns the mean over a device's rows, and all lines but the first run under `jax.shard_map`:

    variables = plan_shards(params, "data", mesh)             # a VariableSpec for each parameter
    shards = shard_params(params, variables)                  # each device keeps its shards
    key = fold_rng_over_axis(key, "data")                     # a different dropout mask on each device
    loss_of = lambda shards, rows: loss(gather_params(shards, variables), rows)
    loss, grads = jax.value_and_grad(loss_of)(shards, rows)   # sharded parameters get sharded, averaged gradients
    grads = sync_gradients(grads, variables, "data")          # averages the gradients of the other parameters

A mean over devices counts each device equally. If the devices' rows have different total weights, reduce weighted sums and
weights instead, and divide afterwards (`weighted_sum` and `weighted_mean` in `step/minibatches.py`).
"""

from __future__ import annotations

import functools
import math
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from spmd_trainer.sharding.specs import AnyMesh, axes_by_dim, entry_axes, mesh_shape_of
from spmd_trainer.sharding.variables import (
    VariableSpec,
    broadcast_prefix,
    is_spec,
    leaf_shape_dtype,
    make_variable_spec,
    named_leaves,
)
from spmd_trainer.train_states import PyTree

Axes: TypeAlias = str | tuple[str, ...]
# Parameters with fewer elements than this stay whole on every device.
MIN_WEIGHT_SIZE = 2**18
# The checkpoint name of a gathered parameter, for `jax.checkpoint` policies.
GATHERED = "gathered_parameter"


def fold_rng_over_axis(key: jax.Array, axis_name: Axes) -> jax.Array:
    """Returns a different PRNG key on each device: `key` with the device's index along `axis_name` folded in.

    Devices whose positions differ only along other mesh axes get the same key.
    """
    return jax.random.fold_in(key, lax.axis_index(axis_name))


# --- parameters -------------------------------------------------------------------------------------------------------


def plan_shards(
    params: PyTree,
    axis_name: Axes,
    mesh: AnyMesh,
    *,
    min_weight_size: int = MIN_WEIGHT_SIZE,
    first_dim: PyTree = 0,
) -> PyTree:
    """Decides which dimension of each parameter, if any, is sharded over mesh axes.

    Chooses the largest dimension whose size is a multiple of the number of shards, i.e. of the product of the axis sizes. If
    there is none, chooses the dimension that needs the least padding relative to its size.

    Args:
      params: any pytree of arrays or ShapeDtypeStructs, of logical (unpadded) shapes.
      axis_name: the mesh axes to shard over.
      mesh: a Mesh or an AbstractMesh.
      min_weight_size: parameters with fewer elements are replicated.
      first_dim: the first dimension that may be sharded (earlier ones stack layers), as an int or a prefix tree of `params`.

    Returns:
      A VariableSpec for each parameter.

    Raises:
      ValueError: `axis_name` is empty, repeats an axis or names one that the mesh lacks; or a leaf has no shape or dtype.
    """
    sizes, axes = mesh_shape_of(mesh), entry_axes(axis_name)
    unknown = [axis for axis in axes if axis not in sizes]
    if unknown or not axes or len(set(axes)) != len(axes):
        raise ValueError(f"axis_name {axis_name!r}: name one or more of the mesh's axes {tuple(sizes)}, each once")
    count = math.prod(sizes[axis] for axis in axes)
    firsts = broadcast_prefix("first_dim", first_dim, params, is_leaf=lambda node: isinstance(node, int))

    def decide(path: str, leaf: jax.Array | jax.ShapeDtypeStruct, first: int) -> VariableSpec:
        shape, dtype = leaf_shape_dtype(path, leaf)
        size = math.prod(shape)
        candidates = [dim for dim in range(first, len(shape)) if shape[dim] > 1]
        if size < min_weight_size or count == 1 or not candidates:
            reason = "one device on its axes" if count == 1 else "no dimension can be split"
            if size < min_weight_size:
                reason = f"{size:,} elements, fewer than min_weight_size={min_weight_size:,}"
            return make_variable_spec(path, shape, dtype, PartitionSpec(), sizes, f"replicated: {reason}")
        dim = min(candidates, key=lambda d: (-shape[d] % count / shape[d], -shape[d]))
        entry = axes[0] if len(axes) == 1 else axes
        spec = PartitionSpec(*(entry if d == dim else None for d in range(len(shape))))
        uneven = ", padded: no dimension divides" if shape[dim] % count else ""
        return make_variable_spec(path, shape, dtype, spec, sizes, f"fsdp: dimension {dim} over {axes}{uneven}")

    records = [decide(path, leaf, first) for (path, leaf), first in zip(named_leaves(params), firsts, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(params), records)


def shard_params(params: PyTree, variables: PyTree) -> PyTree:
    """Returns this device's shards of replicated parameters.

    Args:
      params: arrays of logical (unpadded) shapes.
      variables: the parameters' VariableSpecs, in the structure of `params`.

    Returns:
      A tree like `params`. The shards have the shapes `VariableSpec.shard_shape`, and zeros as padding.
    """

    def shard(param: jax.Array, variable: VariableSpec) -> jax.Array:
        param = jnp.pad(param, [(0, padding) for padding in variable.paddings]) if variable.is_padded else param
        for dim, axes in enumerate(axes_by_dim(variable.spec, param.ndim)):
            if axes:
                size = param.shape[dim] // lax.axis_size(axes)
                param = lax.dynamic_slice_in_dim(param, lax.axis_index(axes) * size, size, axis=dim)
        return param

    return jax.tree.map(shard, params, variables)


def gather_params(shards: PyTree, variables: PyTree) -> PyTree:
    """Returns whole parameters from the devices' shards, by one all-gather for each sharded parameter.

    The backward pass averages a sharded parameter's gradient over the devices and shards it like the parameter, by one
    reduce-scatter. Gradients of replicated parameters pass unchanged; average them with `sync_gradients`. Gathered
    parameters have the checkpoint name `GATHERED`, by which a `jax.checkpoint` policy can choose not to keep them.

    Args:
      shards: arrays as `shard_params` returns them.
      variables: the parameters' VariableSpecs, in the structure of `shards`.

    Returns:
      A tree like `shards`, of logical shapes.
    """

    def gather(shard: jax.Array, variable: VariableSpec) -> jax.Array:
        for dim, axes in enumerate(axes_by_dim(variable.spec, shard.ndim)):
            if axes:
                shard = gather_array(shard, axes, dim, variable.logical_shape[dim])
        return shard

    return jax.tree.map(gather, shards, variables)


def gather_array(shard: jax.Array, axes: tuple[str, ...], dim: int, size: int) -> jax.Array:
    """Gathers one array from the devices' shards.

    Args:
      shard: this device's shard.
      axes: the mesh axes that `dim` is sharded over.
      dim: the sharded dimension.
      size: the logical size of `dim`; padding beyond it is sliced off.

    Returns:
      The whole array; its gradient is reduce-scattered as in `gather_params`.
    """
    gathered: jax.Array = checkpoint_name(_gather(shard, axes, dim, size), GATHERED)
    return gathered


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(shard: jax.Array, axes: tuple[str, ...], dim: int, size: int) -> jax.Array:
    return lax.slice_in_dim(lax.all_gather(shard, axes, axis=dim, tiled=True), 0, size, axis=dim)


def _gather_fwd(shard: jax.Array, axes: tuple[str, ...], dim: int, size: int) -> tuple[jax.Array, None]:
    return _gather(shard, axes, dim, size), None


def _gather_bwd(axes: tuple[str, ...], dim: int, size: int, _: None, grad: jax.Array) -> tuple[jax.Array]:
    count = lax.axis_size(axes)
    padding = [(0, -size % count if d == dim else 0) for d in range(grad.ndim)]
    return (lax.psum_scatter(jnp.pad(grad, padding), axes, scatter_dimension=dim, tiled=True) / count,)


_gather.defvjp(_gather_fwd, _gather_bwd)


# --- gradients and metrics --------------------------------------------------------------------------------------------


def sync_gradients(grads: PyTree, variables: PyTree, axis_name: Axes) -> PyTree:
    """Averages each gradient over the mesh axes on which its parameter is replicated.

    The backward pass of `gather_params` has already averaged over the axes that a parameter is sharded over. All gradients
    that are averaged over the same axes share one all-reduce. `grads` may also contain other values to average, such as the
    sums and weights of metrics.

    Args:
      grads: gradients, any pytree of arrays.
      variables: a prefix tree of `grads` with the parameters' VariableSpecs or PartitionSpecs; None for replicated parameters.
      axis_name: all mesh axes that the batch is sharded over.

    Returns:
      A tree like `grads`.
    """
    leaves, treedef = jax.tree.flatten(grads)
    specs = broadcast_prefix("variables", variables, grads, is_leaf=is_spec)
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, (leaf, spec) in enumerate(zip(leaves, specs, strict=True)):
        split = {axis for axes in axes_by_dim(getattr(spec, "spec", spec), jnp.ndim(leaf)) for axis in axes}
        groups.setdefault(tuple(axis for axis in entry_axes(axis_name) if axis not in split), []).append(i)
    for axes, indices in groups.items():
        if axes:
            for i, mean in zip(indices, lax.pmean([leaves[i] for i in indices], axes), strict=True):
                leaves[i] = mean
    return jax.tree.unflatten(treedef, leaves)
