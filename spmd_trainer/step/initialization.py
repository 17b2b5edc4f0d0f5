"""The variables and the train state before the first step, at logical shapes: no mesh, no padding, no devices."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from praxis import base_layer, optimizers, py_utils

from spmd_trainer.optim import masks
from spmd_trainer.step import step_fns
from spmd_trainer.step.layout import LogicalLayout
from spmd_trainer.tasks_lib import SingleTask
from spmd_trainer.train_states import (
    NestedJTensor,
    NestedShapeDtypeStruct,
    NestedWeightHParams,
    PyTree,
    TrainState,
)


def variables_initialiser(
    task: SingleTask, inputs_shape_dtype: NestedShapeDtypeStruct
) -> Callable[[jax.Array], NestedJTensor]:
    """Returns the function that initialises the model's variables at their logical shapes.

    The function is jitted, so that asking for shapes first and for values later traces the model only once.

    Args:
      task: the built task.
      inputs_shape_dtype: ShapeDtypeStructs of the global batch.

    Returns:
      key -> the variables. Those whose layer declares WeightHParams are in a praxis BoxedParam with them.
    """
    do_eval = not task.train.always_use_train_for_model_init
    context = step_fns.model_context(task, do_eval=do_eval)

    def initialise(prng_key: jax.Array) -> NestedJTensor:
        inputs = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), inputs_shape_dtype)
        # praxis logs a line for each variable here.
        with py_utils.logging_verbosity_level("WARNING"), base_layer.JaxContext.new_context(hparams=context):
            _, inputs = step_fns.to_fprop_dtype(LogicalLayout(task, {}), {}, inputs)
            mdl_vars = task.model_for_steps.init_variables(prng_key, inputs)
        # Axis names of Flax modules' parameters: metadata, not variables.
        mdl_vars.pop("params_axes", None)
        return mdl_vars

    return jax.jit(initialise)


def abstract_hparams(init_variables: Callable[[jax.Array], NestedJTensor]) -> NestedWeightHParams:
    """Returns the WeightHParams of a model's variables; allocates nothing.

    Args:
      init_variables: from `variables_initialiser`.
    """
    hparams: NestedWeightHParams = base_layer.unbox_meta(
        jax.eval_shape(init_variables, jax.eval_shape(jax.random.key, 0))
    )
    return hparams


def create_train_state(layout: LogicalLayout, mdl_vars: NestedJTensor, *, with_opt_states: bool = True) -> TrainState:
    """Returns the state before the first step, for variables of logical shapes; usable under `jax.eval_shape`."""
    if not with_opt_states:
        return TrainState.create(mdl_vars, [])
    grad_tx, excluded = grad_transformation(layout)
    return TrainState.create(mdl_vars, [grad_tx.init(masks.mask_out(mdl_vars, excluded))])


def grad_transformation(
    layout: LogicalLayout,
) -> tuple[optimizers.ShardedGradientTransformation, PyTree]:
    """Returns the learner's gradient transformation, and a tree of bools: True for variables without an optimizer state."""
    hparams, learner = layout.var_weight_hparams, layout.task.learner
    excluded = masks.get_excluded_var_mask_for_opt(hparams, learner)
    return learner.get_grad_tx(masks.mask_out(hparams, excluded)), excluded
