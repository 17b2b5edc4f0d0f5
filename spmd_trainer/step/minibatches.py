"""Gradient accumulation: computes the gradients of a batch in minibatches, one after the other, to save activation memory.

`accumulated_gradients` is the forward and backward pass of a step that the compiler partitions. `step/shard_map_passes.py` has
the pass over the rows of one device. Both passes call `accumulate_gradients`, which works for any model. Sums and weights are
added up separately, and divided at the very end (`weighted_sum`, `weighted_mean`). `Outputs` adds up a step's outputs.

Floats that a model writes to its variables are means over rows, so each minibatch can update them in turn. Integers can't be
updated in this way: in each minibatch, a step counter grows by 1, as it should for the whole batch, but a row counter grows only
by the minibatch's rows. So integers are taken from a separate forward pass over the whole batch. The compiler removes everything
from it that the integers do not depend on. For a counter of steps or rows, only an addition remains. Integers that depend on
activations cost a second forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from praxis import base_layer

from spmd_trainer.sharding.even_values import slice_off
from spmd_trainer.sharding.variables import named_leaves
from spmd_trainer.step import activation_memory, masks, step_fns
from spmd_trainer.step.layout import Layout, LogicalLayout
from spmd_trainer.step.step_fns import StepFnOutput
from spmd_trainer.train_states import NestedJTensor, PyTree

# (sum of value * weight, sum of the weights)
Pair: TypeAlias = tuple[jax.Array, jax.Array]
Carry = TypeVar("Carry")
# (loss, (carry, sums, outputs with the rows in dimension 0))
LossAndAux: TypeAlias = tuple[jax.Array, tuple[PyTree, PyTree, PyTree]]
# (params, carry, rows, key, number of the minibatch) -> LossAndAux
MinibatchLoss: TypeAlias = Callable[[PyTree, PyTree, PyTree, jax.Array, jax.Array], LossAndAux]


def accumulate_gradients(
    loss_fn: MinibatchLoss,
    params: PyTree,
    carry: PyTree,
    batch: PyTree,
    key: jax.Array,
    num_minibatches: int = 1,
    dtype: DTypeLike | None = None,
) -> tuple[PyTree, PyTree, PyTree, PyTree]:
    """Computes the gradients of a device's minibatches one after the other and adds them up, without communication.

    Reduce the result once over devices (`sync_gradients`). If `loss_fn` gathers parameters itself, its backward pass reduces
    their gradients once per minibatch. For a single reduction, gather the parameters before the call.

    Args:
      loss_fn: (params, carry, rows, key, minibatch number) -> (loss, (carry, sums, outputs by row)). It is differentiated with
        respect to `params`. It must return sums, not means, because its results are added up.
      params: the parameters.
      carry: the carry that the first minibatch gets; each later one gets the carry that the minibatch before it returned.
      batch: arrays [rows of this device, ...].
      key: PRNG key; the minibatch's number is folded in.
      num_minibatches: number of minibatches; must divide the number of rows.
      dtype: dtype in which gradients of several minibatches are added up and returned; None for the dtypes of `params`.

    Returns:
      (gradients, carry after the last minibatch, total sums, outputs of all rows in the order of the batch).

    Raises:
      ValueError: `num_minibatches` doesn't divide the rows.
    """

    def one(carry: PyTree, minibatch: PyTree, index: jax.Array) -> tuple[PyTree, PyTree, PyTree]:
        grad_fn = jax.grad(loss_fn, has_aux=True)
        grads, (carry, sums, rows) = grad_fn(params, carry, minibatch, jax.random.fold_in(key, index), index)
        if dtype is not None and num_minibatches > 1:
            grads = jax.tree.map(lambda g: g.astype(dtype), grads)
        return carry, (grads, sums), rows

    carry, (grads, sums), rows = over_minibatches(one, carry, batch, num_minibatches)
    return grads, carry, sums, rows


def over_minibatches(
    fn: Callable[[Carry, PyTree, jax.Array], tuple[Carry, PyTree, PyTree]],
    carry: Carry,
    batch: PyTree,
    num_minibatches: int,
) -> tuple[Carry, PyTree, PyTree]:
    """Calls a function on one minibatch after the other and adds up its results.

    Args:
      fn: (carry, minibatch, number of the minibatch) -> (carry, sums, rows). `sums` are arrays to add up, `rows` are arrays
        with the minibatch's rows in dimension 0.
      carry: the carry of the first call.
      batch: arrays [rows, ...].
      num_minibatches: number of minibatches; must divide the number of rows.

    Returns:
      The carry of the last call, the total sums, and the rows of all minibatches in the order of the batch.

    Raises:
      ValueError: `num_minibatches` doesn't divide the rows.
    """
    for path, leaf in named_leaves(batch):
        if leaf.shape[0] % num_minibatches:
            raise ValueError(
                f"{path}: {leaf.shape[0]} rows on a device don't make {num_minibatches} minibatches of equal size; "
                f"choose a num_minibatches that divides {leaf.shape[0]}"
            )
    if num_minibatches == 1:
        return fn(carry, batch, jnp.zeros((), jnp.int32))
    split = jax.tree.map(lambda x: x.reshape(num_minibatches, -1, *x.shape[1:]), batch)
    numbers = jnp.arange(num_minibatches, dtype=jnp.int32)
    _, sums, _ = jax.eval_shape(fn, carry, jax.tree.map(lambda x: x[0], split), numbers[0])
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)

    def body(state: tuple[Carry, PyTree], x: tuple[PyTree, jax.Array]) -> tuple[tuple[Carry, PyTree], PyTree]:
        carry, totals = state
        carry, sums, rows = fn(carry, *x)
        return (carry, jax.tree.map(jnp.add, totals, sums)), rows

    (carry, sums), rows = lax.scan(body, (carry, zeros), (split, numbers))
    return carry, sums, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)


def weighted_sum(value: jax.typing.ArrayLike, weight: jax.typing.ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Returns (value * weight, weight) in float32; (0, 0) where the weight is 0, even if the value is NaN."""
    value, weight = jnp.asarray(value, jnp.float32), jnp.asarray(weight, jnp.float32)
    return jnp.where(weight == 0, 0.0, value * weight), weight


def weighted_mean(total: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns total / weight; 0 where the weight is 0."""
    return jnp.where(weight == 0, 0.0, total / jnp.where(weight == 0, 1.0, weight))


def accumulated_gradients(
    layout: Layout, num_minibatches: int, mdl_vars: NestedJTensor, prng_key: jax.Array, inputs: NestedJTensor
) -> tuple[StepFnOutput, NestedJTensor, NestedJTensor]:
    """Runs the forward and backward pass over minibatches of the global batch.

    The gradients are those of the mean loss over the whole batch: the loss of each minibatch is weighted by its loss weight.
    Functions of the rows other than weighted means (batch normalization, load-balancing losses of experts) see the rows of one
    minibatch. A metric with the same weight in every minibatch, such as a count, is averaged over the minibatches. Dropout masks
    differ between minibatches. Integers that the model writes are those of the whole batch (`advance_integers`).

    Args:
      layout: the layout of the state; it also determines how each minibatch is sharded over the mesh.
      num_minibatches: number of minibatches; must divide the number of rows in the batch.
      mdl_vars, prng_key, inputs: as in `step_fns.gradients`.

    Returns:
      The same as `step_fns.gradients`.
    """
    excluded = masks.get_excluded_var_mask_for_grad(layout.var_weight_hparams, layout.task.learner)
    written = {name: mdl_vars[name] for name in step_fns.FORWARD_COLLECTIONS if name in mdl_vars}
    num_rows = jax.tree.leaves(inputs)[0].shape[0]
    outputs = Outputs(str(layout.task.learner.loss_name))

    def loss_fn(
        params: NestedJTensor, written: NestedJTensor, rows: NestedJTensor, key: jax.Array, index: jax.Array
    ) -> LossAndAux:
        del index
        merged = {**step_fns.merge(excluded, params, mdl_vars), **written}
        output, new = step_fns.forward(layout, merged, key, layout.reshard(rows), do_eval=False)
        written = {name: keep_integers(new.get(name, old), old) for name, old in written.items()}
        sums, by_row = outputs.take(output, jnp.ones(()), num_rows // num_minibatches)
        return output.loss * lax.stop_gradient(sums["loss"][1]), (written, sums, by_row)

    # Each minibatch takes every n-th row, so that each has rows on every device.
    grads, written, sums, by_row = accumulate_gradients(
        activation_memory.with_policy(layout.task, loss_fn),
        masks.mask_out(mdl_vars, excluded),
        written,
        jax.tree.map(lambda x: _transposed(x, (-1, num_minibatches)), inputs),
        prng_key,
        num_minibatches,
        layout.task.train.gradient_accumulation_dtype,
    )
    by_row = [_transposed(x, (num_minibatches, -1)) for x in by_row]
    inverse = weighted_mean(jnp.ones(()), sums["loss"][1])
    grads = jax.tree.map(lambda g, p: (g * inverse).astype(p.dtype), grads, masks.mask_out(mdl_vars, excluded))
    written = advance_integers(written, layout, mdl_vars, prng_key, inputs)
    return outputs.put_back(sums, by_row, 1, num_rows), written, grads


def is_integer(x: jax.Array) -> bool:
    """Returns True for an array of integers or booleans."""
    return not jnp.issubdtype(x.dtype, jnp.inexact)


def keep_integers(new: PyTree, old: PyTree) -> PyTree:
    """Returns the floats of `new` and the integers of `old`, in the dtypes of `old`; both have the same structure."""
    return jax.tree.map(lambda n, o: o if is_integer(o) else n.astype(o.dtype), new, old)


def advance_integers(
    written: NestedJTensor,
    layout: LogicalLayout,
    mdl_vars: NestedJTensor,
    prng_key: jax.Array,
    inputs: NestedJTensor,
) -> NestedJTensor:
    """Replaces the integers among the written variables with those that a forward pass over the whole batch writes.

    Args:
      written: the variable collections that the forward passes of the minibatches wrote, by name.
      layout, mdl_vars, prng_key, inputs: as in `step_fns.gradients`.

    Returns:
      A tree like `written`; `written` itself if it has no integers.
    """
    if not any(is_integer(x) for x in jax.tree.leaves(written)):
        return written
    _, whole = step_fns.forward(layout, mdl_vars, prng_key, inputs, do_eval=False)
    return {
        name: jax.tree.map(lambda w, o: w.astype(o.dtype) if is_integer(o) else o, whole.get(name, tree), tree)
        for name, tree in written.items()
    }


def _transposed(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Returns `x` with reordered rows: arranges them in a matrix of `shape` row by row, and reads it column by column."""
    return x.reshape(*shape, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)


class Outputs:
    """Splits a minibatch's output into sums to add up and arrays to concatenate, and makes the batch's output from the totals.

    clu metrics of the minibatches are concatenated like rows, and reduced at the end by the metrics' own `reduce`.

    `take` records the output's structure during tracing, so make a new instance for each trace. An instance holds no arrays.
    """

    def __init__(self, loss_name: str):
        self._loss_name = loss_name
        self._treedef: jax.tree_util.PyTreeDef
        self._by_row: list[bool]
        self._clu: jax.tree_util.PyTreeDef
        self._minibatch_rows: int
        self._scalars: Callable[[dict[str, Pair]], step_fns.WeightedScalars]

    def take(self, output: StepFnOutput, real: jax.Array, num_rows: int) -> tuple[dict[str, Any], list[jax.Array]]:
        """Splits the output of one minibatch into sums to add up and arrays to concatenate.

        Args:
          output: the output of the minibatch.
          real: scalar; 0.0 if all rows of the minibatch are padding, else 1.0.
          num_rows: number of rows of the minibatch.

        Returns:
          {'loss', 'scalars', 'summaries', 'others': (sum, weight) pairs}, and arrays to concatenate: the leaves of
          `per_example_out` that have the rows in dimension 0, and the leaves of the clu metrics with a new dimension 0.
        """
        weight = output.weighted_scalars[self._loss_name][1]
        leaves, self._treedef = jax.tree.flatten(output.per_example_out)
        self._by_row = [jnp.ndim(x) > 0 and x.shape[0] == num_rows for x in leaves]
        self._scalars = type(output.weighted_scalars)
        pair = weighted_sum
        sums = {
            "loss": pair(cast(jax.Array, output.loss), weight * real),  # only decoding has no loss
            "scalars": {name: pair(v, w * real) for name, (v, w) in output.weighted_scalars.items()},
            "summaries": {name: pair(x, real) for name, x in output.summary_tensors.items()},
            "others": [pair(x, real) for x, by_row in zip(leaves, self._by_row, strict=True) if not by_row],
        }
        clu, self._clu = jax.tree.flatten(output.clu_metrics)
        self._minibatch_rows = num_rows
        rows = [x for x, by_row in zip(leaves, self._by_row, strict=True) if by_row]
        return sums, [*rows, *(jnp.asarray(x)[None] for x in clu)]

    def put_back(self, sums: dict[str, Any], by_row: list[jax.Array], num_devices: int, num_rows: int) -> StepFnOutput:
        """Makes the output over the global batch from the results of `take` for all minibatches.

        Args:
          sums: the sums that `take` returned, added up over minibatches, and averaged over devices.
          by_row: the concatenated arrays of `take`: [padded rows, ...], and [minibatches of all devices, ...] for clu metrics.
          num_devices: the number of devices that `sums` were averaged over.
          num_rows: number of rows of the global batch without padding.
        """
        mean = weighted_mean
        rows, others = iter(by_row), iter(sums["others"])
        leaves = [next(rows) if is_row else mean(*next(others)) for is_row in self._by_row]
        pairs = zip(leaves, self._by_row, strict=True)
        leaves = [slice_off(x, (num_rows, *x.shape[1:])) if is_row else x for x, is_row in pairs]
        scalars = {name: (mean(s, w), w * num_devices) for name, (s, w) in sums["scalars"].items()}
        # Minibatches that hold padding are the last ones, and none holds both rows and padding.
        clu = jax.tree.unflatten(self._clu, [x[: num_rows // self._minibatch_rows] for x in rows])
        return StepFnOutput(
            loss=mean(*sums["loss"]),
            weighted_scalars=self._scalars(scalars),
            per_example_out=jax.tree.unflatten(self._treedef, leaves),
            summary_tensors={name: mean(s, w) for name, (s, w) in sums["summaries"].items()},
            clu_metrics={name: metric.reduce() for name, metric in (clu or {}).items()},
        )


def check_count(num_minibatches: int, num_rows: int) -> None:
    """Checks that a batch can be divided into minibatches of equal size.

    Raises:
      ValueError: `num_minibatches` doesn't divide `num_rows`; the message lists the divisors.
    """
    if num_rows % num_minibatches:
        divisors = [str(n) for n in range(1, num_rows + 1) if num_rows % n == 0]
        raise ValueError(
            f"num_minibatches={num_minibatches} doesn't divide the global batch of {num_rows} rows; choose one of "
            f"{', '.join(divisors)}, or another batch size"
        )


def check_no_overwritten(layout: LogicalLayout, what: str) -> None:
    """Checks that no variable is overwritten with its gradient, because such a gradient is not a mean over parts of a batch.

    Args:
      layout: the layout of the variables.
      what: the setting or partitioner that computes gradients in parts, for the message.

    Raises:
      ValueError: a variable is overwritten with its gradient; the message names it.
    """
    overwritten = jax.tree.map(base_layer.var_overwrite_with_gradient, layout.var_weight_hparams)
    for path, overwrites in named_leaves(overwritten):
        if overwrites:
            raise ValueError(
                f"{path} is overwritten with its gradient (an fp8 scale), which is not a mean over parts of a batch: "
                f"{what} cannot train it. Use PjitPartitioner with num_minibatches=1."
            )
