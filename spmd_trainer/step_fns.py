"""The maths of one step, on logical shapes: no mesh, no padding, no devices.

`train_step`, `eval_step` and `decode_step` are pure functions of (state, key, inputs). `partitioning` wraps them: it splits
the inputs, slices the padding off the state before and pads it after, and jits. Read this file to know what a step computes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from praxis import base_layer

from spmd_trainer import variable_masks
from spmd_trainer.tasks_lib import SingleTask
from spmd_trainer.train_states import TrainState

# Collections that the forward pass itself updates (batch-norm averages and the like).
_FORWARD_COLLECTIONS = (base_layer.NON_TRAINABLE, *base_layer.NON_PAX_VAR_COLLECTION)


@struct.dataclass
class StepFnOutput:
    """What a step gives besides the new state.

    Attributes:
      loss: float32 scalar, the mean loss over the global batch; None in decode.
      weighted_scalars: {name: (mean value, weight)}, scalars over the global batch.
      per_example_out: arrays with the batch as dimension 0.
      summary_tensors: {name: array}, forward and backward summaries.
      clu_metrics: {name: clu metric} where the model's decode gives some.
    """

    loss: Any
    weighted_scalars: Any
    per_example_out: Any
    summary_tensors: Any
    clu_metrics: Any = None


def train_step(
    task: SingleTask, state: TrainState, prng_key: jax.Array, inputs: Any, var_weight_hparams: Any
) -> tuple[TrainState, StepFnOutput]:
    """Takes one training step: forward, backward, learner.

    Args:
      task: the built task.
      state: the state after n steps, logical shapes.
      prng_key: the run's key; the step number is folded in here, so the same key serves every step.
      inputs: the global batch.
      var_weight_hparams: WeightHParams of `state.mdl_vars`, same structure.

    Returns:
      The state after n + 1 steps, and the step's outputs.
    """
    learner = task.learner
    context = _context(task, do_eval=False)
    prng_key = jax.random.fold_in(prng_key, state.step)
    excluded_for_grad = variable_masks.get_excluded_var_mask_for_grad(var_weight_hparams, learner)
    excluded_for_opt = variable_masks.get_excluded_var_mask_for_opt(var_weight_hparams, learner)

    def loss_fn(trainable: Any) -> tuple[jax.Array, tuple[StepFnOutput, Any]]:
        mdl_vars = _merge(excluded_for_grad, trainable, state.mdl_vars)
        with base_layer.JaxContext.new_context(hparams=context):
            output, updated = _forward(
                task, mdl_vars, inputs, prng_key, var_weight_hparams, task.train.apply_mutable_list
            )
        return output.loss, (output, {name: updated[name] for name in _FORWARD_COLLECTIONS if name in updated})

    trainable = variable_masks.mask_out(state.mdl_vars, excluded_for_grad)
    (_, (output, forward_vars)), grads = jax.value_and_grad(loss_fn, has_aux=True, allow_int=True)(trainable)
    with base_layer.JaxContext.new_context(hparams=context):
        mdl_vars, opt_state = _learn(
            task, state, grads, forward_vars, var_weight_hparams, excluded_for_grad, excluded_for_opt
        )
        summaries = {**output.summary_tensors, **base_layer.all_global_summaries()}
    return state.new_state(mdl_vars, [opt_state], state.extra_state), output.replace(summary_tensors=summaries)


def eval_step(
    task: SingleTask, state: TrainState, prng_key: jax.Array, inputs: Any, var_weight_hparams: Any
) -> tuple[None, StepFnOutput]:
    """Evaluates the model on one global batch. Arguments as in `train_step`; no state comes back."""
    prng_key = jax.random.fold_in(prng_key, state.step)
    with base_layer.JaxContext.new_context(hparams=_context(task, do_eval=True)):
        output, _ = _forward(
            task, state.mdl_vars, inputs, prng_key, var_weight_hparams, task.evaluate.apply_mutable_list
        )
    return None, _floats_to_float32(output)


def decode_step(
    task: SingleTask, state: TrainState, prng_key: jax.Array, inputs: Any, var_weight_hparams: Any
) -> tuple[None, StepFnOutput]:
    """Decodes one global batch with `model.decode`. Arguments as in `train_step`; no state comes back.

    Randomness depends on the key and the step only, so the same seed gives the same text on any mesh.
    """
    mdl_vars, inputs = _to_fprop_dtype(task, state.mdl_vars, inputs, var_weight_hparams)
    with base_layer.JaxContext.new_context(hparams=_context(task, do_eval=True)):
        outputs, updated = task.model.apply(
            mdl_vars,
            inputs,
            method=task.model.decode,
            rngs=_rngs(jax.random.fold_in(prng_key, state.step)),
            mutable=list(task.decode.apply_mutable_list),
        )
    weighted_scalars, per_example_out, *rest = outputs
    output = StepFnOutput(
        loss=None,
        weighted_scalars=weighted_scalars,
        per_example_out=per_example_out,
        summary_tensors=_flatten_summaries(updated.get(base_layer.SUMMARIES, {})),
        clu_metrics=rest[0] if rest else {},
    )
    return None, _floats_to_float32(output)


def create_train_state(
    task: SingleTask, mdl_vars: Any, var_weight_hparams: Any, *, with_opt_states: bool = True
) -> TrainState:
    """Returns the state before the first step, for variables of logical shapes; usable under `jax.eval_shape`."""
    if not with_opt_states:
        return TrainState.create(mdl_vars, [])
    grad_tx, excluded = grad_transformation(task, var_weight_hparams)
    return TrainState.create(mdl_vars, [grad_tx.init(variable_masks.mask_out(mdl_vars, excluded))])


def grad_transformation(task: SingleTask, var_weight_hparams: Any) -> tuple[Any, Any]:
    """Returns the learner's gradient transformation for these variables, and the mask of those it leaves out."""
    excluded = variable_masks.get_excluded_var_mask_for_opt(var_weight_hparams, task.learner)
    return task.learner.get_grad_tx(variable_masks.mask_out(var_weight_hparams, excluded)), excluded


def init_model_vars(task: SingleTask, prng_key: jax.Array, inputs: Any) -> Any:
    """Initialises the model's variables at their logical shapes.

    Args:
      task: the built task.
      prng_key: the run's key.
      inputs: arrays of the input specs; only their shapes and dtypes matter.
    """
    with base_layer.JaxContext.new_context(hparams=_context(task, do_eval=False)):
        _, inputs = _to_fprop_dtype(task, {}, inputs, {})
        mdl_vars = task.model.init(_rngs(prng_key), inputs)
    # Axis names of Flax modules' parameters: metadata, not variables.
    mdl_vars.pop("params_axes", None)
    return mdl_vars


def _merge(excluded: Any, trainable: Any, mdl_vars: Any) -> Any:
    return jax.tree.map(lambda e, new, old: old if e else new, excluded, trainable, mdl_vars)


def _context(task: SingleTask, *, do_eval: bool) -> base_layer.JaxContext.HParams:
    return base_layer.JaxContext.HParams(do_eval=do_eval, summary_verbosity=task.summary_verbosity)


def _rngs(prng_key: jax.Array) -> dict[str, jax.Array]:
    params, random, non_pax = jax.random.split(prng_key, 3)
    return {base_layer.PARAMS: params, base_layer.RANDOM: random, base_layer.NON_PAX_RNG_KEY: non_pax}


def _forward(
    task: SingleTask, mdl_vars: Any, inputs: Any, prng_key: jax.Array, var_weight_hparams: Any, mutable: list[str]
) -> tuple[StepFnOutput, Any]:
    """Runs the model and picks the loss out of its metrics."""
    mdl_vars, inputs = _to_fprop_dtype(task, mdl_vars, inputs, var_weight_hparams)
    (weighted_scalars, per_example_out), updated = task.model.apply(
        mdl_vars, inputs, method=task.model.__call__, mutable=list(mutable), rngs=_rngs(prng_key)
    )
    name = task.learner.loss_name
    if name not in weighted_scalars:
        raise ValueError(
            f"task.train.learner.loss_name is {name!r}, but the model's outputs are {sorted(weighted_scalars)}"
        )
    loss = jnp.asarray(weighted_scalars[name][0], jnp.float32)
    if task.metrics is not None:
        weighted_scalars = task.metrics(weighted_scalars)
    summaries = _flatten_summaries(updated.get(base_layer.SUMMARIES, {}))
    return StepFnOutput(loss, weighted_scalars, per_example_out, summaries), updated


def _learn(
    task: SingleTask,
    state: TrainState,
    grads: Any,
    forward_vars: Any,
    var_weight_hparams: Any,
    excluded_for_grad: Any,
    excluded_for_opt: Any,
) -> tuple[Any, Any]:
    """Turns gradients into new variables and a new optimizer state."""
    learner = task.learner
    learner.plot_learning_rate(state.step)
    # Variables with an optimizer state but no gradient (EMA of batch-norm averages) enter the learner with a zero one.
    grads = jax.tree.map(
        lambda no_opt, no_grad, var, grad: jnp.zeros_like(var) if no_grad and not no_opt else grad,
        excluded_for_opt,
        excluded_for_grad,
        state.mdl_vars,
        grads,
    )
    seen_by_learner = {**state.mdl_vars, **forward_vars}
    mdl_vars = variable_masks.mask_out(seen_by_learner, excluded_for_opt)
    hparams = variable_masks.mask_out(var_weight_hparams, excluded_for_opt)
    updates, opt_state = learner.update_states(grads, state.opt_states[0], mdl_vars, hparams)
    new_vars = learner.apply_gradient(mdl_vars, updates, hparams)
    new_vars = _merge(excluded_for_grad, new_vars, seen_by_learner)
    new_vars = _merge(variable_masks.explicitly_excluded(var_weight_hparams, learner), new_vars, state.mdl_vars)
    if task.train.variable_norm_summary:
        for path, value in jax.tree_util.tree_leaves_with_path(new_vars):
            name = "/".join(str(getattr(key, "key", key)) for key in path)
            base_layer.add_global_summary(f"vars/{name}", jnp.sqrt(jnp.mean(jnp.square(value.astype(jnp.float32)))))
    return new_vars, opt_state


def _to_fprop_dtype(task: SingleTask, mdl_vars: Any, inputs: Any, var_weight_hparams: Any) -> tuple[Any, Any]:
    """Casts float32 variables and inputs to the dtype the model computes in, where that is bfloat16."""
    dtype = jnp.dtype(task.fprop_dtype)
    if dtype == jnp.float32:
        return mdl_vars, inputs
    if dtype != jnp.bfloat16:
        raise ValueError(f"task.model.fprop_dtype is {dtype}; float32 and bfloat16 are supported")

    def cast(x: Any) -> Any:
        return x.astype(dtype) if x.dtype == jnp.float32 else x

    def cast_var(hparams: Any, x: Any) -> Any:
        return x if base_layer.var_disallow_bfloat16_conversion(hparams) else cast(x)

    return jax.tree.map(cast_var, var_weight_hparams, mdl_vars), jax.tree.map(cast, inputs)


def _floats_to_float32(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, tree)


def _flatten_summaries(summaries: Any) -> dict[str, jax.Array]:
    """Returns {'layer/sub/name_scalar': array} for the nested summaries that flax collected."""
    leaves = jax.tree_util.tree_leaves_with_path(summaries)
    return {
        "/".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path): value for path, value in leaves
    }
