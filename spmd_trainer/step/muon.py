"""Muon: momentum, orthogonalised by Newton-Schulz iterations, for a model's matrices; Adam for everything else.

    learner.optimizer = Config(st.Muon, learning_rate=3e-4, lr_schedule=..., weight_decay=0.1)

Published by Jordan et al. (https://kellerjordan.github.io/posts/muon/); the rule that gives updates the size of Adam's by Liu et
al. 2025 (arXiv:2502.16982). The mean of gradients, its bias correction and Nesterov's form are those of `optax.contrib.muon`.

What is a matrix is read from the model's program (`matrix_dims`), for models of any library. A warning says what the program
leaves open, and rules decide it.
The iterations run on whole matrices, divided over all devices (`whole_matrices`); moments live where their variables do.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from praxis import base_layer, optimizers, py_utils

from spmd_trainer import sharding
from spmd_trainer.errors import UserError, require_one_of
from spmd_trainer.kernels import chips
from spmd_trainer.step import masks, matrix_dims, whole_matrices
from spmd_trainer.step.matrix_dims import Choice
from spmd_trainer.step.whole_matrices import Matrices
from spmd_trainer.train_states import NestedJTensor, NestedWeightHParams, PyTree

# (a, b, c) of X <- a X + (b A + c A A) X with A = X X', for each iteration. The last of a list serves all further iterations.
# Polar Express: Amsel et al. 2025 (arXiv:2505.16932, algorithm 1), whose polynomials but the last are for X / 1.01.
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
_SAFETY = 1.01
COEFFICIENTS: dict[str, Sequence[tuple[float, float, float]]] = {
    "keller": ((3.4445, -4.7750, 2.0315),),
    "polar_express": (
        *((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR_EXPRESS[:-1]),
        _POLAR_EXPRESS[-1],
    ),
}
SCALES = ("match_rms", "original")
# Root mean square of Adam's updates, as Liu et al. found it.
_ADAM_RMS = 0.2


class Muon(optimizers.BaseOptimizer):  # type: ignore[misc]  # untyped
    """Muon for matrices, Adam for all other variables.

    The rate is `learning_rate` times the schedule for both, unless `adam_learning_rate` is set. Clipping, moving averages and
    `decoupled_weight_decay` are those of all praxis optimizers.

    Attributes:
      momentum: decay of the mean of gradients.
      nesterov: look ahead by one gradient.
      num_iterations: Newton-Schulz iterations.
      coefficients: 'polar_express', 'keller' (the same quintic in each iteration), or (a, b, c) for each iteration, of which
        the last serves all further ones.
      scale: size of an update. 'match_rms': that of Adam's, 0.2 * sqrt(max(rows, columns)) times the orthogonal matrix, so a rate
        and a decay of Adam serve both. 'original': sqrt(max(1, columns / rows)), where columns are outputs.
      heads: 'joined': attention's kernels are matrices of all heads; 'apart': of each head, where heads have a dimension of their
        own. Kernels with one dimension for heads and their columns stay whole, with a warning that names them.
      rules: (regex, form) pairs, which decide before what is found in the model's program. The first whose regex is found in a
        variable's path wins. The form is 'adam', or for each dimension of the variable, without those of repeated layers,
        'rows' (inputs), 'cols' (outputs) or 'stack', such as 'stack,rows,cols'.
      weight_decay: decay of matrices: each step takes off rate * weight_decay of them.
      epsilon: added to the norm that a matrix is divided by.
      iteration_dtype: of the iterations and of what is moved for them: 'float32' or 'bfloat16'; None: float32 on host devices,
        bfloat16 on others.
      adam_learning_rate: rate of Adam's variables, times the schedule; None for `learning_rate`.
      adam_beta1, adam_beta2, adam_epsilon: Adam's fields, as of optax.
      adam_weight_decay: decay of Adam's variables, but not of those that skip regularisation, such as norms and biases.
    """

    # `Learner` neither vectorises over repeated layers nor has to know of any: the optimizer sees stacks itself.
    sees_stacks = True

    momentum: float = 0.95
    nesterov: bool = True
    num_iterations: int = 5
    coefficients: str | Sequence[Sequence[float]] = "polar_express"
    scale: str = "match_rms"
    heads: str = "joined"
    rules: Sequence[tuple[str, str]] = ()
    weight_decay: float = 0.0
    epsilon: float = 1e-8
    iteration_dtype: str | None = None
    adam_learning_rate: float | None = None
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_epsilon: float = 1e-8
    adam_weight_decay: float = 0.0
    _var_weight_hparams: Any = dataclasses.field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        """Checks the fields.

        Raises:
          UserError: a field has a value that doesn't exist, or two contradict each other.
        """
        super().__post_init__()
        require_one_of("Muon.scale", self.scale, SCALES)
        require_one_of("Muon.heads", self.heads, matrix_dims.HEADS)
        if self.iteration_dtype is not None:
            require_one_of("Muon.iteration_dtype", self.iteration_dtype, ("float32", "bfloat16"))
        if isinstance(self.coefficients, str):
            require_one_of("Muon.coefficients", self.coefficients, tuple(COEFFICIENTS))
        elif not self.coefficients or any(len(numbers) != 3 for numbers in self.coefficients):
            raise UserError(
                f"Muon.coefficients is {self.coefficients!r}; give one of {tuple(COEFFICIENTS)}, or [(a, b, c), ...]"
            )
        if self.num_iterations < 1:
            raise UserError(f"Muon.num_iterations is {self.num_iterations}; it is at least 1, usually 5")
        if self.decoupled_weight_decay and (self.weight_decay or self.adam_weight_decay):
            raise UserError(
                "Muon has decoupled_weight_decay, which is of all variables, and weight_decay or adam_weight_decay; set either"
            )
        matrix_dims.check_rules(self.rules)

    def get_grad_transformation(
        self, var_weight_hparams: NestedWeightHParams = None, include_ema: bool = True
    ) -> optimizers.ShardedGradientTransformation:
        """Returns the transformation for variables of these WeightHParams, which say what is a matrix and how it is split."""
        own = copy.copy(self)
        own._var_weight_hparams = var_weight_hparams
        return super(Muon, own).get_grad_transformation(var_weight_hparams, include_ema)

    def choices(self, var_weight_hparams: NestedWeightHParams) -> dict[str, Choice]:
        """Returns what each variable is, by its path; see `matrix_dims.choose` for the errors."""
        return matrix_dims.choose(var_weight_hparams, self.rules, self.heads)

    def size(self, rows: float, cols: float) -> float:
        """Returns the size of the update of a matrix: its singular values are nearly this."""
        return _scale(self.scale, rows, cols)

    def _get_raw_grad_transformation(self, lr: optax.Schedule) -> optax.GradientTransformation:
        if self._var_weight_hparams is None:
            raise UserError(
                "Muon has to know the variables' WeightHParams, which the optimizer around it doesn't pass on; make Muon the "
                "learner's optimizer itself, and accumulate gradients with num_minibatches"
            )
        return optax.GradientTransformation(self._init, _Update(self, lr))

    def _is_matrix(self, tree: PyTree) -> PyTree:
        choices = self.choices(self._var_weight_hparams)
        return jax.tree_util.tree_map_with_path(
            lambda path, _: choices[sharding.variables.path_str(path)].dims is not None, tree
        )

    def _init(self, mdl_vars: NestedJTensor) -> py_utils.NestedMap:
        """The state: moments of the shapes of their variables. Matrices have no second one."""
        is_matrix = self._is_matrix(mdl_vars)
        return py_utils.NestedMap(
            count=jnp.zeros((), jnp.int32),
            m=jax.tree.map(jnp.zeros_like, mdl_vars),
            v=jax.tree.map(lambda x, whole: optax.MaskedNode() if whole else jnp.zeros_like(x), mdl_vars, is_matrix),
        )


@dataclasses.dataclass(frozen=True)
class _Update:
    """The update of a Muon with WeightHParams: (gradients, state, variables) -> (updates, new state)."""

    of: Muon
    rate: optax.Schedule

    def __call__(self, grads: NestedJTensor, state: Any, mdl_vars: NestedJTensor = None) -> tuple[PyTree, Any]:
        of, treedef, count = self.of, jax.tree.structure(grads), state.count
        choices, hparams = of.choices(of._var_weight_hparams), dict(masks.with_paths(of._var_weight_hparams))
        paths = [path for path, _ in masks.with_paths(grads)]
        moments: dict[str, jax.Array] = {}
        seconds: dict[str, jax.Array] = {}
        olds, news = dict(masks.with_paths(state.v)), {}
        for path, g, m in zip(paths, jax.tree.leaves(grads), jax.tree.leaves(state.m), strict=True):
            is_matrix = choices[path].dims is not None
            beta = of.momentum if is_matrix else of.adam_beta1
            moments[path] = (beta * m + (1 - beta) * g).astype(m.dtype)
            if is_matrix:
                seconds[path] = self._looking_ahead(moments[path], g, count)
            else:
                news[path] = of.adam_beta2 * olds[path] + (1 - of.adam_beta2) * jnp.square(g)
        orthogonal = self._orthogonal(seconds, choices, hparams)
        updates = []
        old_vars = jax.tree.leaves(mdl_vars) if mdl_vars is not None else itertools.repeat(None, len(paths))
        for path, var in zip(paths, old_vars, strict=True):
            if path in orthogonal:
                step, decay, rate = orthogonal[path], of.weight_decay, self.rate(count)
            else:
                step, rate = self._adam(moments[path], news[path], count), self._adam_rate(count)
                decay = 0.0 if base_layer.var_skip_lp_regularization(hparams[path]) else of.adam_weight_decay
            if decay:
                step = step + decay * var
            updates.append(-rate * step)
        new_v = jax.tree.unflatten(jax.tree.structure(state.v), [news[path] for path in olds])
        new_m = jax.tree.unflatten(treedef, [moments[path] for path in paths])
        return jax.tree.unflatten(treedef, updates), type(state)(count=count + 1, m=new_m, v=new_v)

    def _adam_rate(self, count: jax.Array) -> jax.Array:
        of = self.of
        if of.adam_learning_rate is None:
            return jnp.asarray(self.rate(count))
        return jnp.asarray(of._lr_schedule_inst.value_at(count) * of.adam_learning_rate)

    def _looking_ahead(self, m: jax.Array, g: jax.Array, count: jax.Array) -> jax.Array:
        """Returns what is made orthogonal; its size does not matter."""
        beta, steps = self.of.momentum, (count + 1).astype(jnp.float32)
        if not self.of.nesterov:
            return m / (1 - beta**steps)
        return beta * m / (1 - beta ** (steps + 1)) + (1 - beta) * g / (1 - beta**steps)

    def _adam(self, m: jax.Array, v: jax.Array, count: jax.Array) -> jax.Array:
        of, steps = self.of, (count + 1).astype(jnp.float32)
        root = jnp.sqrt(v / (1 - of.adam_beta2**steps))
        update: jax.Array = m / (1 - of.adam_beta1**steps) / (root + of.adam_epsilon)
        return update

    def _orthogonal(
        self, given: dict[str, jax.Array], choices: dict[str, Choice], hparams: dict[str, base_layer.WeightHParams]
    ) -> dict[str, jax.Array]:
        """Returns the steps of all matrices, in the dtype of what is given, without rate and decay."""
        if not given:
            return {}
        axes, of = jax.sharding.get_abstract_mesh().axis_names, self.of
        on_host = chips.current_target().platform == "cpu"
        dtype = jnp.dtype(of.iteration_dtype or ("float32" if on_host else "bfloat16"))
        arrays = []
        for path, x in given.items():
            dims, mapping = choices[path].dims, hparams[path].full_split_dims_mapping
            assert dims is not None
            spec = sharding.to_partition_spec(mapping if axes else (None,) * x.ndim, axes)
            arrays.append(Matrices(x, dims, spec))
        found = whole_matrices.apply(
            lambda x: orthogonalized(x, of.coefficients, of.num_iterations, of.epsilon), arrays, dtype
        )
        return {
            path: y.astype(x.dtype) * _scale(of.scale, *choices[path].sides)
            for (path, x), y in zip(given.items(), found, strict=True)
        }


def _scale(rule: str, rows: float, cols: float) -> float:
    return _ADAM_RMS * math.sqrt(max(rows, cols)) if rule == "match_rms" else math.sqrt(max(1.0, cols / rows))


def orthogonalized(
    x: jax.Array, coefficients: str | Sequence[Sequence[float]], num_iterations: int, epsilon: float = 1e-8
) -> jax.Array:
    """Returns nearly the nearest matrix with orthonormal rows, by Newton-Schulz iterations.

    Args:
      x: [..., m, n] with m <= n, in the dtype of the iterations. Rows and columns of zeros stay zero.
      coefficients, num_iterations, epsilon: see `Muon`.
    """
    numbers = COEFFICIENTS[coefficients] if isinstance(coefficients, str) else coefficients
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    norm = jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=(-2, -1), keepdims=True))
    safety = _SAFETY if coefficients == "polar_express" else 1.0
    x = (x / (norm * safety + epsilon)).astype(x.dtype)
    for number in range(num_iterations):
        a, b, c = numbers[min(number, len(numbers) - 1)]
        gram = jnp.einsum("...ij,...kj->...ik", x, x, precision=precision)
        poly = b * gram + c * jnp.matmul(gram, gram, precision=precision)
        x = a * x + jnp.matmul(poly, x, precision=precision)
    return x
