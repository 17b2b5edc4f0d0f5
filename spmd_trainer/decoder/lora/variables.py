"""The adapters' variables: paths, shapes, initial values and sharding."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax import lax
from praxis import base_layer

from spmd_trainer.decoder.lora.adapted_weight import ADAPTER, RANK, AdaptedWeight, Factor
from spmd_trainer.decoder.lora.settings import Lora
from spmd_trainer.sharding.specs import entry_axes
from spmd_trainer.step import masks
from spmd_trainer.step import tracked_dims as dims_lib
from spmd_trainer.step.product_results import MatrixDims
from spmd_trainer.train_states import PyTree

LORA = "lora"
A, B, MAGNITUDE = "a", "b", "magnitude"


def base_only(mdl_vars: PyTree) -> PyTree:
    """Returns the variables without adapters, as in a task without `lora`."""
    params = {name: tree for name, tree in mdl_vars[base_layer.PARAMS].items() if name != LORA}
    return {**mdl_vars, base_layer.PARAMS: params}


def adapters_of(mdl_vars: PyTree, path: str) -> Mapping[str, Any]:
    """Returns the adapters {'a': ..., 'b': ...} of a variable.

    Args:
      mdl_vars: the variables, or a tree with the same structure.
      path: the variable's path, e.g. 'params/lm/mlp/w'.
    """
    found: Mapping[str, Any] = mdl_vars[base_layer.PARAMS][LORA]
    for part in path.split("/")[1:]:
        found = found[part]
    return found


def with_adapters(mdl_vars: PyTree, adapters: Mapping[str, Mapping[str, Any]]) -> PyTree:
    """Returns the variables together with adapters, which are given as {path of a base variable: {'a': ..., 'b': ...}}."""
    tree = traverse_util.unflatten_dict({tuple(path.split("/")[1:]): dict(parts) for path, parts in adapters.items()})
    return {**mdl_vars, base_layer.PARAMS: {**mdl_vars[base_layer.PARAMS], LORA: tree}}


def factor_dims(roles: MatrixDims, name: str) -> tuple[Any, ...]:
    """Returns the dimensions of the adapter variable `name`: each is the index of a dimension of the weight, or 'rank'."""
    if name == A:
        return (*roles.stack, *roles.inputs, RANK)
    return (*roles.stack, RANK, *roles.outputs) if name == B else (*roles.stack, *roles.outputs)


def names_of(settings: Lora) -> tuple[str, ...]:
    """Returns the names of each weight's adapter variables, e.g. ('a', 'b')."""
    return (A, B, MAGNITUDE) if settings.dora else (A, B)


def adapter_hparams(
    settings: Lora, roles: MatrixDims, name: str, base: base_layer.WeightHParams
) -> base_layer.WeightHParams:
    """Returns the WeightHParams of an adapter variable, without a `tensor_split_dims_mapping`; `split_like_base` adds it.

    Args:
      settings: the adapter settings.
      roles: the base variable's stack, input and output dimensions.
      name: 'a', 'b' or 'magnitude'.
      base: WeightHParams of the base variable.
    """
    sizes: dict[Any, int] = {RANK: settings.rank, **dict(enumerate(base.full_shape))}
    shape = [sizes[dim] for dim in factor_dims(roles, name)]
    if settings.adapters is not None:
        shape = [len(settings.adapters), *shape]
    # Adapters of stacked layers have separate optimizer states for each layer, like the weights.
    repeats = list(base.repeat_prefix or ())
    stacked = settings.adapters is None and roles.stack[: len(repeats)] == tuple(range(len(repeats)))
    repeats = repeats if stacked else []
    collections = [name for name in base.collections if name.startswith(masks.READ_PER_TOKEN)]
    if name == MAGNITUDE:
        # bfloat16 would round a norm by up to 0.4 %.
        collections.append(base_layer.WeightHParamsCollection.DISALLOW_BFLOAT16_CONVERSION)
    return base_layer.WeightHParams(
        shape=shape[len(repeats) :],
        dtype=settings.dtype,
        collections=collections or None,
        repeat_prefix=repeats or None,
        repeat_prefix_split_dims_mapping=(None,) * len(repeats) if repeats else None,
    )


def split_like_base(
    settings: Lora,
    roles: MatrixDims,
    name: str,
    adapter: base_layer.WeightHParams,
    base: base_layer.WeightHParams,
    path: str,
) -> tuple[base_layer.WeightHParams, str]:
    """Returns an adapter variable's WeightHParams, sharded like the base variable, and a text that explains this sharding.

    Args:
      settings, roles, name: as for `adapter_hparams`.
      adapter: WeightHParams of the adapter variable.
      base: WeightHParams of the base variable, with its `tensor_split_dims_mapping`.
      path: path of the base variable.
    """
    mapping = dict(enumerate(base.full_split_dims_mapping))
    reason = f"follows {path}"
    dims = factor_dims(roles, name)
    entries = [None if dim == RANK or mapping[dim] == -1 else mapping[dim] for dim in dims]
    if settings.rank_axes and RANK in dims:
        used = {axis for entry in entries for axis in entry_axes(entry)}
        free = tuple(axis for axis in settings.rank_axes if axis not in used)
        if free:
            entries[dims.index(RANK)] = free[0] if len(free) == 1 else free
            reason += f"; rank split over {', '.join(map(repr, free))}"
        else:
            reason += f"; rank whole: other dimensions use {', '.join(map(repr, settings.rank_axes))}"
    if settings.adapters is not None:
        entries = [None, *entries]
    repeats = len(adapter.repeat_prefix or ())
    new = dataclasses.replace(
        adapter,
        mesh_shape=base.mesh_shape,
        tensor_split_dims_mapping=tuple(entries[repeats:]),
        repeat_prefix_split_dims_mapping=tuple(entries[:repeats]) if repeats else None,
    )
    return new, reason


def initial_adapters(
    settings: Lora,
    roles: MatrixDims,
    path: str,
    w: jax.Array,
    hparams: Mapping[str, base_layer.WeightHParams],
    key: jax.Array,
) -> dict[str, jax.Array]:
    """Returns the initial adapter variables of a weight by name. As in PEFT, 'a' is uniform in +-1/sqrt(number of inputs), and
    'b' is 0. With DoRA, 'magnitude' is the norm of each output's weights.

    Args:
      settings: the adapter settings.
      roles: the stack, input and output dimensions of `w`.
      path: the weight's path. The random numbers depend on it.
      w: the weight.
      hparams: WeightHParams of the adapter variables by name.
      key: PRNG key for the initialization of the model.
    """
    bound = 1 / math.sqrt(math.prod(w.shape[i] for i in roles.inputs))
    own = jax.random.fold_in(key, zlib.crc32(f"{LORA}/{path}".encode()))
    shape_a, shape_b = (tuple(hparams[name].full_shape) for name in (A, B))
    found = {
        A: jax.random.uniform(own, shape_a, settings.dtype, -bound, bound),
        B: jnp.zeros(shape_b, settings.dtype),
    }
    return {**found, MAGNITUDE: initial_magnitude(settings, roles, w)} if settings.dora else found


def initial_magnitude(settings: Lora, roles: MatrixDims, w: jax.Array) -> jax.Array:
    """Returns DoRA's initial magnitude, which is the norm of each output's weights."""
    norm = jnp.sqrt(jnp.sum(jnp.square(w.astype(jnp.float32)), axis=roles.inputs))
    kept = [i for i in range(w.ndim) if i not in roles.inputs]
    norm = lax.transpose(norm, [kept.index(dim) for dim in factor_dims(roles, MAGNITUDE)]).astype(settings.dtype)
    return norm if settings.adapters is None else jnp.stack([norm] * len(settings.adapters))


def adapted(
    settings: Lora, roles: MatrixDims, path: str, w: jax.Array, adapters: Mapping[str, jax.Array]
) -> AdaptedWeight:
    leading = () if settings.adapters is None else (ADAPTER,)
    factors = {name: Factor(adapters[name], (*leading, *factor_dims(roles, name))) for name in names_of(settings)}
    return AdaptedWeight(
        w=w,
        a=factors[A],
        b=factors[B],
        magnitude=factors.get(MAGNITUDE),
        gain=None,
        dims=dims_lib.of_variable(w.ndim),
        path=path,
        roles=roles,
        scale=settings.scale,
    )
