"""A layer of experts by `token_groups` and `grouped_dot`, the same layer computed densely, and arrays for both."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from spmd_trainer.kernels import token_groups
from spmd_trainer.kernels.grouped_dot import grouped_dot
from spmd_trainer.kernels.token_groups import TokenParts


@dataclasses.dataclass(frozen=True)
class Setting:
    """A layer's sizes, and how the tokens choose: 'any', 'few' (most experts are empty) or 'same' (all choose the same ones)."""

    experts: int
    top: int
    batch: int = 3
    length: int = 7
    width: int = 12
    hidden: int = 10
    chosen: str = "any"

    def arrays(self, seed):
        """Returns (x, chosen experts, their weights, gate, up, down)."""
        rng = np.random.default_rng(seed)
        likelihood = rng.normal(size=(self.batch, self.length, self.experts))
        preferred = {"any": 0, "few": self.top + 1, "same": self.top}[self.chosen]
        likelihood += 100.0 * np.isin(np.arange(self.experts), rng.permutation(self.experts)[:preferred])
        experts = np.argsort(-likelihood, axis=-1)[..., : self.top].astype(np.int32)

        def draw(*shape):
            return (0.3 * rng.normal(size=shape)).astype(np.float32)

        e, d, f = self.experts, self.width, self.hidden
        weights = np.abs(draw(self.batch, self.length, self.top))
        return draw(self.batch, self.length, d), experts, weights, draw(e, d, f), draw(e, d, f), draw(e, f, d)


def dense(x, experts, weights, gate, up, down):
    """Computes every expert for every token."""
    per_expert = jnp.einsum("btk,btke->bte", weights, jax.nn.one_hot(experts, gate.shape[0]))
    hidden = jax.nn.silu(jnp.einsum("btd,edf->btef", x, gate)) * jnp.einsum("btd,edf->btef", x, up)
    return jnp.einsum("btef,efd->btd", hidden * per_expert[..., None], down)


def sparse(x, experts, weights, gate, up, down, *, batch=(), length=(), over=(), embed=(), mlp=(), kernel=None):
    """Computes the chosen experts. Axes: of the batch, of the tokens, of the experts, and of the weights' dimensions."""
    parts = TokenParts.of(x, gate.shape[0], batch=batch, length=length, experts=over)
    groups = token_groups.sort(experts, parts)
    rows = token_groups.dispatch(x, groups, parts)

    def product(rows, w, *axes):
        split = parts.split(*axes)
        return grouped_dot(rows, w, groups.sizes, split=split, num_pairs=groups.num_pairs, kernel=kernel)

    hidden = jax.nn.silu(product(rows, gate, embed, mlp)) * product(rows, up, embed, mlp)
    return token_groups.combine(product(hidden, down, mlp, embed), weights, groups, parts)


@functools.lru_cache(maxsize=4)
def _compiled(layer):
    def loss(x, experts, *others):
        output = layer(x, experts, *others)
        return jnp.sum(output * jnp.cos(jnp.arange(output.size)).reshape(output.shape)), output

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 2, 3, 4, 5), has_aux=True))


def output_and_gradients(layer, *arrays):
    """Returns the layer's output, and the gradients of x, of the experts' weights and of the matrices."""
    (_, output), gradients = _compiled(layer)(*arrays)
    return [np.asarray(found) for found in (output, *gradients)]


def assert_equal(ours, theirs):
    """Asserts equality but for 1e-6 of the largest element of each array."""
    for found, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * max(1.0, np.abs(expected).max()))
