"""A layer of experts by `token_groups` and `grouped_dot`, the same layer computed densely, and arrays for both."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from spmd_trainer.kernels import token_groups
from spmd_trainer.kernels.grouped_dot import grouped_dot
from spmd_trainer.kernels.token_groups import TokenParts
from spmd_trainer.planner import hlo_costs


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


# A layer of Qwen3-30B-A3B. No other dimension is as large as the length, or as the number of tokens.
QWEN = Setting(experts=128, top=8, batch=2, length=1920, width=2048, hidden=768)
# Forward, and in the backward pass the gradients of rows and weights, of three products.
PRODUCTS = 9


def shapes(setting, specs=None, mesh=None):
    """The layer's arguments, in bfloat16, as shapes."""
    b, t, d, f, e, k = (getattr(setting, name) for name in ("batch", "length", "width", "hidden", "experts", "top"))
    sizes = [(b, t, d), (b, t, k), (b, t, k), (e, d, f), (e, d, f), (e, f, d)]
    dtypes = [jnp.bfloat16, jnp.int32, jnp.float32, *[jnp.bfloat16] * 3]
    placed = [None if specs is None else NamedSharding(mesh, spec) for spec in specs or sizes]
    return [jax.ShapeDtypeStruct(s, dt, sharding=p) for s, dt, p in zip(sizes, dtypes, placed, strict=True)]


def traced(layer, arguments):
    """The gradients of everything but the choice of experts."""

    def loss(*arguments):
        return jnp.sum(layer(*arguments).astype(jnp.float32) ** 2)

    return jax.jit(jax.grad(loss, (0, 2, 3, 4, 5))).trace(*arguments)


def active_flops(setting):
    pairs = setting.batch * setting.length * setting.top
    return PRODUCTS * 2.0 * pairs * setting.width * setting.hidden


def flops(hlo):
    return sum(cost.flops * cost.times for cost in hlo_costs.instruction_costs(hlo))


def experts_times_tokens(hlo, setting, tokens):
    """The shapes of arrays that have both a dimension of all experts and one of all tokens."""
    found = {tuple(map(int, dims.split(","))) for dims in re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", hlo)}
    return [dims for dims in found if setting.experts in dims and {tokens, setting.length} & set(dims)]


def product_and_gradients(kernel, rows, others, weights, sizes):
    """Returns a kernel's products with the weights and with the transposed ones, and the weights' gradient."""
    return (
        kernel.product(rows, weights, sizes, transposed=False),
        kernel.product(others, weights, sizes, transposed=True),
        kernel.weights_product(rows, others, sizes),
    )
