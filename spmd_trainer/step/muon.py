"""Muon: updates a model's matrices by momentum orthogonalized with Newton-Schulz iterations, and all other variables by Adam.

    learner.optimizer = Config(st.Muon, learning_rate=3e-4, lr_schedule=..., weight_decay=0.1)

Muon was published by Jordan et al. (https://kellerjordan.github.io/posts/muon/). The scaling of updates to the size of Adam's is
from Liu et al. 2025 (arXiv:2502.16982). The momentum, its bias correction and Nesterov's form are those of `optax.contrib.muon`.

See `matrix_optimizer` for how the matrices are chosen and on which devices the iterations run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from spmd_trainer.errors import UserError, require_one_of
from spmd_trainer.kernels import chips
from spmd_trainer.step import whole_matrices
from spmd_trainer.step.matrix_dims import Matrix
from spmd_trainer.step.matrix_optimizer import MatrixOptimizer, MatrixVariable
from spmd_trainer.step.whole_matrices import Matrices

# (a, b, c) of X <- a X + (b A + c A A) X with A = X X', for each iteration. The last of a list serves all further iterations.
# Polar Express: Amsel et al. 2025 (arXiv:2505.16932, algorithm 1); all its polynomials except the last are for X / 1.01.
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


class Muon(MatrixOptimizer):
    """Muon for matrices, Adam for all other variables.

    See `MatrixOptimizer` for how the matrices are chosen, and for Adam's fields.

    Attributes:
      momentum: decay of the moving average of gradients.
      nesterov: use Nesterov momentum.
      num_iterations: number of Newton-Schulz iterations.
      coefficients: 'polar_express', 'keller' (the same quintic in each iteration), or a list with (a, b, c) for each iteration;
        the last entry is used for all further iterations.
      scale: the factor by which the orthogonalized momentum is multiplied. 'match_rms': 0.2 * sqrt(max(rows, columns)). Updates
        then have the root mean square of Adam's updates, so a learning rate and weight decay tuned for Adam suit Muon too.
        'original': sqrt(max(1, columns / rows)), where columns are the matrix's outputs.
      epsilon: added to the Frobenius norm by which a matrix is divided before the iterations.
      iteration_dtype: dtype of the iterations and of the arrays that are communicated for them: 'float32' or 'bfloat16'. None:
        float32 on CPUs, bfloat16 on other devices.
    """

    momentum: float = 0.95
    nesterov: bool = True
    num_iterations: int = 5
    coefficients: str | Sequence[Sequence[float]] = "polar_express"
    scale: str = "match_rms"
    epsilon: float = 1e-8
    iteration_dtype: str | None = None

    def __post_init__(self) -> None:
        """Checks the fields. Errors as in `MatrixOptimizer.__post_init__`."""
        super().__post_init__()
        require_one_of("Muon.scale", self.scale, SCALES)
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

    def size(self, rows: float, cols: float) -> float:
        """Returns the size (spectral norm) of a [rows, cols] matrix's update. All its singular values are close to this size."""
        if self.scale == "match_rms":
            return _ADAM_RMS * math.sqrt(max(rows, cols))
        return math.sqrt(max(1.0, cols / rows))

    def matrix_state(self, x: jax.Array, matrix: Matrix) -> dict[str, jax.Array]:
        """Returns {'m': zeros for the moving average of gradients}. See `MatrixOptimizer.matrix_state`."""
        return {"m": jnp.zeros_like(x)}

    def matrix_steps(
        self, given: Mapping[str, MatrixVariable], count: jax.Array
    ) -> dict[str, tuple[jax.Array, dict[str, jax.Array]]]:
        """Returns Muon's steps, in the dtypes of the gradients' averages. See `MatrixOptimizer.matrix_steps`."""
        on_host = chips.current_target().platform == "cpu"
        dtype = jnp.dtype(self.iteration_dtype or ("float32" if on_host else "bfloat16"))
        means, arrays = [], []
        for x in given.values():
            old = x.parts["m"]
            means.append((self.momentum * old + (1 - self.momentum) * x.grad).astype(old.dtype))
            arrays.append(Matrices(self._looking_ahead(means[-1], x.grad, count), x.matrix.dims, x.spec))
        found = whole_matrices.apply(
            lambda x: orthogonalized(x, self.coefficients, self.num_iterations, self.epsilon), arrays, dtype
        )
        steps = {}
        for (path, x), ahead, y, m in zip(given.items(), arrays, found, means, strict=True):
            step = y.astype(ahead.array.dtype) * self.size(*x.matrix.sides)
            steps[path] = x.decayed(step, self.weight_decay), {"m": m}
        return steps

    def _looking_ahead(self, m: jax.Array, g: jax.Array, count: jax.Array) -> jax.Array:
        """Returns the bias-corrected momentum to orthogonalize, with Nesterov's look-ahead if `nesterov` is set."""
        beta, steps = self.momentum, (count + 1).astype(jnp.float32)
        if not self.nesterov:
            return m / (1 - beta**steps)
        return beta * m / (1 - beta ** (steps + 1)) + (1 - beta) * g / (1 - beta**steps)


def orthogonalized(
    x: jax.Array, coefficients: str | Sequence[Sequence[float]], num_iterations: int, epsilon: float = 1e-8
) -> jax.Array:
    """Returns the matrix with orthonormal rows that is nearest to `x`, approximated by Newton-Schulz iterations.

    Args:
      x: matrices [..., m, n] with m <= n, in the dtype of the iterations. Rows and columns of zeros stay zero.
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
