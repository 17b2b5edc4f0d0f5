"""FLOPs of traced functions, computed by hand."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from spmd_trainer import sharding
from spmd_trainer.analysis import jaxpr_costs

X, W = jnp.ones((8, 16)), jnp.ones((16, 16))
ONE = 2 * 8 * 16 * 16


def flops(fn, *args):
    return jaxpr_costs.dot_flops(jax.jit(fn).trace(*args).jaxpr.jaxpr)


def test_loops_are_multiplied_out():
    assert flops(lambda x, w: x @ w, X, W) == ONE
    assert flops(lambda x, w: jax.lax.scan(lambda c, _: (c @ w, None), x, length=5)[0], X, W) == 5 * ONE


def test_rematerialisation_counts():
    def loss(w, x):
        for _ in range(2):
            x = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, w)
        return x.sum()

    # Forward, forward again, and two products for the gradient in each layer; the first needs none for x.
    assert flops(jax.grad(loss), W, X) == (4 + 3) * ONE


def test_a_shard_map_counts_on_all_devices():
    mesh = sharding.create_device_mesh([("data", 8)])
    product = jax.shard_map(lambda x, w: x @ w, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    assert flops(product, X, W) == ONE


def test_only_the_manual_axes_of_a_shard_map_multiply():
    mesh = sharding.create_device_mesh([("data", 4), ("mdl", 2)])
    product = jax.shard_map(
        lambda x, w: x @ w, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), axis_names={"data"}
    )
    assert flops(product, X, W) == ONE


def test_one_branch_counts():
    def choose(flag, x, w):
        return jax.lax.cond(flag, lambda: x @ w, lambda: x)

    assert flops(choose, True, X, W) == ONE
