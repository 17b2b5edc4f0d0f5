"""SOAP: updates a model's matrices by Adam in the eigenbases of Shampoo's preconditioners, and other variables by plain Adam.

    learner.optimizer = Config(st.Soap, learning_rate=3e-3, lr_schedule=..., weight_decay=0.01)

Published by Vyas et al. 2024 (arXiv:2409.11321, algorithm 3), with code (https://github.com/nikhilvyas/SOAP).

See `matrix_optimizer` for how the matrices are chosen and on which devices their updates are computed.

Each matrix's update is computed whole, on one device, in float32. So equal gradients give equal updates on all meshes, up to
the rounding of products. But gradients differ between meshes by rounding, and bases amplify these differences where eigenvalues
are nearly equal, because eigenvectors of equal eigenvalues are arbitrary. For the first gradient G [m, n], m < n, G' G (G' is G
transposed) has at most m nonzero eigenvalues, so n - m vectors of the first basis of the longer side are arbitrary. Until the
averages have full rank, losses on two meshes are equally good, but may differ by more than rounding.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from praxis import base_layer

from spmd_trainer.errors import UserError
from spmd_trainer.sharding.specs import entry_axes
from spmd_trainer.step import masks, whole_matrices
from spmd_trainer.step.matrix_dims import Choice, Matrix
from spmd_trainer.step.matrix_optimizer import MatrixOptimizer, MatrixVariable
from spmd_trainer.step.opt_state_dtypes import BASIS_COLS, BASIS_ROWS, GRAM_COLS, GRAM_ROWS
from spmd_trainer.step.whole_matrices import Family, Matrices
from spmd_trainer.train_states import NestedWeightHParams

# Average and basis [N, m, m] of one side of a batch of matrices; () for a side that isn't rotated.
_Side: TypeAlias = tuple[jax.Array, ...]


class Soap(MatrixOptimizer):
    """SOAP for matrices, Adam for all other variables.

    See `MatrixOptimizer` for how the matrices are chosen, and for Adam's fields. A matrix with gradient G is updated by minus
    the learning rate times QL N QR'. QL and QR are the eigenvectors (bases) of the moving averages of G G' and G' G (G' is G
    transposed), and N is Adam's step for the rotated gradient QL' G QR. Adam's first moment is stored unrotated, its second
    moment rotated. Bases are updated every `precondition_frequency` steps, with one power iteration and a QR decomposition.

    As in the published code, the first step only initializes averages and bases and does not change matrices, so that no gradient
    is rotated into its own basis. Bases are replaced at the end of a step. Unlike the published code, epsilon is added to the
    root of the second moment after bias correction, as in optax' Adam.

    The state has `m` and `v` of the variable's shape, `gram_rows` and `basis_rows` [*stacks, rows, rows], and `gram_cols` and
    `basis_cols` [*stacks, columns, columns]. Eigenvectors are the columns of `basis_rows`, and the rows of `basis_cols`.

    Attributes:
      beta1, beta2: decays of the first and second moment of matrices.
      shampoo_beta: decay of the averages of G G' and G' G; None for `beta2`.
      epsilon: added to the root of the second moment.
      precondition_frequency: number of training steps between two replacements of the bases.
      max_precond_dim: sides (rows or columns) longer than this are not rotated, and have neither average nor basis.
    """

    more_parts = (GRAM_ROWS, GRAM_COLS, BASIS_ROWS, BASIS_COLS)

    beta1: float = 0.95
    beta2: float = 0.95
    shampoo_beta: float | None = None
    epsilon: float = 1e-8
    precondition_frequency: int = 10
    max_precond_dim: int = 10_000

    def __post_init__(self) -> None:
        """Checks the fields. Errors as in `MatrixOptimizer.__post_init__`."""
        super().__post_init__()
        for name in ("beta1", "beta2", "shampoo_beta"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise UserError(f"Soap.{name} is {value!r}; it is at least 0 and less than 1, usually 0.95")
        for name, usual in (("precondition_frequency", 10), ("max_precond_dim", 10_000)):
            value = getattr(self, name)
            if not isinstance(value, numbers.Integral) or value < 1:
                raise UserError(f"Soap.{name} is {value!r}; it is a whole number of at least 1, usually {usual}")
        if not self.epsilon >= 0:
            raise UserError(f"Soap.epsilon is {self.epsilon!r}; it is at least 0, usually 1e-8")

    def matrix_state(self, x: jax.Array, matrix: Matrix) -> dict[str, jax.Array]:
        """Returns zeros for moments and preconditioners. See `MatrixOptimizer.matrix_state`."""
        squares = {name: jnp.zeros(shape, jnp.float32) for name, shape in self._squares(matrix).items()}
        return {"m": jnp.zeros_like(x), "v": jnp.zeros_like(x), **squares}

    def part_hparams(self, var_weight_hparams: NestedWeightHParams) -> dict[str, base_layer.WeightHParams]:
        """Returns WeightHParams of preconditioners, sharded over their variable's axes. See `MatrixOptimizer.part_hparams`."""
        found, choices = {}, self.choices(var_weight_hparams)
        for path, p in masks.with_paths(var_weight_hparams):
            if (matrix := choices[path].matrix) is None:
                continue
            axes = [entry_axes(entry) for entry in p.full_split_dims_mapping]
            mapping = [over or None for over in whole_matrices.square_axes(matrix.dims, axes)]
            for name, shape in self._squares(matrix).items():
                found[f"{name}/{path}"] = base_layer.WeightHParams(
                    shape, dtype=jnp.float32, tensor_split_dims_mapping=mapping
                )
        return found

    def notes(self, choices: Mapping[str, Choice]) -> str:
        """Returns text for the log: the bytes of the preconditioners, and the variables with unrotated sides."""
        matrices = {path: choice.matrix for path, choice in choices.items() if choice.matrix}
        elements = sum(math.prod(shape) for matrix in matrices.values() for shape in self._squares(matrix).values())
        text = f"\n{4 * elements:,} bytes of float32 preconditioners, over all devices together, besides two moments"
        long = [path for path, matrix in matrices.items() if max(matrix.sides) > self.max_precond_dim]
        return text + (
            f"\nsides longer than max_precond_dim={self.max_precond_dim} aren't rotated: {long}" if long else ""
        )

    def matrix_steps(
        self, given: Mapping[str, MatrixVariable], count: jax.Array
    ) -> dict[str, tuple[jax.Array, dict[str, jax.Array]]]:
        """Returns SOAP's steps. See `MatrixOptimizer.matrix_steps`."""
        firsts, arrays = [], []
        for x in given.values():
            old, (rows, cols) = x.parts, (size <= self.max_precond_dim for size in x.matrix.sides)
            mean = (self.beta1 * old["m"] + (1 - self.beta1) * x.grad).astype(old["m"].dtype)
            firsts.append(jnp.where(count > 0, mean, old["m"]))
            companions = Family(
                (firsts[-1], old["v"]),
                (old[GRAM_ROWS], old[BASIS_ROWS]) if rows else (),
                (old[GRAM_COLS], old[BASIS_COLS]) if cols else (),
            )
            arrays.append(Matrices(x.grad, x.matrix.dims, x.spec, companions))
        found = whole_matrices.apply_to_families(
            functools.partial(self._step, count), arrays, jnp.float32, num_arrays=2
        )
        steps = {}
        for (path, x), m, of_one in zip(given.items(), firsts, found, strict=True):
            step, v = (y.astype(x.parts["v"].dtype) for y in of_one.arrays)
            new = {"m": m, "v": v}
            for names, side in (((GRAM_ROWS, BASIS_ROWS), of_one.of_rows), ((GRAM_COLS, BASIS_COLS), of_one.of_cols)):
                new |= dict(zip(names, side, strict=False))
            decayed = x.decayed(step, self.weight_decay)
            steps[path] = jnp.where(count > 0, decayed, jnp.zeros_like(decayed)), new
        return steps

    def _step(self, count: jax.Array, batch: Family) -> Family:
        """Computes SOAP's step for a batch of whole matrices of equal shape.

        Args:
          count: int32 scalar, the number of training steps before this one.
          batch: `arrays` are gradient, first moment and second moment [N, m, n] of N matrices. `of_rows` and `of_cols` are the
            average and the basis of that side; they are empty if the side is not rotated.

        Returns:
          `arrays` are the step and the new second moment. `of_rows` and `of_cols` are the new averages and bases.
        """
        steps = jnp.maximum(count, 1).astype(jnp.float32)
        (g, m, v), rows, cols = batch.arrays, batch.of_rows, _transposed(batch.of_cols)
        rotated = _rotated(g, rows, cols)
        v = jnp.where(count > 0, self.beta2 * v + (1 - self.beta2) * jnp.square(rotated), v)
        mean, second = _rotated(m, rows, cols) / (1 - self.beta1**steps), v / (1 - self.beta2**steps)
        step = _rotated(mean / (jnp.sqrt(second) + self.epsilon), _transposed(rows), _transposed(cols))
        rows, cols = self._averaged(rows, g), self._averaged(cols, g.mT)
        # 0: keeps the bases, 1: makes the first bases, 2: replaces the bases.
        kind = jnp.where(count == 0, 1, jnp.where(count % self.precondition_frequency == 0, 2, 0))
        v, rows, cols = lax.switch(kind, [lambda *x: x, _first, _replaced], v, rows, cols)
        return Family((step, v), rows, _transposed(cols))

    def _averaged(self, side: _Side, g: jax.Array) -> _Side:
        if not side:
            return side
        beta = self.beta2 if self.shampoo_beta is None else self.shampoo_beta
        return beta * side[0] + (1 - beta) * _product(g, g.mT), side[1]

    def _squares(self, matrix: Matrix) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the preconditioners of a variable, by name."""
        stack = [matrix.shape[dim] for dim in matrix.dims.stack]
        named = zip(matrix.sides, ((GRAM_ROWS, BASIS_ROWS), (GRAM_COLS, BASIS_COLS)), strict=True)
        return {name: (*stack, size, size) for size, names in named if size <= self.max_precond_dim for name in names}


def _first(v: jax.Array, rows: _Side, cols: _Side) -> tuple[jax.Array, _Side, _Side]:
    """Returns the second moment `v` unchanged, and both sides with their first bases.

    A basis is the eigenvectors of a side's averaged Gram matrix, in descending order of eigenvalues.
    """
    rows, cols = (side and (side[0], jnp.flip(jnp.linalg.eigh(side[0])[1], axis=-1)) for side in (rows, cols))
    return v, rows, cols


def _replaced(v: jax.Array, rows: _Side, cols: _Side) -> tuple[jax.Array, _Side, _Side]:
    """Updates the bases with one power iteration, and reorders the second moment `v` like the new basis vectors."""
    rows, v = _iterated(rows, v)
    cols, turned = _iterated(cols, v.mT)
    return turned.mT, rows, cols


def _iterated(side: _Side, v: jax.Array) -> tuple[_Side, jax.Array]:
    """Returns `side` with a new basis, and the second moment `v` [N, m, n] with its rows reordered like the basis vectors."""
    if not side:
        return side, v
    gram, basis = side
    power = _product(gram, basis)
    order = jnp.argsort(-jnp.sum(basis * power, axis=-2), axis=-1)
    new, _ = jnp.linalg.qr(jnp.take_along_axis(power, order[:, None, :], axis=-1))
    return (gram, new), jnp.take_along_axis(v, order[:, :, None], axis=-2)


def _rotated(x: jax.Array, rows: _Side, cols: _Side) -> jax.Array:
    """Returns QL' x QR, with the bases QL of `rows` and QR of `cols`; a side without a basis is not rotated."""
    x = _product(rows[1].mT, x) if rows else x
    return _product(x, cols[1]) if cols else x


def _transposed(side: _Side) -> _Side:
    return tuple(x.mT for x in side)


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)
