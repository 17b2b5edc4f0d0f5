"""From gradients to new variables: which variables learn, clipping, skipped steps, the optimizer.

Names and behaviour are Pax's. A learner works on trees in which variables that don't learn are masked out
(`step_fns.exclude`); the optimizer may be any praxis optimizer, or a plain optax transformation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from praxis import asserts, base_hyperparams, base_layer, optimizers, pax_fiddle
from praxis import optimizer_prefix_vectorization as opt_vec

from spmd_trainer import optax_optimizer
from spmd_trainer.variable_masks import mask_out, matches, paths_text, with_paths

SCALAR = base_layer.SummaryType.AGGREGATE_SCALAR


class Learner(base_hyperparams.FiddleBaseParameterizable):
    """Turns gradients of one loss into updates of the variables.

    Attributes:
      optimizer: a praxis optimizer, an optax GradientTransformation, or a config of either.
      loss_name: name of the loss among the model's outputs.
      grad_norm_summary: summarise the global gradient norm, before and after clipping and as applied.
      grad_norm_individual_vars: summarise each variable's gradient norm.
      var_norm_summary: summarise the norm over all variables.
      var_norm_individual_vars: summarise each variable's norm.
      check_valid_step: look for NaN, Inf and norms above `skip_step_gradient_norm_value`.
      vectorize_on_repeat_prefix: treat the layers of a repeated (stacked) variable as separate variables.
      force_repeat_prefix_structure: give optimizer states the stacked structure even where no layer is repeated.
      skip_step_gradient_norm_value: skip a step whose gradient norm reaches this value; 0 for no such limit.
      enable_skip_step_on_gradient_anomalies: skip a step found invalid: variables and optimizer state stay as they were.
      bprop_variable_exclusion: regexes; variables whose whole path matches one don't learn.
      bprop_variable_inclusion: regexes; only variables whose whole path matches one learn. Give one of the two.
      repeat_prefix_sep: stands between dimensions in the keys of stacked optimizer states.
      keep_optimizer_state_for_excluded_vars: keep optimizer states also of variables that don't learn.
      scale_update_by_var_norm: scale each update by the variable's initial magnitude.
    """

    optimizer: Any = None
    loss_name: str | None = None
    grad_norm_summary: bool = True
    grad_norm_individual_vars: bool = False
    var_norm_summary: bool = True
    var_norm_individual_vars: bool = False
    check_valid_step: bool = True
    vectorize_on_repeat_prefix: bool = True
    force_repeat_prefix_structure: bool = False
    skip_step_gradient_norm_value: float = 0.0
    enable_skip_step_on_gradient_anomalies: bool = True
    bprop_variable_exclusion: str | Sequence[str] = pax_fiddle.instance_field(default_factory=list)
    bprop_variable_inclusion: str | Sequence[str] = pax_fiddle.instance_field(default_factory=list)
    repeat_prefix_sep: str = "#"
    keep_optimizer_state_for_excluded_vars: bool = False
    scale_update_by_var_norm: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer is None:
            raise ValueError("task.train.learner.optimizer is not set; e.g. pax_fiddle.Config(optimizers.Adam, ...)")
        self.optimizer = optax_optimizer.as_optimizer(self.optimizer)
        if self.bprop_variable_inclusion and self.bprop_variable_exclusion:
            raise ValueError(
                "the learner has both bprop_variable_inclusion and bprop_variable_exclusion; give the one that is shorter"
            )
        if self.force_repeat_prefix_structure and not self.vectorize_on_repeat_prefix:
            raise ValueError("force_repeat_prefix_structure needs vectorize_on_repeat_prefix=True")

    # --- the transformation -----------------------------------------------------------------------------------------

    def raw_grad_tx(self, var_weight_hparams: Any) -> Any:
        """Returns the optimizer's gradient transformation, before the layers of stacked variables are told apart."""
        return optax_optimizer.with_partition_spec(self.optimizer.get_grad_transformation(var_weight_hparams))

    def get_grad_tx(self, var_weight_hparams: Any) -> Any:
        """Returns the gradient transformation for variables of these WeightHParams; it has `init_partition_spec`."""
        grad_tx = self.raw_grad_tx(var_weight_hparams)
        if not self.vectorize_on_repeat_prefix:
            return grad_tx
        return opt_vec.get_transformations_with_vectorized_repeat_prefix(
            grad_tx,
            var_weight_hparams,
            self.repeat_prefix_sep,
            force_prefix_structure=self.force_repeat_prefix_structure,
        )

    def plot_learning_rate(self, step: jax.Array) -> None:
        """Summarises the learning rate of this step."""
        rate = self.optimizer.get_learning_rate(step)
        if rate is not None:
            base_layer.add_global_summary("learning/lr", jnp.asarray(rate), SCALAR)

    # --- one step ---------------------------------------------------------------------------------------------------

    def update_states(self, grads: Any, states: Any, old_vars: Any, var_weight_hparams: Any) -> tuple[Any, Any]:
        """Transforms gradients into updates.

        Args:
          grads: gradients; same structure as `old_vars`.
          states: the optimizer state.
          old_vars: the variables, those that don't learn masked out.
          var_weight_hparams: their WeightHParams.

        Returns:
          The updates to add, and the new optimizer state. In a skipped step the updates are zero and the state is the
          old one.
        """
        overwrites = jax.tree.map(base_layer.var_overwrite_with_gradient, var_weight_hparams)
        # A gradient that overwrites its variable (fp8 scales) is no gradient to an optimizer.
        masked_vars, masked_hparams, masked_grads = (
            mask_out(tree, overwrites) for tree in (old_vars, var_weight_hparams, grads)
        )
        masked_grads, valid = self.scale_gradients(masked_grads)
        updates, new_states = self.get_grad_tx(masked_hparams).update(masked_grads, states, masked_vars)
        if self.enable_skip_step_on_gradient_anomalies and self.check_valid_step:
            updates = jax.tree.map(lambda x: jnp.where(valid, x, jnp.zeros_like(x)), updates)
            new_states = jax.tree.map(lambda new, old: jnp.where(valid, new, old), new_states, states)
        if self.grad_norm_summary:
            base_layer.add_global_summary("learning/applied_grad_norm", global_norm(updates), SCALAR)
        return jax.tree.map(lambda o, raw, x: raw if o else x, overwrites, grads, updates), new_states

    def scale_gradients(self, raw_grads: Any, optimizer_name: str | None = None) -> tuple[Any, jax.Array]:
        """Clips gradients as the learner's optimizer asks, and judges the step.

        Args:
          raw_grads: gradients.
          optimizer_name: stands in the summaries' names when a learner has several optimizers.

        Returns:
          The clipped gradients, and a bool scalar: is the step valid?
        """
        return self._scale(raw_grads, self.optimizer, f"{optimizer_name}/" if optimizer_name else "")

    def _scale(self, raw_grads: Any, optimizer: Any, label: str) -> tuple[Any, jax.Array]:
        clip, clip_single = optimizer.clip_gradient_norm_to_value, optimizer.clip_gradient_single_norm_to_value
        if clip and clip_single:
            raise ValueError(
                "the optimizer has both clip_gradient_norm_to_value and clip_gradient_single_norm_to_value; set one"
            )
        if self.grad_norm_individual_vars:
            _summarize_norms(f"per_var_grad_norm/{label}".rstrip("/"), raw_grads)
        norm = global_norm(raw_grads)
        valid = jnp.array(True)
        if self.check_valid_step:
            valid = jnp.isfinite(norm)
            if self.skip_step_gradient_norm_value:
                valid &= norm < self.skip_step_gradient_norm_value
            base_layer.add_global_summary(f"learning/{label}is_valid_step", valid.astype(jnp.float32), SCALAR)
        scale = jnp.ones((), norm.dtype)
        grads = raw_grads
        if clip:
            scale = jnp.minimum(1.0, clip / norm)
            grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), raw_grads)
        elif clip_single:
            grads = jax.tree.map(
                lambda g: g * jnp.minimum(1.0, clip_single / global_norm(g)).astype(g.dtype), raw_grads
            )
        if self.grad_norm_summary:
            for name, value in (
                ("raw_grad_norm", norm),
                ("grad_scale", scale),
                ("clipped_grad_norm", norm * scale if clip else global_norm(grads) if clip_single else norm),
            ):
                base_layer.add_global_summary(f"learning/{label}{name}", value, SCALAR)
        return grads, valid

    def apply_gradient(self, old_vars: Any, transformed_grads: Any, var_weight_hparams: Any) -> Any:
        """Adds updates to the variables; non-trainable ones stay.

        Args:
          old_vars: the variables, those that don't learn masked out.
          transformed_grads: what `update_states` returned; same structure.
          var_weight_hparams: WeightHParams; same structure.
        """
        asserts.assert_same_structure(old_vars, transformed_grads)
        if self.var_norm_summary:
            base_layer.add_global_summary("learning/var_norm", global_norm(old_vars), SCALAR)
        if self.var_norm_individual_vars:
            _summarize_norms("per_var_norm", old_vars)

        def apply(hparams: Any, old: jax.Array, update: jax.Array) -> jax.Array:
            if base_layer.var_not_trainable(hparams):
                return old
            if base_layer.var_overwrite_with_gradient(hparams):
                return update
            if self.scale_update_by_var_norm and len(hparams.shape) > 1:
                update = update * base_layer.var_init_scale(hparams)
            return old + update

        return jax.tree.map(apply, var_weight_hparams, old_vars, transformed_grads)


class MultiOptimizerLearner(Learner):
    """A learner with further optimizers for the variables that their regexes select.

    Attributes:
      auxiliary_optimizers: the further optimizers.
      auxiliary_regex: for each of them, the regex that a variable's whole path must match.
      auxiliary_names: for each of them, its name in summaries and optimizer states.
      apply_separate_scaling: clip and judge each optimizer's gradients by themselves.
    """

    auxiliary_optimizers: Sequence[Any] = pax_fiddle.instance_field(default_factory=list)
    auxiliary_regex: Sequence[str] = pax_fiddle.instance_field(default_factory=list)
    auxiliary_names: Sequence[str] = pax_fiddle.instance_field(default_factory=list)
    apply_separate_scaling: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = {len(self.auxiliary_optimizers), len(self.auxiliary_regex), len(self.auxiliary_names)}
        if len(counts) != 1 or 0 in counts:
            raise ValueError(
                "MultiOptimizerLearner needs equally many auxiliary_optimizers, auxiliary_regex and auxiliary_names, one or "
                f"more; they are {len(self.auxiliary_optimizers)}, {len(self.auxiliary_regex)} and {len(self.auxiliary_names)}"
            )
        self.auxiliary_optimizers = [optax_optimizer.as_optimizer(optimizer) for optimizer in self.auxiliary_optimizers]

    def plot_learning_rate(self, step: jax.Array) -> None:
        """Summarises each optimizer's learning rate."""
        super().plot_learning_rate(step)
        for name, optimizer in zip(self.auxiliary_names, self.auxiliary_optimizers, strict=True):
            rate = optimizer.get_learning_rate(step)
            if rate is not None:
                base_layer.add_global_summary(f"learning/lr_{name}", jnp.asarray(rate), SCALAR)

    def masks(self, tree: Any) -> list[Any]:
        """Returns one tree of bools per optimizer, the main one first: the variables that it updates.

        Raises:
          ValueError: a regex selects nothing, or two select the same variable.
        """
        chosen = [matches(tree, [regex]) for regex in self.auxiliary_regex]
        for regex, mask in zip(self.auxiliary_regex, chosen, strict=True):
            if not any(jax.tree.leaves(mask)):
                raise ValueError(f"auxiliary_regex {regex!r} selects no variable; they are {paths_text(tree)}")
        count = jax.tree.map(lambda *selected: sum(selected), *chosen)
        twice = [path for path, n in with_paths(count) if n > 1]
        if twice:
            raise ValueError(
                f"several of auxiliary_regex {list(self.auxiliary_regex)} select {twice[0]}; make them disjoint"
            )
        return [jax.tree.map(lambda n: n == 0, count), *chosen]

    def raw_grad_tx(self, var_weight_hparams: Any) -> Any:
        """Returns the chain of all optimizers, each masked to its variables."""
        all_optimizers = [self.optimizer, *self.auxiliary_optimizers]
        parts = []
        for optimizer, mask in zip(all_optimizers, self.masks(var_weight_hparams), strict=True):
            grad_tx = optax_optimizer.with_partition_spec(optimizer.get_grad_transformation(var_weight_hparams))
            parts.append(optimizers.sharded_masked(grad_tx, mask))
        return optimizers.sharded_chain(*parts)

    def scale_gradients(self, raw_grads: Any, optimizer_name: str | None = None) -> tuple[Any, jax.Array]:
        """As `Learner.scale_gradients`; with `apply_separate_scaling` each optimizer's gradients by themselves."""
        if not self.apply_separate_scaling:
            return super().scale_gradients(raw_grads, optimizer_name)
        names = ["main", *self.auxiliary_names]
        scaled, valid = raw_grads, jnp.array(True)
        for name, optimizer, mask in zip(
            names, [self.optimizer, *self.auxiliary_optimizers], self.masks(raw_grads), strict=True
        ):
            others = jax.tree.map(lambda m: not m, mask)
            part, part_valid = self._scale(mask_out(raw_grads, others), optimizer, f"{name}/")
            scaled = jax.tree.map(lambda m, new, old: new if m else old, mask, part, scaled)
            valid &= part_valid
        return scaled, valid


# --- norms and averages --------------------------------------------------------------------------------------------------


def global_norm(tree: Any) -> jax.Array:
    """Returns the L2 norm over all leaves, float32 scalar."""
    return jnp.sqrt(sum((jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)), jnp.zeros(())))


def _summarize_norms(prefix: str, tree: Any) -> None:
    for path, leaf in with_paths(tree):
        base_layer.add_global_summary(f"{prefix}/{path}", global_norm(leaf), SCALAR)


def has_ema(learner: Learner) -> bool:
    """Whether the learner's optimizer keeps moving averages of the variables."""
    return bool(learner.optimizer.ema_decay)


def extract_ema(opt_states: Any, mdl_vars: Any) -> Any:
    """Returns the moving averages that praxis' optimizers keep, as model variables.

    Args:
      opt_states: a train state's `opt_states`, logical or padded.
      mdl_vars: the current variables; those without an average keep their value.

    Raises:
      ValueError: the optimizer state holds no averages.
    """
    found: list[Any] = []
    _collect_ema(opt_states, found)
    if not found:
        raise ValueError("the optimizer state holds no EMA; set ema_decay on the learner's optimizer")
    averages = {path: leaf for tree in found for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    leaves, treedef = jax.tree_util.tree_flatten_with_path(mdl_vars)
    return jax.tree.unflatten(treedef, [averages.get(path, leaf) for path, leaf in leaves])


def _collect_ema(node: Any, found: list[Any]) -> None:
    """Finds every `ema` entry below a node of the optimizer state."""
    if isinstance(node, Mapping):
        for key, child in node.items():
            if key == "ema":
                found.append(child)
            else:
                _collect_ema(child, found)
    elif isinstance(node, tuple | list):
        for child in node:
            _collect_ema(child, found)
    elif dataclasses.is_dataclass(node):
        for field in dataclasses.fields(node):
            _collect_ema(getattr(node, field.name), found)
