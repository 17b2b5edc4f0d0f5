"""The base class of optimizers that update whole matrices (`muon.Muon`, `soap.Soap`) and use Adam for all other variables.

The traced model shows which variables are matrices (`matrix_dims`), so the optimizers work for models of any library. A warning
names the variables for which the trace is ambiguous; the user can set rules for these. The optimizers compute on whole matrices,
which are distributed over all devices (`whole_matrices`). Their states are sharded like the variables.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from praxis import base_layer, optimizers, py_utils

from spmd_trainer import sharding
from spmd_trainer.errors import UserError, require_one_of
from spmd_trainer.step import masks, matrix_dims
from spmd_trainer.step.matrix_dims import Choice, Matrix
from spmd_trainer.train_states import NestedJTensor, NestedWeightHParams, PyTree


class MatrixVariable(NamedTuple):
    """The arrays of one variable that holds matrices, in a training step.

    Attributes:
      grad: the variable's gradient.
      parts: {name: array}, the variable's optimizer state.
      value: the variable itself; None if the optimizer isn't given variables.
      matrix: the variable's row, column and stack dimensions.
      spec: PartitionSpec of gradient and variable on the ambient mesh.
    """

    grad: jax.Array
    parts: Mapping[str, jax.Array]
    value: jax.Array | None
    matrix: Matrix
    spec: PartitionSpec

    def decayed(self, step: jax.Array, decay: float) -> jax.Array:
        """Returns `step` plus `decay` times the variable (decoupled weight decay)."""
        return _decayed(step, self.value, decay)


class MatrixOptimizer(optimizers.BaseOptimizer):  # type: ignore[misc]  # untyped
    """An optimizer for the matrices of a model, with Adam for all other variables.

    The learning rate of all variables is `learning_rate` times the schedule, unless `adam_learning_rate` sets a different rate
    for Adam's variables. Clipping, moving averages and `decoupled_weight_decay` work as in all praxis optimizers.

    A subclass defines `matrix_state` and `matrix_steps`, and `more_parts` if its state has more arrays than `m` and `v`.

    Attributes:
      heads: 'joined': all heads of an attention kernel form one matrix. 'apart': each head is a matrix, if heads have their own
        dimension. A kernel with a single dimension for all heads and their columns stays whole, and a warning names it.
      rules: (regex, form) pairs, which override what the traced model shows. The first pair whose regex is found in a variable's
        path applies. The form is 'adam', or lists a role for each dimension, without those of repeated layers, such as
        'stack,rows,cols'. The roles are 'rows' (inputs), 'cols' (outputs) and 'stack' (a separate matrix for each index).
      weight_decay: weight decay of matrices: each step subtracts learning rate * weight_decay * variable.
      adam_learning_rate: Adam's learning rate before the schedule multiplies it; None for `learning_rate`.
      adam_beta1, adam_beta2, adam_epsilon: Adam's hyperparameters b1, b2 and eps, as in optax.
      adam_weight_decay: weight decay of Adam's variables, except those that skip regularization, such as norms and biases.
    """

    # The optimizer itself handles the stacked variables of repeated layers, so `Learner` doesn't map it over the layers.
    sees_stacks: ClassVar[bool] = True
    # Names of the state's arrays in addition to `m` and `v`.
    more_parts: ClassVar[tuple[str, ...]] = ()

    heads: str = "joined"
    rules: Sequence[tuple[str, str]] = ()
    weight_decay: float = 0.0
    adam_learning_rate: float | None = None
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_epsilon: float = 1e-8
    adam_weight_decay: float = 0.0
    _var_weight_hparams: Any = dataclasses.field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        """Checks the fields.

        Raises:
          UserError: a field has an unknown value, or two fields contradict each other.
        """
        super().__post_init__()
        name = type(self).__name__
        require_one_of(f"{name}.heads", self.heads, matrix_dims.HEADS)
        if self.decoupled_weight_decay and (self.weight_decay or self.adam_weight_decay):
            raise UserError(
                f"{name} has decoupled_weight_decay, which is of all variables, and weight_decay or adam_weight_decay; set either"
            )
        matrix_dims.check_rules(self.rules, f"{name}.rules")

    def matrix_state(self, x: jax.Array, matrix: Matrix) -> dict[str, jax.Array]:
        """Returns the initial state of a variable that holds matrices, as {name: array}. Usable under `jax.eval_shape`."""
        raise NotImplementedError

    def matrix_steps(
        self, given: Mapping[str, MatrixVariable], count: jax.Array
    ) -> dict[str, tuple[jax.Array, dict[str, jax.Array]]]:
        """Returns {path: (step, new state arrays by name)}. The step includes weight decay, but not the learning rate.

        Args:
          given: the variables that hold matrices, by path; at least one.
          count: int32 scalar, the number of training steps before this one.
        """
        raise NotImplementedError

    def part_hparams(self, var_weight_hparams: NestedWeightHParams) -> dict[str, base_layer.WeightHParams]:
        """Returns {'array name/variable path': WeightHParams} of the state arrays that don't have their variable's shape."""
        return {}

    def notes(self, choices: Mapping[str, Choice]) -> str:
        """Returns text to log after the table of the variables' `choices`; may be empty."""
        return ""

    def size(self, rows: float, cols: float) -> float:
        """Returns the size (spectral norm) of the update of a [rows, cols] matrix. muP compares the sizes at two widths.

        Raises:
          UserError: the subclass doesn't define the size.
        """
        raise UserError(
            f"task.mup: no rule is known for the updates of {type(self).__name__} at other widths; use e.g. Adam or st.Muon"
        )

    def get_grad_transformation(
        self, var_weight_hparams: NestedWeightHParams = None, include_ema: bool = True
    ) -> optimizers.ShardedGradientTransformation:
        """Returns the gradient transformation for these variables; `include_ema=False` omits the moving averages."""
        own = copy.copy(self)
        own._var_weight_hparams = var_weight_hparams
        return super(MatrixOptimizer, own).get_grad_transformation(var_weight_hparams, include_ema)

    def choices(self, var_weight_hparams: NestedWeightHParams) -> dict[str, Choice]:
        """Returns {path: `Choice`}: whether each variable holds matrices. Errors as in `matrix_dims.choose`."""
        return matrix_dims.choose(var_weight_hparams, self.rules, self.heads, type(self).__name__)

    def _get_raw_grad_transformation(self, lr: optax.Schedule) -> optax.GradientTransformation:
        if self._var_weight_hparams is None:
            name = type(self).__name__
            raise UserError(
                f"{name} has to know the variables' WeightHParams, which the optimizer around it doesn't pass on; make {name} "
                "the learner's optimizer itself, and accumulate gradients with num_minibatches"
            )
        return optax.GradientTransformation(self._init, functools.partial(self._update, lr))

    def _init(self, mdl_vars: NestedJTensor) -> py_utils.NestedMap:
        """Returns the initial state: a step count, and a tree for each array name (MaskedNode if a variable lacks the array)."""
        choices = self.choices(self._var_weight_hparams)
        treedef, states = jax.tree.structure(mdl_vars), []
        for path, x in masks.with_paths(mdl_vars):
            matrix = choices[path].matrix
            adam = {"m": jnp.zeros_like(x), "v": jnp.zeros_like(x)}
            states.append(adam if matrix is None else self.matrix_state(x, matrix))
        return py_utils.NestedMap(
            count=jnp.zeros((), jnp.int32),
            **{
                name: jax.tree.unflatten(treedef, [state.get(name, optax.MaskedNode()) for state in states])
                for name in ("m", "v", *self.more_parts)
            },
        )

    def _update(
        self, rate: optax.Schedule, grads: NestedJTensor, state: Any, mdl_vars: NestedJTensor = None
    ) -> tuple[PyTree, Any]:
        count = state.count
        choices, hparams = self.choices(self._var_weight_hparams), dict(masks.with_paths(self._var_weight_hparams))
        olds = {name: dict(masks.with_paths(state[name])) for name in ("m", "v", *self.more_parts)}
        paths = [path for path, _ in masks.with_paths(grads)]
        values = jax.tree.leaves(mdl_vars) if mdl_vars is not None else itertools.repeat(None, len(paths))
        axes = jax.sharding.get_abstract_mesh().axis_names
        matrices: dict[str, MatrixVariable] = {}
        updates: dict[str, jax.Array] = {}
        news: dict[str, dict[str, jax.Array]] = {}
        for path, g, value in zip(paths, jax.tree.leaves(grads), values, strict=True):
            parts = {name: old[path] for name, old in olds.items() if path in old}
            if (matrix := choices[path].matrix) is None:
                step, news[path] = self._adam(g, parts, value, count, hparams[path])
                updates[path] = -self._adam_rate(rate, count) * step
                continue
            mapping = hparams[path].full_split_dims_mapping
            spec = sharding.to_partition_spec(mapping if axes else (None,) * g.ndim, axes)
            matrices[path] = MatrixVariable(g, parts, value, matrix, spec)
        if matrices:
            for path, (step, parts) in self.matrix_steps(matrices, count).items():
                updates[path], news[path] = -rate(count) * step, parts
        new_parts = {
            name: jax.tree.unflatten(jax.tree.structure(state[name]), [news[path][name] for path in old])
            for name, old in olds.items()
        }
        in_order = [updates[path] for path in paths]
        return jax.tree.unflatten(jax.tree.structure(grads), in_order), type(state)(count=count + 1, **new_parts)

    def _adam(
        self,
        g: jax.Array,
        old: Mapping[str, jax.Array],
        value: jax.Array | None,
        count: jax.Array,
        hparams: base_layer.WeightHParams,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns Adam's step, with weight decay but without the learning rate, and the new state arrays by name."""
        steps = (count + 1).astype(jnp.float32)
        m = (self.adam_beta1 * old["m"] + (1 - self.adam_beta1) * g).astype(old["m"].dtype)
        v = self.adam_beta2 * old["v"] + (1 - self.adam_beta2) * jnp.square(g)
        root = jnp.sqrt(v / (1 - self.adam_beta2**steps))
        step = m / (1 - self.adam_beta1**steps) / (root + self.adam_epsilon)
        decay = 0.0 if base_layer.var_skip_lp_regularization(hparams) else self.adam_weight_decay
        return _decayed(step, value, decay), {"m": m, "v": v}

    def _adam_rate(self, rate: optax.Schedule, count: jax.Array) -> jax.Array:
        own = self.adam_learning_rate
        found: jax.Array = rate(count) if own is None else self._lr_schedule_inst.value_at(count) * own
        return found


def _decayed(step: jax.Array, value: jax.Array | None, decay: float) -> jax.Array:
    if not decay:
        return step
    if value is None:
        raise ValueError("weight decay needs the variables; call update(gradients, state, variables)")
    return step + decay * value
