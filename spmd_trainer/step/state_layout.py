"""Makes the initial train state, and the `VariableSpec` (shape, dtype, sharding, padding) of each of its arrays.

`build` evaluates the initialization abstractly. Initialization uses only logical shapes; it does not depend on mesh, padding or
devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import optax
from absl import logging
from jax.sharding import Mesh, PartitionSpec
from praxis import base_layer, optimizers, py_utils

from spmd_trainer import sharding
from spmd_trainer.errors import did_you_mean
from spmd_trainer.models.base import ModuleModel
from spmd_trainer.sharding.path_rules import Strategy
from spmd_trainer.sharding.variables import VariableSpec, make_variable_spec, path_str
from spmd_trainer.step import host_states, masks, matrix_dims, mup, opt_state_dtypes, optax_bridge, step_fns
from spmd_trainer.step.layout import LogicalLayout
from spmd_trainer.step.opt_state_dtypes import CODES, Bytes
from spmd_trainer.train_states import NestedJTensor, NestedShapeDtypeStruct, NestedWeightHParams, PyTree, TrainState

if TYPE_CHECKING:
    from spmd_trainer.tasks_lib import SingleTask

# VariableSpecs, in the structure of the variables or of the train state.
NestedVariableSpec: TypeAlias = PyTree
# A `Plan` decides the sharding of every variable: (task and WeightHParams of its variables, mesh) -> VariableSpecs.
Result = TypeVar("Result")
Plan: TypeAlias = Callable[[LogicalLayout, Mesh], NestedVariableSpec]
DECLARED = "declared"
NOT_DECLARED = "replicated: no split mapping; task.train.sharding_strategy=[...] gives one"
# Prefix of the variables' paths in the train state and the sharding report. A strategy's rules match paths without this prefix.
_REPORT_PREFIX = "mdl_vars/"


def build(
    task: SingleTask,
    init_variables: Callable[[jax.Array], NestedJTensor],
    inputs_shape_dtype: NestedShapeDtypeStruct,
    mesh: Mesh,
    plan: Plan | None = None,
) -> tuple[NestedWeightHParams, TrainState]:
    """Returns the WeightHParams of all variables, and the VariableSpec (sharding, padding, reason) of each train state array.

    A variable has the spec that its layer declares. If the layer declares none, `task.train.sharding_strategy` decides;
    without a strategy the variable is replicated. Optimizer states are sharded like their variable, and adapters (`task.lora`)
    like the weight to which they are added.

    Args:
      task: the built task.
      init_variables: `variables_initialiser` of the task.
      inputs_shape_dtype: ShapeDtypeStructs of the global batch.
      mesh: the device mesh.
      plan: a function that decides the sharding of every variable, instead of layers and strategy.

    Returns:
      The variables' WeightHParams, and a TrainState of VariableSpecs.

    Raises:
      ValueError: a declared mapping doesn't fit its variable or the mesh, or the strategy is invalid.
    """
    host_states.check_devices(task, mesh)
    if task.lora is None:
        # The context mesh stays unset here: with it, praxis' circular pipelines refuse their own sharding constraints.
        layout = LogicalLayout(task, abstract_hparams(init_variables))
        hparams, reasons = _planned(layout, mesh, plan)
    else:
        hparams, reasons = _with_adapters(task, init_variables, mesh, plan)
    if task.learner.sees_stacks:
        hparams = _of_program(task, hparams, inputs_shape_dtype, mesh, matrix_dims.with_uses)
    if task.mup is not None:
        base = abstract_hparams(variables_initialiser(mup.base_task(task), inputs_shape_dtype))
        uses = _of_program(task, hparams, inputs_shape_dtype, mesh, matrix_dims.find_uses)
        hparams = mup.with_scales(task, hparams, base, uses)
    layout = LogicalLayout(task, hparams)
    logical = jax.eval_shape(
        functools.partial(create_train_state, layout),
        jax.tree.map(lambda p: jax.ShapeDtypeStruct(tuple(p.full_shape), p.dtype), hparams),
    )
    grad_tx, excluded = grad_transformation(layout)
    masked_hparams = masks.mask_out(hparams, excluded)
    known = functools.partial(_of_program, task, hparams, inputs_shape_dtype, mesh, matrix_dims.with_uses)
    notes = _matrix_notes(task, masked_hparams, logical.opt_states, lambda: masks.mask_out(known(), excluded))
    masked_vars = masks.mask_out(logical.mdl_vars, excluded)
    opt_state_dtypes.warn_of_unused_rules(task.learner, grad_tx.init, masked_vars)
    host_states.warn_if_at_once(task.learner, masked_hparams)
    opt_hparams = _unmask(grad_tx.init_partition_spec(masked_hparams))
    specs = TrainState(
        step=PartitionSpec(),
        mdl_vars=jax.tree.map(functools.partial(_declared_spec, mesh), hparams),
        opt_states=[jax.tree.map(functools.partial(_declared_spec, mesh), opt_hparams)],
        extra_state=(),
    )
    why = TrainState(
        step="replicated: a scalar",
        mdl_vars=reasons,
        opt_states=[_opt_reasons(opt_hparams, hparams, notes)],
        extra_state=(),
    )

    records = jax.tree_util.tree_map_with_path(
        functools.partial(_record, dict(mesh.shape)), logical, specs, why, is_leaf=lambda leaf: isinstance(leaf, Bytes)
    )
    return hparams, jax.tree.map(
        lambda v: dataclasses.replace(v, memory_kind=host_states.memory_kind(task.learner, v)), records
    )


def _matrix_notes(
    task: SingleTask,
    hparams: NestedWeightHParams,
    opt_states: PyTree,
    with_uses: Callable[[], NestedWeightHParams],
) -> dict[str, str]:
    """Returns texts for the sharding report about a `MatrixOptimizer`'s variables. If the optimizer is optax' Muon, checks it.

    Args:
      task: the task.
      hparams: WeightHParams of the variables that are trained.
      opt_states: the optimizer states.
      with_uses: returns the WeightHParams with notes on each variable's use (`matrix_dims.with_uses`).

    Returns:
      {end of the path of a first moment: text} from `matrix_dims.log_choices`; empty without a `MatrixOptimizer`.

    Raises:
      ValueError: the task uses muP and optax' Muon.
    """
    if task.learner.sees_stacks:
        return matrix_dims.log_choices(task.learner.optimizer, hparams)
    if matrix_dims.has_optax_muon(opt_states):
        if task.mup is not None:
            raise ValueError(
                "task.mup: its multipliers are not those of optax.contrib.muon; use st.Muon, which muP knows"
            )
        matrix_dims.check_optax_muon(with_uses(), opt_states)
    return {}


def _record(
    mesh_shape: Mapping[str, int], keys: tuple[Any, ...], leaf: Any, spec: PartitionSpec, reason: str
) -> VariableSpec | Bytes:
    if not isinstance(leaf, Bytes):
        return make_variable_spec(path_str(keys), leaf.shape, leaf.dtype, spec, mesh_shape, reason)
    values = leaf.codes_8bit
    codes = make_variable_spec(path_str(keys) + CODES, values.shape, values.dtype, spec, mesh_shape, reason)
    return Bytes(codes, opt_state_dtypes.scale_spec(codes), leaf.signed)


def variables_initialiser(
    task: SingleTask, inputs_shape_dtype: NestedShapeDtypeStruct
) -> Callable[[jax.Array], NestedJTensor]:
    """Returns a function that initializes the model's variables at logical (unpadded) shapes.

    The function is jitted, so that computing shapes first and values later traces the model only once.

    Args:
      task: the built task.
      inputs_shape_dtype: ShapeDtypeStructs of the global batch.

    Returns:
      PRNG key -> variables. If a layer declares WeightHParams, its variable is a praxis BoxedParam that holds them.
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
    """Returns the initial train state for variables of logical shapes; usable under `jax.eval_shape`."""
    if not with_opt_states:
        return TrainState.create(mdl_vars, [])
    grad_tx, excluded = grad_transformation(layout)
    opt_state = opt_state_dtypes.initial(layout.task.learner, grad_tx.init, masks.mask_out(mdl_vars, excluded))
    return TrainState.create(mdl_vars, [opt_state])


def grad_transformation(
    layout: LogicalLayout,
) -> tuple[optimizers.ShardedGradientTransformation, PyTree]:
    """Returns the learner's gradient transformation, and a tree of bools: True for variables without an optimizer state."""
    hparams, learner = layout.var_weight_hparams, layout.task.learner
    excluded = masks.get_excluded_var_mask_for_opt(hparams, learner)
    return learner.get_grad_tx(masks.mask_out(hparams, excluded)), excluded


def _planned(layout: LogicalLayout, mesh: Mesh, plan: Plan | None) -> tuple[NestedWeightHParams, PyTree]:
    """Returns the WeightHParams with each variable's final split mapping, and a tree with the reason for each mapping."""
    hparams, strategy = layout.var_weight_hparams, layout.task.train.sharding_strategy
    reasons = jax.tree.map(_reason, hparams)
    if plan is not None:
        return _apply_plan(plan(layout, mesh), hparams, reasons, mesh, also_declared=True)
    if strategy is None:
        return hparams, reasons
    # Rules see a repeated layer's variable in the shape for one layer. So the same rules serve with and without repetition, and
    # the dimension of the layers, which a loop runs over, is never split by accident.
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(tuple(p.shape), p.dtype), hparams)
    planned = sharding.plan_sharding(shapes, strategy, mesh)
    _check_rules(strategy, shapes)
    return _apply_plan(planned, hparams, reasons, mesh, also_declared=False)


def _with_adapters(
    task: SingleTask, init_variables: Callable[[jax.Array], NestedJTensor], mesh: Mesh, plan: Plan | None
) -> tuple[NestedWeightHParams, PyTree]:
    """Like `_planned`, for a model with adapters: plans the base model without them, and shards each adapter like its weight.

    Raises:
      ValueError: `task.lora.rank_axis` is not an axis of the mesh.
    """
    from spmd_trainer.decoder import lora  # here, because models without adapters don't need the decoder package

    with lora.traced_on(mesh):
        hparams = abstract_hparams(init_variables)
    names = tuple(map(str, mesh.axis_names))
    for axis in task.lora.rank_axes:
        if axis not in names:
            raise ValueError(
                f"task.lora.rank_axis is {axis!r}, and the mesh has the axes {names}{did_you_mean(axis, names)}"
            )
    base, reasons = _planned(LogicalLayout(task, lora.base_only(hparams)), mesh, plan)
    return task.lora_model.split_like_base(hparams, base, reasons)


def _of_program(
    task: SingleTask,
    hparams: NestedWeightHParams,
    inputs_shape_dtype: NestedShapeDtypeStruct,
    mesh: Mesh,
    read: Callable[[NestedWeightHParams, Callable[[NestedJTensor], Any]], Result],
) -> Result:
    """Returns the result of `read`, which analyzes how the model uses its variables (see `matrix_dims.find_uses`). `read` gets
    `hparams`, and the model's training forward pass as a function of the variables."""

    def forward(mdl_vars: NestedJTensor) -> Any:
        inputs = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), inputs_shape_dtype)
        layout = LogicalLayout(task, hparams)
        return step_fns.forward(layout, mdl_vars, jax.random.key(0), inputs, do_eval=False)

    # Modules of other libraries may name the mesh's axes; praxis asks for its mesh itself.
    is_module = isinstance(task.model, ModuleModel)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh) if is_module else contextlib.nullcontext():
        return read(hparams, forward)


def _check_rules(strategy: Strategy, variables: PyTree) -> None:
    """Warns about each rule of a sharding strategy that matches no variable.

    Raises:
      ValueError: a rule that matches no variable contains 'mdl_vars/', a prefix that paths have only in the sharding report.
    """
    paths = [path for path, _ in masks.with_paths(variables)]
    for number, (regex, _) in enumerate(strategy, start=1):
        if any(re.search(regex, path) for path in paths):
            continue
        problem = f"task.train.sharding_strategy: rule {number} ({regex!r}) matches no variable"
        if _REPORT_PREFIX in regex:
            raise ValueError(
                f"{problem}. Rules are matched against paths without the report's {_REPORT_PREFIX!r}, e.g. {paths[0]}; write "
                f"{regex.replace(_REPORT_PREFIX, '')!r}"
            )
        logging.warning("%s; paths are %s", problem, masks.paths_text(variables))


def _reason(hparams: base_layer.WeightHParams) -> str:
    mapping = hparams.tensor_split_dims_mapping
    return DECLARED if mapping is not None and not _all_whole(mapping) else NOT_DECLARED


def _opt_reasons(opt_hparams: NestedWeightHParams, hparams: NestedWeightHParams, notes: Mapping[str, str]) -> PyTree:
    """Returns the reason for the sharding of each array of an optimizer state.

    `notes` is {end of an array's path: text to append to the array's reason}.
    """
    variables = dict(jax.tree_util.tree_leaves_with_path(hparams))

    def reason(path: tuple[Any, ...], part: base_layer.WeightHParams) -> str:
        note = next((text for end, text in notes.items() if path_str(path).endswith(end)), None)
        return of_layout(path, part) if note is None else f"{of_layout(path, part)}; {note}"

    def of_layout(path: tuple[Any, ...], part: base_layer.WeightHParams) -> str:
        own, shape = optax_bridge.variable_of(path, variables), tuple(part.full_shape)
        variable_shape = None if own is None else tuple(variables[own].full_shape)
        if not _all_whole(part.full_split_dims_mapping):
            is_like = variable_shape is None or shape == variable_shape
            return "follows its variable" if is_like else "split over the axes of its variable"
        if not shape:
            return "replicated: a scalar"
        if own is None:
            return "replicated: it belongs to no variable, or to several"
        if shape == variable_shape:
            return "replicated: as its variable"
        return f"replicated: its shape {shape} is not {variable_shape}, that of its variable"

    return jax.tree_util.tree_map_with_path(reason, opt_hparams)


def _all_whole(mapping: Sequence[Any]) -> bool:
    return all(entry in (None, -1) for entry in mapping)


def _declared_spec(mesh: Mesh, hparams: base_layer.WeightHParams) -> PartitionSpec:
    return sharding.to_partition_spec(hparams.full_split_dims_mapping, mesh.axis_names)


def _unmask(opt_hparams: NestedWeightHParams) -> NestedWeightHParams:
    """Removes the MaskedState wrappers that praxis adds to the WeightHParams of an optimizer state but not to the state."""
    return jax.tree.map(
        lambda x: x.inner_state if isinstance(x, optax.MaskedState) else x,
        opt_hparams,
        is_leaf=lambda x: isinstance(x, optax.MaskedState),
    )


def _apply_plan(
    planned: NestedVariableSpec, hparams: NestedWeightHParams, reasons: PyTree, mesh: Mesh, *, also_declared: bool
) -> tuple[NestedWeightHParams, PyTree]:
    """Returns the WeightHParams with the planned split mappings, and the reasons for each variable's mapping.

    A variable with a declared mapping keeps it, unless `also_declared` is True. If the plan omits the repeated dimensions of a
    repeated layer's variable, these dimensions keep the declared mapping.
    """

    def merge(p: base_layer.WeightHParams, reason: str, plan: VariableSpec) -> tuple[base_layer.WeightHParams, str]:
        if reason != NOT_DECLARED and not also_declared:
            return p, reason
        entries = tuple(plan.spec) + (None,) * (len(plan.logical_shape) - len(plan.spec))
        planned_repeats = len(entries) - len(p.shape)
        repeats = p.repeat_prefix_split_dims_mapping
        # Kept as declared if possible, because praxis names the optimizer states of repeated layers after it.
        if p.repeat_prefix is not None and repeats is None:
            repeats = (None,) * len(p.repeat_prefix)
        elif planned_repeats and not _all_whole(repeats):
            repeats = entries[:planned_repeats]
        p = dataclasses.replace(
            p,
            mesh_shape=tuple(mesh.shape.values()),
            tensor_split_dims_mapping=entries[planned_repeats:],
            repeat_prefix_split_dims_mapping=repeats,
        )
        return p, plan.reason

    pairs = jax.tree.map(merge, hparams, reasons, planned)
    first = jax.tree.map(lambda pair: pair[0], pairs, is_leaf=lambda x: isinstance(x, tuple))
    second = jax.tree.map(lambda pair: pair[1], pairs, is_leaf=lambda x: isinstance(x, tuple))
    return first, second
