"""The computation of one step, on logical (unpadded) shapes, independent of mesh, padding and devices.

`train_step`, `eval_step` and `decode_step` are pure functions of their arguments. `step/compiled_step.py` wraps and jits them:
there, inputs are split, padding is sliced off the state before the step, and the new state is padded.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from praxis import base_layer

from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.models.base import ModuleModel
from spmd_trainer.sharding.variables import named_leaves, path_str
from spmd_trainer.step import activation_memory, load_balance, masks, opt_state_dtypes
from spmd_trainer.step.layout import LogicalLayout
from spmd_trainer.train_states import NestedJTensor, NestedWeightHParams, PyTree, TrainState

if TYPE_CHECKING:
    from spmd_trainer.tasks_lib import SingleTask

Tree = TypeVar("Tree")

# {name: (mean value, weight)}; praxis models return a subclass of dict.
WeightedScalars: TypeAlias = Mapping[str, tuple[jax.Array, jax.Array]]
# Collections that the forward pass itself updates (batch-norm averages and the like).
FORWARD_COLLECTIONS = (base_layer.NON_TRAINABLE, *base_layer.NON_PAX_VAR_COLLECTION)


@struct.dataclass
class StepFnOutput:
    """The outputs of a step other than the new state.

    Attributes:
      loss: float32 scalar, the mean loss over the global batch; None in decoding.
      weighted_scalars: {name: (mean value, weight)} of scalar metrics over the global batch.
      per_example_out: arrays with the batch as dimension 0.
      summary_tensors: {name: array}, the summaries of the model and, in training, of the learner.
      clu_metrics: {name: clu metric} over the global batch, or None. clu Averages are in `weighted_scalars` instead.
    """

    loss: jax.Array | None
    weighted_scalars: WeightedScalars
    per_example_out: NestedJTensor
    summary_tensors: dict[str, jax.Array]
    clu_metrics: Mapping[str, Any] | None = None


# (mdl_vars, key, inputs) -> (output, collections that the forward pass wrote, gradients)
GradFn: TypeAlias = Callable[
    [NestedJTensor, jax.Array, NestedJTensor], tuple["StepFnOutput", NestedJTensor, NestedJTensor]
]
# (mdl_vars, key, inputs) -> output
EvalFn: TypeAlias = Callable[[NestedJTensor, jax.Array, NestedJTensor], "StepFnOutput"]


def gradients(
    layout: LogicalLayout, mdl_vars: NestedJTensor, prng_key: jax.Array, inputs: NestedJTensor
) -> tuple[StepFnOutput, NestedJTensor, NestedJTensor]:
    """Runs the forward and backward pass on the whole batch at once.

    Args:
      layout: the task, and the WeightHParams in the structure of `mdl_vars`.
      mdl_vars: the variables, of logical shapes.
      prng_key: the step's PRNG key.
      inputs: the global batch.

    Returns:
      The output of `forward`, the variable collections that the forward pass wrote, and the gradients. Variables that are not
      trained are masked out of the gradients (`masks.mask_out`).
    """
    excluded = masks.get_excluded_var_mask_for_grad(layout.var_weight_hparams, layout.task.learner)

    def loss_fn(trainable: NestedJTensor) -> tuple[jax.Array | None, tuple[StepFnOutput, NestedJTensor]]:
        merged = merge(excluded, trainable, mdl_vars)
        output, forward_vars = forward(layout, merged, prng_key, inputs, do_eval=False)
        return output.loss, (output, forward_vars)

    trainable = masks.mask_out(mdl_vars, excluded)
    (_, (output, forward_vars)), grads = jax.value_and_grad(
        activation_memory.with_policy(layout.task, loss_fn), has_aux=True, allow_int=True
    )(trainable)
    return output, forward_vars, grads


def train_step(
    layout: LogicalLayout, state: TrainState, prng_key: jax.Array, inputs: NestedJTensor, grad_fn: GradFn | None = None
) -> tuple[TrainState, StepFnOutput]:
    """Runs one training step: forward pass, backward pass, learner.

    Args:
      layout: the task, and the WeightHParams in the structure of `state.mdl_vars`.
      state: the train state after n steps, of logical shapes.
      prng_key: the run's PRNG key, the same for every step; `train_step` folds the step number in.
      inputs: the global batch.
      grad_fn: the partitioner's own forward and backward pass; None for `gradients`.

    Returns:
      The state after n + 1 steps, and the step's outputs.
    """
    task, run = layout.task, grad_fn or functools.partial(gradients, layout)
    output, forward_vars, grads = run(state.mdl_vars, jax.random.fold_in(prng_key, state.step), inputs)
    forward_vars = load_balance.moved_by_load(layout, forward_vars, output.summary_tensors)
    output = _with_task_metrics(task, output)
    with base_layer.JaxContext.new_context(hparams=model_context(task, do_eval=False)):
        new_vars, opt_state = _learn(layout, state, grads, forward_vars)
        summaries = {**output.summary_tensors, **base_layer.all_global_summaries()}
    new_state = state.new_state(new_vars, [opt_state], state.extra_state)
    return new_state, dataclasses.replace(output, summary_tensors=summaries)


def eval_step(
    layout: LogicalLayout, state: TrainState, prng_key: jax.Array, inputs: NestedJTensor, eval_fn: EvalFn | None = None
) -> tuple[None, StepFnOutput]:
    """Evaluates the model on one global batch. Returns (None, outputs): there is no new state.

    Args:
      layout, state, prng_key, inputs: as in `train_step`.
      eval_fn: the partitioner's own forward pass; None for `forward`.
    """
    key = jax.random.fold_in(prng_key, state.step)
    if eval_fn is None:
        output, _ = forward(layout, state.mdl_vars, key, inputs, do_eval=True)
    else:
        output = eval_fn(state.mdl_vars, key, inputs)
    return None, _floats_to_float32(_with_task_metrics(layout.task, output))


def decode_step(
    layout: LogicalLayout, state: TrainState, prng_key: jax.Array, inputs: NestedJTensor, eval_fn: EvalFn | None = None
) -> tuple[None, StepFnOutput]:
    """Decodes one global batch with `model.decode`. Returns (None, outputs): there is no new state.

    Randomness depends only on the key and the step, so the same seed gives the same text on any mesh.

    Args:
      layout, state, prng_key, inputs: as in `train_step`.
      eval_fn: not used: the compiler always partitions decoding. Partitioners pass this argument to eval and decode steps.
    """
    del eval_fn
    task = layout.task
    mdl_vars, inputs = to_fprop_dtype(layout, state.mdl_vars, inputs)
    with base_layer.JaxContext.new_context(hparams=model_context(task, do_eval=True)):
        key = jax.random.fold_in(prng_key, state.step)
        outputs, updated = task.model_for_steps.decode(mdl_vars, inputs, key, mutable=task.decode.apply_mutable_list)
    weighted_scalars, per_example_out, *rest = outputs
    output = StepFnOutput(
        loss=None,
        weighted_scalars=weighted_scalars,
        per_example_out=per_example_out,
        summary_tensors=_flatten_summaries(updated.get(base_layer.SUMMARIES, {})),
        clu_metrics=rest[0] if rest else {},
    )
    return None, _floats_to_float32(output)


def merge(excluded: PyTree, trainable: NestedJTensor, mdl_vars: NestedJTensor) -> NestedJTensor:
    """Returns the variables of `mdl_vars` where `excluded` is True, and those of `trainable` elsewhere."""
    return jax.tree.map(lambda e, new, old: old if e else new, excluded, trainable, mdl_vars)


def model_context(task: SingleTask, *, do_eval: bool) -> base_layer.JaxContext.HParams:
    """Returns the praxis context in which the task's model runs."""
    return base_layer.JaxContext.HParams(do_eval=do_eval, summary_verbosity=task.summary_verbosity)


def forward(
    layout: LogicalLayout,
    mdl_vars: NestedJTensor,
    prng_key: jax.Array,
    inputs: NestedJTensor,
    *,
    do_eval: bool,
    prepare: Callable[[NestedJTensor], NestedJTensor] = lambda mdl_vars: mdl_vars,
) -> tuple[StepFnOutput, NestedJTensor]:
    """Runs the model and reads the loss from its outputs.

    Args:
      layout: the task, and the WeightHParams in the structure of `mdl_vars`.
      mdl_vars: the variables.
      prng_key: the step's PRNG key.
      inputs: the batch, or the rows of a minibatch.
      do_eval: True in evaluation, False in training.
      prepare: variables -> variables for the model; applied after the cast to the model's computation dtype.

    Returns:
      The output, with the weighted scalars as the model returns them, and the variable collections that the forward pass wrote.

    Raises:
      UserError: the model returns no metric named `task.train.learner.loss_name`.
    """
    task = layout.task
    mutable = task.evaluate.apply_mutable_list if do_eval else task.train.apply_mutable_list
    mdl_vars, inputs = to_fprop_dtype(layout, mdl_vars, inputs)
    with base_layer.JaxContext.new_context(hparams=model_context(task, do_eval=do_eval)):
        (weighted_scalars, per_example_out, *rest), updated = task.model_for_steps.forward(
            prepare(mdl_vars), inputs, prng_key, do_eval=do_eval, mutable=mutable
        )
    name, clu_metrics = str(task.learner.loss_name), rest[0] if rest else {}
    if "loss" in clu_metrics and name != "loss":
        raise UserError(f"a clu metric is named 'loss', as summaries name the loss ({name!r}); rename the metric")
    if name in clu_metrics:
        raise UserError(
            f"task.train.learner.loss_name is {name!r}, which is a clu {type(clu_metrics[name]).__name__}; a loss is "
            "(value, weight), or a clu Average"
        )
    if name not in weighted_scalars:
        raise UserError(
            f"task.train.learner.loss_name is {name!r}, and the model returns no such metric"
            f"{did_you_mean(name, weighted_scalars)}"
        )
    loss = jnp.asarray(weighted_scalars[name][0], jnp.float32)
    summaries = _flatten_summaries(updated.get(base_layer.SUMMARIES, {}))
    written = {name: updated[name] for name in FORWARD_COLLECTIONS if name in updated}
    return StepFnOutput(loss, weighted_scalars, per_example_out, summaries, clu_metrics), written


def _with_task_metrics(task: SingleTask, output: StepFnOutput) -> StepFnOutput:
    if task.metrics is None:
        return output
    return dataclasses.replace(output, weighted_scalars=task.metrics(output.weighted_scalars))


def _learn(
    layout: LogicalLayout, state: TrainState, grads: NestedJTensor, forward_vars: NestedJTensor
) -> tuple[NestedJTensor, PyTree]:
    """Runs the learner on gradients. Returns the new variables and the new optimizer state."""
    learner, train = layout.task.learner, layout.task.train
    excluded_for_grad = masks.get_excluded_var_mask_for_grad(layout.var_weight_hparams, learner)
    excluded_for_opt = masks.get_excluded_var_mask_for_opt(layout.var_weight_hparams, learner)
    learner.plot_learning_rate(state.step)
    raw_grads = grads
    # Variables with an optimizer state but no gradient (EMA of batch-norm averages) get a gradient of zero.
    grads = jax.tree.map(
        lambda no_opt, no_grad, var, grad: jnp.zeros_like(var) if no_grad and not no_opt else grad,
        excluded_for_opt,
        excluded_for_grad,
        state.mdl_vars,
        grads,
    )
    seen_by_learner = {**state.mdl_vars, **forward_vars}
    # A variable that its gradient overwrites (fp8 scales) has no optimizer state, but the learner does write it.
    left_alone = jax.tree.map(lambda no_opt, no_grad: no_opt and no_grad, excluded_for_opt, excluded_for_grad)
    mdl_vars = masks.mask_out(seen_by_learner, left_alone)
    hparams = masks.mask_out(layout.var_weight_hparams, left_alone)
    with opt_state_dtypes.rounding_for(state.step):
        updates, opt_state = learner.update_states(grads, state.opt_states[0], mdl_vars, hparams)
    new_vars = learner.apply_gradient(mdl_vars, updates, hparams)
    new_vars = merge(excluded_for_grad, new_vars, seen_by_learner)
    new_vars = merge(masks.explicitly_excluded(layout.var_weight_hparams, learner), new_vars, state.mdl_vars)
    new_vars = load_balance.without_moves_of_a_skipped_step(layout, state.mdl_vars, new_vars)
    if train.variable_norm_summary:
        for name, norm in _variable_norms(new_vars):
            base_layer.add_global_summary(name, norm)
    if train.update_ratio_summary:
        found = _update_ratios(excluded_for_grad, layout.var_weight_hparams, state.mdl_vars, new_vars, raw_grads)
        for name, norm in found:
            base_layer.add_global_summary(name, norm, base_layer.SummaryType.AGGREGATE_SCALAR)
    return new_vars, opt_state


def _variable_norms(variables: NestedJTensor) -> Iterator[tuple[str, jax.Array]]:
    """Yields ('vars/PATH', root mean square as a float32 scalar) for every variable."""
    for path, value in named_leaves(variables):
        yield f"vars/{path}", jnp.sqrt(jnp.mean(jnp.square(value.astype(jnp.float32))))


def _update_ratios(
    no_grad: PyTree,
    var_weight_hparams: NestedWeightHParams,
    old_vars: NestedJTensor,
    new_vars: NestedJTensor,
    grads: NestedJTensor,
) -> Iterator[tuple[str, jax.Array]]:
    """Yields (summary name, float32 norms) for every variable with a gradient.

    Norms of a repeated layer's variable are an array [*repeat_prefix], one number for each layer. Norms of all other variables
    are scalars. A model's own padding, e.g. of a vocabulary, is zero and adds nothing to the norms.

    Args:
      no_grad: tree of bools; True for the variables without a gradient.
      var_weight_hparams: WeightHParams, in the structure of `no_grad`.
      old_vars: the variables before the step.
      new_vars: the variables after the step.
      grads: the gradients before clipping; leaves where `no_grad` is True are ignored.

    Yields:
      ('layers/grad_norm/PATH', L2 norm of the gradient), ('layers/var_norm/PATH', L2 norm of the variable before the step), and
      ('layers/update_ratio/PATH', L2 norm of the change / L2 norm of the variable; 0 for a variable of zeros).
    """
    treedef: Any = jax.tree.structure(no_grad)
    trees = (treedef.flatten_up_to(tree) for tree in (var_weight_hparams, old_vars, new_vars, grads))
    for (key_path, without), hparams, old, new, grad in zip(
        jax.tree_util.tree_leaves_with_path(no_grad), *trees, strict=True
    ):
        # fp8 scales are overwritten with their gradient, which is none.
        if without or base_layer.var_overwrite_with_gradient(hparams) or not jnp.issubdtype(old.dtype, jnp.floating):
            continue
        path, stacked = path_str(key_path), len(hparams.repeat_prefix or ())
        size = _norm(old, stacked)
        change = _norm(new.astype(jnp.float32) - old.astype(jnp.float32), stacked)
        yield f"layers/grad_norm/{path}", _norm(grad, stacked)
        yield f"layers/var_norm/{path}", size
        yield f"layers/update_ratio/{path}", jnp.where(size == 0, 0.0, change / jnp.where(size == 0, 1.0, size))


def _norm(x: jax.Array, stacked: int) -> jax.Array:
    """Returns the L2 norm over all dimensions except the first `stacked` ones, as float32."""
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=tuple(range(stacked, x.ndim))))


def to_fprop_dtype(
    layout: LogicalLayout, mdl_vars: NestedJTensor, inputs: NestedJTensor
) -> tuple[NestedJTensor, NestedJTensor]:
    """Casts float32 variables and inputs to bfloat16 if the model's `fprop_dtype` is bfloat16.

    Variables that disallow this cast stay float32. Inputs of a `ModuleModel` are not cast, because the model casts them itself.

    Raises:
      ValueError: `fprop_dtype` is neither float32 nor bfloat16.
    """
    dtype = jnp.dtype(layout.task.fprop_dtype)
    if dtype == jnp.float32:
        return mdl_vars, inputs
    if dtype != jnp.bfloat16:
        raise ValueError(f"task.model.fprop_dtype is {dtype}; float32 and bfloat16 are supported")

    def cast(x: jax.Array) -> jax.Array:
        return x.astype(dtype) if x.dtype == jnp.float32 else x

    def cast_var(hparams: base_layer.WeightHParams, x: jax.Array) -> jax.Array:
        return x if base_layer.var_disallow_bfloat16_conversion(hparams) else cast(x)

    # Models of other libraries cast the arguments of their module themselves; their loss gets the batch as it is.
    rows = inputs if isinstance(layout.task.model, ModuleModel) else jax.tree.map(cast, inputs)
    return jax.tree.map(cast_var, layout.var_weight_hparams, mdl_vars), rows


def _floats_to_float32(tree: Tree) -> Tree:
    as_float32: Tree = jax.tree.map(
        lambda x: x.astype(jnp.float32) if getattr(x, "dtype", None) == jnp.bfloat16 else x, tree
    )
    return as_float32


def _flatten_summaries(summaries: PyTree) -> dict[str, jax.Array]:
    """Returns {'layer/sub/name_scalar': array} for the nested summaries that Flax collected."""
    leaves = jax.tree_util.tree_leaves_with_path(summaries)
    return {
        "/".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path): value for path, value in leaves
    }
