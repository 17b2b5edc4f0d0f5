"""Learners turn gradients into new variables: they clip gradients, skip invalid steps, run an optimizer and keep moving averages.

Names and behavior are those of Pax. A learner works on trees in which variables that are not trained are masked out
(`masks.mask_out`). The optimizer may be any praxis optimizer or a plain optax transformation. In a train step:

    learner.plot_learning_rate(step)
    with opt_state_dtypes.rounding_for(step):
        updates, new_opt_state = learner.update_states(grads, opt_state, mdl_vars, var_weight_hparams)
    new_vars = learner.apply_gradient(mdl_vars, updates, var_weight_hparams)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from praxis import asserts, base_hyperparams, base_layer, optimizers, pax_fiddle
from praxis import optimizer_prefix_vectorization as opt_vec

from spmd_trainer.errors import require_one_of
from spmd_trainer.step import host_states, mup, opt_state_dtypes, optax_bridge
from spmd_trainer.step.masks import mask_out, match_paths, paths_text, with_paths


class Learner(base_hyperparams.FiddleBaseParameterizable):  # type: ignore[misc]  # untyped
    """Turns the gradients of one loss into updates of the variables.

    Attributes:
      optimizer: a praxis optimizer, an optax GradientTransformation, or a config of either.
      loss_name: name of the loss among the model's outputs. None: 'loss', for models of `spmd_trainer.models` only.
      stochastic_gradient: must be None. In Pax, this field is for differentially private gradients, which are not supported.
      skip_zero_gradients: must be None. This field of Pax is not supported.
      grad_norm_summary: write summaries of the global gradient norm, before and after clipping, and of the norm of the updates.
      grad_norm_individual_vars: write a summary of each variable's gradient norm.
      var_norm_summary: write a summary of the norm over all variables.
      var_norm_individual_vars: write a summary of each variable's norm.
      check_valid_step: treat a step as invalid if its gradient norm is NaN, Inf or at least `skip_step_gradient_norm_value`.
      vectorize_on_repeat_prefix: treat the layers of a repeated (stacked) variable as separate variables.
      force_repeat_prefix_structure: give optimizer states the stacked structure even if no layer is repeated.
      skip_step_gradient_norm_value: skip a step whose gradient norm reaches this value; 0 for no limit.
      enable_skip_step_on_gradient_anomalies: skip invalid steps, which then change neither variables nor optimizer state.
      bprop_variable_exclusion: regexes. Variables whose whole path matches one of them (`re.fullmatch`) are not trained. Paths
        are written like 'params/lm/x_layers/0/w' or, as in Pax, 'params/lm/x_layers[0]/w'; see `masks.match_paths`.
      bprop_variable_inclusion: regexes, matched in the same way. If given, only variables that match one of them are trained.
        Set only one of `bprop_variable_exclusion` and `bprop_variable_inclusion`.
      repeat_prefix_sep: separator of the dimensions in the keys of stacked optimizer states.
      keep_optimizer_state_for_excluded_vars: also keep optimizer states for variables that are not trained.
      scale_update_by_var_norm: multiply the update of each variable of rank 2 or more by the scale of its initializer.
      opt_state_dtype: dtype in which float32 arrays of the optimizer state, such as moments, are stored between steps: 'float32',
        'bfloat16' or '8bit' (see `opt_state_dtypes`). Arrays with fewer than 4,096 elements stay float32. So do moving averages
        (`ema_decay`) and copies of variables, even if one of the rules matches. A resumed run may change this field.
      opt_state_dtype_rules: (regex, dtype) pairs that override `opt_state_dtype` for arrays of any size. The first pair whose
        regex is found in an array's path, such as 'no_prefix/v/params/lm/softmax/w', applies.
      opt_state_memory_kind: where the optimizer state is stored between steps: on the 'device', or in host memory
        ('pinned_host'). A step copies states from host memory layer by layer, see `host_states`. Small arrays and moving
        averages always stay on the device.
    """

    optimizer: Any = None
    loss_name: str | None = None
    stochastic_gradient: Any = None
    skip_zero_gradients: bool | str | None = None
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
    opt_state_dtype: str = opt_state_dtypes.FLOAT32
    opt_state_dtype_rules: Sequence[tuple[str, str]] = ()
    opt_state_memory_kind: str = host_states.DEVICE

    def __post_init__(self) -> None:
        super().__post_init__()
        opt_state_dtypes.check(self)
        require_one_of("opt_state_memory_kind", self.opt_state_memory_kind, host_states.MEMORY_KINDS)
        if self.optimizer is None:
            raise ValueError(
                "task.train.learner.optimizer is not set; e.g. pax_fiddle.Config(optimizers.Adam, ...). A task is made of its "
                "config: in task(), write Config(SingleTask, ...) instead of SingleTask(...), and set its fields"
            )
        self.optimizer = optax_bridge.as_optimizer(self.optimizer)
        if self.stochastic_gradient is not None:
            raise ValueError(
                f"task.train.learner.stochastic_gradient={self.stochastic_gradient!r:.80} is not supported: gradients are those "
                "of the mean loss over the batch; write your own training loop (partitioning.partition_spmd_model)"
            )
        if self.skip_zero_gradients is not None:
            raise ValueError(f"skip_zero_gradients={self.skip_zero_gradients!r} is not supported; leave it None")
        if self.bprop_variable_inclusion and self.bprop_variable_exclusion:
            raise ValueError(
                "the learner has both bprop_variable_inclusion and bprop_variable_exclusion; give the shorter one"
            )
        if self.force_repeat_prefix_structure and not self.vectorize_on_repeat_prefix:
            raise ValueError("force_repeat_prefix_structure needs vectorize_on_repeat_prefix=True")
        if self.force_repeat_prefix_structure and self.sees_stacks:
            name = type(self.optimizer).__name__
            raise ValueError(f"{name} sees stacked variables as they are; leave out force_repeat_prefix_structure")

    @property
    def sees_stacks(self) -> bool:
        """True if the optimizer gets stacked variables as a whole, not layer by layer; see `optax_bridge.sees_stacks`."""
        return optax_bridge.sees_stacks(self.optimizer)

    def raw_grad_tx(self, var_weight_hparams: Any) -> Any:
        """Returns the optimizer's gradient transformation, which sees a stacked variable as one variable."""
        return mup.grad_transformation(self.optimizer, var_weight_hparams)

    def get_grad_tx(self, var_weight_hparams: Any) -> Any:
        """Returns the gradient transformation for the variables that the WeightHParams describe.

        The transformation has `init(vars)`, `update(grads, state, vars)` and `init_partition_spec(hparams)`. The last returns
        WeightHParams in the structure of the state, wrapped in an `optax.MaskedState` as in Pax. If the model has repeated
        layers, state and WeightHParams are dicts with one entry for each group of variables with the same stack dimensions, and
        an entry 'no_prefix' for all other variables. Each entry of the WeightHParams then has its own `MaskedState`.
        """
        grad_tx = self.raw_grad_tx(var_weight_hparams)
        if not self.vectorize_on_repeat_prefix or self.sees_stacks:
            return grad_tx
        return opt_vec.get_transformations_with_vectorized_repeat_prefix(
            grad_tx,
            var_weight_hparams,
            self.repeat_prefix_sep,
            force_prefix_structure=self.force_repeat_prefix_structure,
        )

    def plot_learning_rate(self, step: jax.Array) -> None:
        """Writes a summary of the learning rate at `step`, an integer scalar, unless the optimizer hides its learning rate."""
        _summarize("learning/lr", self.optimizer.get_learning_rate(step))

    def update_states(self, grads: Any, states: Any, old_vars: Any, var_weight_hparams: Any) -> tuple[Any, Any]:
        """Transforms gradients into updates.

        If a subclass overrides this method and runs the optimizer itself, it needs `opt_state_dtype='float32'`, no
        `opt_state_dtype_rules`, and `opt_state_memory_kind='device'`. With other settings, `states` have a different form, and
        the override must call this method.

        Args:
          grads: gradients, same structure, shapes and dtypes as `old_vars`.
          states: the optimizer state as it is stored between steps; arrays in host memory are `HostPart`s.
          old_vars: the variables; those that are not trained are masked out.
          var_weight_hparams: the variables' WeightHParams, in the structure of `old_vars`.

        Returns:
          The updates to add, in the structure of `old_vars`, and the new optimizer state in its stored form. The random bits of
          its rounding are those of the step that was given to `opt_state_dtypes.rounding_for`. In a skipped step, the updates
          are zero and the state does not change. For a variable that is overwritten with its gradient (an fp8 scale), the
          update is the gradient.
        """
        overwrites = jax.tree.map(base_layer.var_overwrite_with_gradient, var_weight_hparams)
        # A gradient that overwrites its variable (fp8 scales) must not reach the optimizer.
        masked_vars, masked_hparams, masked_grads = (
            mask_out(tree, overwrites) for tree in (old_vars, var_weight_hparams, grads)
        )
        masked_grads, valid = self.scale_gradients(masked_grads)
        updates, new_states = host_states.update(self, masked_grads, states, masked_vars, masked_hparams, valid)
        if self.grad_norm_summary:
            _summarize("learning/applied_grad_norm", global_norm(updates))
        return jax.tree.map(lambda o, raw, x: raw if o else x, overwrites, grads, updates), new_states

    def if_valid(self, valid: jax.Array, updates: Any, new_states: Any, states: Any) -> tuple[Any, Any]:
        """Returns (zeros, states) if the step must be skipped, else (updates, new_states). `valid` is a bool scalar."""
        if not (self.enable_skip_step_on_gradient_anomalies and self.check_valid_step):
            return updates, new_states
        # Where `valid` is the value, it is 0. XLA would share a constant of zeros with the gradients' initial sums, and keep it.
        updates = jax.tree.map(lambda x: jnp.where(valid, x, valid.astype(x.dtype)), updates)
        return updates, jax.tree.map(lambda new, old: jnp.where(valid, new, old), new_states, states)

    def scale_gradients(self, raw_grads: Any, optimizer_name: str | None = None) -> tuple[Any, jax.Array]:
        """Clips gradients by the optimizer's settings, and checks whether the step is valid.

        Args:
          raw_grads: gradients.
          optimizer_name: added to the summaries' names, for a learner with several optimizers.

        Returns:
          The clipped gradients, and a bool scalar: True if the step is valid. With `check_valid_step`, a step is invalid if
          the norm over all gradients, before clipping, is NaN or Inf, or reaches `skip_step_gradient_norm_value`.
        """
        return self._scale(raw_grads, self.optimizer, f"{optimizer_name}/" if optimizer_name else "")

    def _scale(self, raw_grads: Any, optimizer: Any, label: str) -> tuple[Any, jax.Array]:
        clip, clip_single = optimizer.clip_gradient_norm_to_value, optimizer.clip_gradient_single_norm_to_value
        if self.grad_norm_individual_vars:
            _summarize_norms(f"per_var_grad_norm/{label}".rstrip("/"), raw_grads)
        norm = global_norm(raw_grads)
        valid = jnp.array(True)
        if self.check_valid_step:
            valid = jnp.isfinite(norm)
            if self.skip_step_gradient_norm_value:
                valid &= norm < self.skip_step_gradient_norm_value
            _summarize(f"learning/{label}is_valid_step", valid.astype(jnp.float32))
        scale = jnp.ones((), norm.dtype)
        grads, clipped_norm = raw_grads, norm
        if clip:
            scale = jnp.minimum(1.0, clip / norm)
            grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), raw_grads)
            clipped_norm = norm * scale
        elif clip_single:
            grads = jax.tree.map(
                lambda g: g * jnp.minimum(1.0, clip_single / global_norm(g)).astype(g.dtype), raw_grads
            )
            clipped_norm = global_norm(grads)
        if self.grad_norm_summary:
            _summarize(f"learning/{label}raw_grad_norm", norm)
            _summarize(f"learning/{label}grad_scale", scale)
            _summarize(f"learning/{label}clipped_grad_norm", clipped_norm)
        return grads, valid

    def apply_gradient(self, old_vars: Any, transformed_grads: Any, var_weight_hparams: Any) -> Any:
        """Adds updates to the variables; non-trainable variables keep their values.

        Args:
          old_vars: the variables; those that are not trained are masked out.
          transformed_grads: the updates from `update_states`, in the structure of `old_vars`.
          var_weight_hparams: the variables' WeightHParams, in the structure of `old_vars`.

        Returns:
          The new variables, in the dtypes of the old ones.
        """
        asserts.assert_same_structure(old_vars, transformed_grads)
        if self.var_norm_summary:
            _summarize("learning/var_norm", global_norm(old_vars))
        if self.var_norm_individual_vars:
            _summarize_norms("per_var_norm", old_vars)

        def apply(hparams: Any, old: jax.Array, update: jax.Array) -> jax.Array:
            if base_layer.var_not_trainable(hparams):
                return old
            if base_layer.var_overwrite_with_gradient(hparams):
                return update
            if self.scale_update_by_var_norm and len(hparams.shape) > 1:
                update = update * base_layer.var_init_scale(hparams)
            return (old + update).astype(old.dtype)

        return jax.tree.map(apply, var_weight_hparams, old_vars, transformed_grads)


class MultiOptimizerLearner(Learner):
    """A learner with auxiliary optimizers for variables selected by regexes. The field `optimizer` is for all other variables.

    `optimizer.ema_decay` sets the moving averages of all variables; an auxiliary optimizer's `ema_decay` has no effect.
    The clipping settings of auxiliary optimizers have an effect only with `apply_separate_scaling`.

    Attributes:
      auxiliary_optimizers: the auxiliary optimizers.
      auxiliary_regex: a regex for each auxiliary optimizer, such as 'params/lm/softmax' or '.*/bias'. It selects the variables
        whose path it matches from the beginning (`re.match`). Paths are written like `x_layers/0/w` or, as in Pax,
        `x_layers[0]/w` (see `masks.match_paths`). No variable may be selected twice.
      auxiliary_names: a name for each auxiliary optimizer, for summaries.
      apply_separate_scaling: clip each optimizer's gradients separately, with that optimizer's settings.
    """

    auxiliary_optimizers: Sequence[Any] = pax_fiddle.instance_field(default_factory=list)
    auxiliary_regex: Sequence[str] = pax_fiddle.instance_field(default_factory=list)
    auxiliary_names: Sequence[str] = pax_fiddle.instance_field(default_factory=list)
    apply_separate_scaling: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = [len(x) for x in (self.auxiliary_optimizers, self.auxiliary_regex, self.auxiliary_names)]
        if len(set(counts)) != 1:
            raise ValueError(
                "MultiOptimizerLearner needs equally many auxiliary_optimizers, auxiliary_regex and auxiliary_names; "
                f"they are {counts[0]}, {counts[1]} and {counts[2]}"
            )
        for regex in self.auxiliary_regex:
            try:
                re.compile(regex)
            except re.error as error:
                raise ValueError(f"auxiliary_regex {regex!r} doesn't compile: {error}") from error
        self.auxiliary_optimizers = [optax_bridge.as_optimizer(optimizer) for optimizer in self.auxiliary_optimizers]
        for name, optimizer in self._named_optimizers():
            if optax_bridge.sees_stacks(optimizer):
                raise ValueError(
                    f"MultiOptimizerLearner: the optimizer {name!r} is {type(optimizer).__name__}, which sees stacked variables "
                    "as they are and gives what is no matrix to Adam itself; make it the optimizer of a plain Learner, with rules"
                )

    def plot_learning_rate(self, step: jax.Array) -> None:
        """Writes each optimizer's learning rate as summary 'learning/lr_NAME', and that of `optimizer` also as 'learning/lr'."""
        super().plot_learning_rate(step)
        for name, optimizer in self._named_optimizers():
            _summarize(f"learning/lr_{name}", optimizer.get_learning_rate(step))

    def get_masks(self, var_weight_hparams: Any) -> tuple[list[Any], Any]:
        """Returns a list of the auxiliary optimizers' masks, and the mask of `optimizer`.

        A mask is a tree of bools, True for the variables that its optimizer updates.

        Args:
          var_weight_hparams: the variables' WeightHParams, or any other tree with the variables' structure.

        Raises:
          ValueError: a regex selects no variable, or two regexes select the same variable.
        """
        treedef = jax.tree.structure(var_weight_hparams)
        paths = [path for path, _ in with_paths(var_weight_hparams)]
        chosen = [match_paths(var_weight_hparams, regex, re.Pattern.match) for regex in self.auxiliary_regex]
        for regex, mask in zip(self.auxiliary_regex, chosen, strict=True):
            if not any(mask):
                known = paths_text(var_weight_hparams)
                raise ValueError(f"auxiliary_regex {regex!r} selects no variable that learns; paths are {known}")
        counts = [sum(mask[i] for mask in chosen) for i in range(len(paths))]
        if any(count > 1 for count in counts):
            twice = paths[next(i for i, count in enumerate(counts) if count > 1)]
            raise ValueError(
                f"more than one regex of auxiliary_regex={list(self.auxiliary_regex)} selects {twice}; make them disjoint"
            )
        auxiliary = [jax.tree.unflatten(treedef, mask) for mask in chosen]
        return auxiliary, jax.tree.unflatten(treedef, [count == 0 for count in counts])

    def raw_grad_tx(self, var_weight_hparams: Any) -> Any:
        """Returns the chain of all optimizers, each masked to its variables; moving averages come first if `ema_decay` is set."""
        auxiliary, main = self.get_masks(var_weight_hparams)
        parts = [optimizers.apply_ema_weights(self.optimizer.ema_decay)] if has_ema(self) else []
        for (_, optimizer), mask in zip(self._named_optimizers(), [main, *auxiliary], strict=True):
            grad_tx = mup.grad_transformation(optimizer, var_weight_hparams, include_ema=False)
            parts.append(optax_bridge.masked(grad_tx, mask))
        return optimizers.sharded_chain(*parts)

    def scale_gradients(self, raw_grads: Any, optimizer_name: str | None = None) -> tuple[Any, jax.Array]:
        """As `Learner.scale_gradients`; with `apply_separate_scaling`, clips each optimizer's gradients separately.

        A step is valid if it is valid for every optimizer.
        """
        if not self.apply_separate_scaling:
            return super().scale_gradients(raw_grads, optimizer_name)
        auxiliary, main = self.get_masks(raw_grads)
        scaled, valid = raw_grads, jnp.array(True)
        for (name, optimizer), mask in zip(self._named_optimizers(), [main, *auxiliary], strict=True):
            others = jax.tree.map(lambda m: not m, mask)
            part, part_valid = self._scale(mask_out(raw_grads, others), optimizer, f"{name}/")
            scaled = jax.tree.map(lambda m, new, old: new if m else old, mask, part, scaled)
            valid &= part_valid
        return scaled, valid

    def _named_optimizers(self) -> list[tuple[str, Any]]:
        auxiliary = zip(self.auxiliary_names, self.auxiliary_optimizers, strict=True)
        return [("main", self.optimizer), *auxiliary]


# --- norms and averages -----------------------------------------------------------------------------------------------


def global_norm(tree: Any) -> jax.Array:
    """Returns the L2 norm over all elements of all leaves, as a float32 scalar; 0 for an empty tree."""
    return jnp.sqrt(sum((jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)), jnp.zeros(())))


def _summarize(name: str, value: Any) -> None:
    """Adds a scalar to the step's summaries; does nothing if `value` is None or there is no praxis `JaxContext`."""
    if value is not None and base_layer.JaxContext.has_context():
        base_layer.add_global_summary(name, jnp.asarray(value), base_layer.SummaryType.AGGREGATE_SCALAR)


def _summarize_norms(prefix: str, tree: Any) -> None:
    for path, leaf in with_paths(tree):
        _summarize(f"{prefix}/{path}", global_norm(leaf))


def has_ema(learner: Learner) -> bool:
    """Returns True if the learner's optimizer keeps moving averages of the variables."""
    return bool(learner.optimizer.ema_decay > 0.0)
