"""Forward and backward pass of a step on each device's own rows, with all communication between devices written out.

`gradients` and `evaluate` serve as `grad_fn` and `eval_fn` of the steps in `step_fns.py`, for padded variables and inputs. Read
`gradients` first. The docstring of `shard_map.py` lists the collectives of a train step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from spmd_trainer.sharding.even_values import slice_off
from spmd_trainer.step import collectives, masks, minibatches, step_fns
from spmd_trainer.step.gathered_on_use import GatheredOnUse, without_keeping_gathered
from spmd_trainer.step.layout import Layout
from spmd_trainer.step.minibatches import Outputs, advance_integers, is_integer, keep_integers
from spmd_trainer.step.state_layout import NestedVariableSpec
from spmd_trainer.step.step_fns import StepFnOutput
from spmd_trainer.train_states import NestedJTensor, PyTree

VarsFn: TypeAlias = Callable[[NestedJTensor], NestedJTensor]


@dataclasses.dataclass(frozen=True)
class PassSettings:
    """Settings of the forward and backward pass, fixed when a step is partitioned.

    Attributes:
      layout: the layout of the state; the batch is sharded over the whole mesh.
      num_rows: rows of the global batch without padding.
      num_minibatches: number of minibatches into which each device divides its rows in training.
      gather_on_use: in training, gather parameters where a layer reads them (True), or all of them once per step (False).
    """

    layout: Layout
    num_rows: int
    num_minibatches: int = 1
    gather_on_use: bool = True

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of all mesh axes."""
        return tuple(self.layout.mesh.axis_names)

    @property
    def variables(self) -> NestedVariableSpec:
        """VariableSpecs of the model's variables."""
        return self.layout.variables.mdl_vars


def gradients(
    settings: PassSettings, mdl_vars: NestedJTensor, prng_key: jax.Array, inputs: NestedJTensor
) -> tuple[StepFnOutput, NestedJTensor, NestedJTensor]:
    """Runs the forward and backward pass under `jax.shard_map`.

    Args:
      settings: the settings of the pass.
      mdl_vars: padded variables.
      prng_key: the step's PRNG key.
      inputs: the padded global batch.

    Returns:
      The same as `step_fns.gradients`. Gradients have logical (unpadded) shapes, and are sharded like their variables.
    """
    layout = settings.layout
    excluded = masks.get_excluded_var_mask_for_grad(layout.var_weight_hparams, layout.task.learner)
    trainable = masks.mask_out(settings.variables, excluded)
    count, size = _divided(settings, inputs, settings.num_minibatches)
    is_real = functools.partial(_is_real, settings, count, size)
    outputs = Outputs(str(layout.task.learner.loss_name))

    def run(mdl_vars: NestedJTensor, inputs: NestedJTensor, key: jax.Array) -> tuple[PyTree, PyTree, PyTree, PyTree]:
        params, reduce_scatter, prepare = _gathered(settings, mdl_vars, excluded, trainable)
        old = {name: mdl_vars[name] for name in step_fns.FORWARD_COLLECTIONS if name in mdl_vars}
        frozen = mdl_vars if settings.gather_on_use else collectives.gather_params(mdl_vars, settings.variables)

        def loss_fn(
            params: NestedJTensor, written: NestedJTensor, rows: NestedJTensor, key: jax.Array, index: jax.Array
        ) -> minibatches.LossAndAux:
            merged = {**step_fns.merge(excluded, params, frozen), **written}
            output, new = step_fns.forward(layout, merged, key, rows, do_eval=False, prepare=prepare)
            real = is_real(index)
            written = {name: _where(real, new.get(name, old), old) for name, old in written.items()}
            sums, by_row = outputs.take(output, real, size)
            # A sum, because it is added up over minibatches and devices; the weight divides it at the very end.
            return output.loss * lax.stop_gradient(sums["loss"][1]), (written, sums, by_row)

        minibatch_loss = without_keeping_gathered(loss_fn) if settings.gather_on_use else loss_fn
        grads, new, sums, by_row = minibatches.accumulate_gradients(
            minibatch_loss, params, old, inputs, key, count, layout.task.train.gradient_accumulation_dtype
        )
        # Whatever dtype minibatches are added up in, devices are added up in float32.
        grads = jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), grads)
        grads = reduce_scatter(grads)
        grads, sums = collectives.sync_gradients((grads, sums), (trainable, None), settings.axes)
        inverse = minibatches.weighted_mean(jnp.ones(()), sums["loss"][1])
        grads = jax.tree.map(lambda g, v: (g * inverse).astype(v.dtype), grads, trainable)
        return grads, _agree(new, is_real(0), settings.axes), sums, by_row

    specs = jax.tree.map(lambda v: v.spec, trainable)
    mapped = _on_each_device(settings, run, (specs, PartitionSpec(), PartitionSpec()))
    grads, written, sums, by_row = mapped(mdl_vars, inputs, prng_key)
    grads = _without_padding(grads, trainable)
    with _no_ambient_mesh():
        written = advance_integers(
            written,
            layout,
            _without_padding(mdl_vars, settings.variables),
            prng_key,
            jax.tree.map(lambda x: slice_off(x, (settings.num_rows, *x.shape[1:])), inputs),
        )
    return outputs.put_back(sums, by_row, settings.layout.mesh.size, settings.num_rows), written, grads


def evaluate(
    settings: PassSettings, mdl_vars: NestedJTensor, prng_key: jax.Array, inputs: NestedJTensor
) -> StepFnOutput:
    """Returns the model's output in evaluation. Arguments as in `gradients`.

    Parameters are gathered where layers read them. The only all-reduce is that of the metrics.
    """
    count, size = _divided(settings, inputs, 1)
    outputs = Outputs(str(settings.layout.task.learner.loss_name))

    def run(mdl_vars: NestedJTensor, inputs: NestedJTensor, key: jax.Array) -> tuple[PyTree, PyTree]:
        def measure(carry: None, rows: NestedJTensor, index: jax.Array) -> tuple[None, PyTree, PyTree]:
            output, _ = step_fns.forward(
                settings.layout,
                mdl_vars,
                jax.random.fold_in(key, index),
                rows,
                do_eval=True,
                prepare=_gather_on_use(settings),
            )
            return carry, *outputs.take(output, _is_real(settings, count, size, index), size)

        _, sums, by_row = minibatches.over_minibatches(measure, None, inputs, count)
        return collectives.sync_gradients(sums, None, settings.axes), by_row

    sums, by_row = _on_each_device(settings, run, (PartitionSpec(),))(mdl_vars, inputs, prng_key)
    return outputs.put_back(sums, by_row, settings.layout.mesh.size, settings.num_rows)


def _on_each_device(settings: PassSettings, run: Callable[..., Any], out_specs: tuple[Any, ...]) -> Callable[..., Any]:
    """Returns the function `run(mdl_vars, inputs, key)` under `jax.shard_map`, with a different key on each device.

    `out_specs` are the PartitionSpecs of all results but the last, whose rows are sharded over all mesh axes.
    """

    def on_each_device(mdl_vars: NestedJTensor, inputs: NestedJTensor, key: jax.Array) -> Any:
        with _no_ambient_mesh():
            return run(mdl_vars, inputs, collectives.fold_rng_over_axis(key, settings.axes))

    by_row = PartitionSpec(settings.axes)
    specs = jax.tree.map(lambda v: v.spec, settings.variables)
    return jax.shard_map(
        on_each_device,
        mesh=settings.layout.mesh,
        in_specs=(specs, by_row, PartitionSpec()),
        out_specs=(*out_specs, by_row),
        check_vma=False,
    )


def _no_ambient_mesh() -> contextlib.AbstractContextManager[Any]:
    """Context manager: unsets the ambient mesh, so that layers' sharding constraints have no effect in `jax.shard_map`."""
    # The device stays known: attention kernels are chosen for it.
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def _without_padding(tree: NestedJTensor, variables: NestedVariableSpec) -> NestedJTensor:
    return jax.tree.map(lambda x, v: slice_off(x, v.logical_shape), tree, variables)


def _gathered(
    settings: PassSettings, mdl_vars: NestedJTensor, excluded: PyTree, trainable: NestedVariableSpec
) -> tuple[NestedJTensor, VarsFn, VarsFn]:
    """Gathers the trainable parameters, or leaves them sharded if `settings.gather_on_use` is True.

    Returns:
      (params, reduce_scatter, prepare). `params` are the parameters to differentiate with respect to. `reduce_scatter` takes
      their gradients, and `prepare` takes the variables before the forward pass. With `gather_on_use`, `reduce_scatter` changes
      nothing, and `prepare` is `_gather_on_use(settings)`. Without it, `prepare` changes nothing.
    """
    shards = masks.mask_out(mdl_vars, excluded)
    if settings.gather_on_use:
        return shards, lambda grads: grads, _gather_on_use(settings)

    def reduce_scatter(grads: NestedJTensor) -> NestedJTensor:
        # Runs the backward pass of gathering shards in the gradients' dtype, which may differ from the variables' dtype.
        pieces = jax.tree.map(lambda shard, g: jnp.zeros(shard.shape, g.dtype), shards, grads)
        _, pullback = jax.vjp(lambda pieces: collectives.gather_params(pieces, trainable), pieces)
        return pullback(grads)[0]

    return collectives.gather_params(shards, trainable), reduce_scatter, lambda mdl_vars: mdl_vars


def _gather_on_use(settings: PassSettings) -> VarsFn:
    """Returns a function that boxes each shard of a sharded variable. A layer that reads the box gets the gathered variable."""
    return lambda mdl_vars: jax.tree.map(GatheredOnUse.box, mdl_vars, settings.variables)


def _agree(new: NestedJTensor, real: jax.Array, axes: tuple[str, ...]) -> NestedJTensor:
    """Makes the written floats equal on all devices: averages them over the devices where `real` is 1.0. Keeps integers."""
    leaves, treedef = jax.tree.flatten(new)
    floats = [i for i, leaf in enumerate(leaves) if not is_integer(leaf)]
    if floats:
        share = real / lax.psum(real, axes)
        means = lax.psum([leaves[i] * share.astype(leaves[i].dtype) for i in floats], axes)
        for i, mean in zip(floats, means, strict=True):
            leaves[i] = mean
    return jax.tree.unflatten(treedef, leaves)


def _divided(settings: PassSettings, inputs: NestedJTensor, requested: int) -> tuple[int, int]:
    """Divides each device's rows into `requested` minibatches, or into more if a minibatch would mix rows with padding.

    Returns:
      The number of minibatches on each device, and the number of rows in each minibatch.

    Raises:
      ValueError: `requested` doesn't divide a device's rows.
    """
    num_devices, num_rows = settings.layout.mesh.size, settings.num_rows
    rows_per_device = jax.tree.leaves(inputs)[0].shape[0] // num_devices
    if rows_per_device % requested:
        raise ValueError(
            f"num_minibatches={requested} doesn't divide the {rows_per_device} rows that each of {num_devices} devices has "
            f"of a batch of {num_rows}; choose a divisor of {rows_per_device}, or another batch size"
        )
    size = math.gcd(rows_per_device // requested, num_rows)
    count = rows_per_device // size
    if count != requested:
        logging.warning(
            "%d devices don't divide a batch of %d rows: each processes %d minibatches instead of %d, so that none holds "
            "both rows and padding",
            num_devices,
            num_rows,
            count,
            requested,
        )
    return count, size


def _is_real(settings: PassSettings, count: int, size: int, index: jax.Array | int) -> jax.Array:
    """Returns 1.0 if minibatch `index` of this device holds rows of the batch, 0.0 if it holds padding.

    Padding is at the end of the global batch. `count` and `size` are from `_divided`.
    """
    first = (lax.axis_index(settings.axes) * count + index) * size
    return (first < settings.num_rows).astype(jnp.float32)


def _where(real: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda n, o: jnp.where(real > 0, n, o), keep_integers(new, old), old)
