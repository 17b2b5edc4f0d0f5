"""FLOPs of traced functions, computed by hand."""

import jax
import jax.numpy as jnp
import pytest
from compilers import NEEDS_TPU
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P
from plan_helpers import make_job

from spmd_trainer import sharding
from spmd_trainer.planner import jaxpr_costs, plan_prediction

X, W = jnp.ones((8, 16)), jnp.ones((16, 16))
ONE = 2 * 8 * 16 * 16


def flops(fn, *args):
    return jaxpr_costs.dot_costs(jax.jit(fn).trace(*args).jaxpr.jaxpr).flops


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


def test_dots_with_batch_dimensions_count_apart():
    heads = jnp.ones((4, 8, 16))

    def attend(x, w):
        return jnp.einsum("hqd,hkd->hqk", x, x @ w)

    found = jaxpr_costs.dot_costs(jax.jit(attend).trace(heads, W).jaxpr.jaxpr)
    assert found.batched_flops == 4 * 2 * 8 * 8 * 16
    assert found.flops == found.batched_flops + 4 * ONE
    assert found.batched_bytes == 4 * 4 * (8 * 16 + 8 * 16 + 8 * 8)  # float32


def test_kernels_count_apart_for_each_step_of_their_grid():
    def kernel(x, w, out):
        out[...] = x[...] @ w[...]

    def product(x, w):
        return pl.pallas_call(
            kernel,
            grid=(2,),
            in_specs=[pl.BlockSpec((4, 16), lambda i: (i, 0)), pl.BlockSpec((16, 16), lambda i: (0, 0))],
            out_specs=pl.BlockSpec((4, 16), lambda i: (i, 0)),
            out_shape=jax.ShapeDtypeStruct((8, 16), jnp.float32),
        )(x, w)

    found = jaxpr_costs.dot_costs(jax.jit(product).trace(X, W).jaxpr.jaxpr)
    assert (found.flops, found.kernel_flops) == (0.0, ONE)


def test_what_a_loop_stacks_counts():
    def layers(x, w):
        return jax.lax.scan(lambda c, _: (c @ w, c), x, length=5)

    found = jaxpr_costs.dot_costs(jax.jit(layers).trace(X, W).jaxpr.jaxpr)
    assert found.stacked_bytes == 5 * X.nbytes


def test_saved_bytes_are_those_that_live_together():
    """Of a loop in a loop, one iteration's stack lives beside the outer loop's; two loops in a row add up."""

    def inner(x):
        return jax.lax.scan(lambda c, _: (c * 2, c), x, length=3)[1].sum(0)  # stacks 3 x [8, 16]

    def saved(fn):
        return jaxpr_costs.saved_bytes(jax.jit(fn).trace(X).jaxpr.jaxpr)

    def outer(x):
        return jax.lax.scan(lambda c, _: (inner(c), c), x, length=5)[1]  # stacks 5 x [8, 16]

    assert saved(inner) == 3 * X.nbytes
    assert saved(outer) == (5 + 3) * X.nbytes
    assert saved(lambda x: outer(x).sum() + inner(x).sum()) == (5 + 3 + 3) * X.nbytes


def test_bytes_in_loops_are_those_of_all_arrays_that_a_body_computes():
    """What is outside of loops doesn't count; a device's part counts for all devices."""
    x = jnp.zeros(16)
    outer, number = 16 * 16 * 4, 4

    def loop(x):
        return jax.lax.scan(lambda carry, _: (carry, jnp.sum(carry[:, None] + carry)), x, length=3)[1]

    def counted(fn):
        return jaxpr_costs.bytes_in_loops(jax.jit(fn).trace(x).jaxpr.jaxpr)

    columns = x.nbytes  # [16, 1] and [1, 16] are computed too
    assert counted(loop) == 2 * columns + outer + number
    assert counted(lambda x: loop(x) + jnp.sum(x[:, None] + x)) == counted(loop)
    assert counted(lambda x: x[:, None] + x) == 0
    stacked = counted(lambda x: jax.lax.scan(lambda carry, _: (carry, loop(carry)), x, length=5)[1])
    assert stacked == counted(loop) + 3 * number  # what the inner loop stacks
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    sharded = jax.shard_map(loop, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    assert counted(sharded) == 4 * (2 * columns / 4 + outer / 16 + number)


@pytest.mark.parametrize(("last", "stored"), [(16, 128), (128, 128), (130, 256), (1, 1)])
def test_saved_bytes_of_tpus_have_whole_lanes(last, stored):
    """Heads of 64 dimensions take the memory of 128. A last dimension of 1 is not stored last."""

    def layers(x):
        return jax.lax.scan(lambda c, _: (c * 2, c), x, length=3)[1]

    jaxpr = jax.jit(layers).trace(jnp.zeros((8, last))).jaxpr.jaxpr
    assert jaxpr_costs.saved_bytes(jaxpr, lanes=128) == 3 * 8 * stored * 4
    assert jaxpr_costs.saved_bytes(jaxpr) == 3 * 8 * last * 4


@NEEDS_TPU
def test_only_tpus_store_whole_lanes(tmp_path, monkeypatch):
    counted = []
    monkeypatch.setattr(jaxpr_costs, "saved_bytes", lambda jaxpr, lanes: counted.append(lanes) or 0.0)
    for chips in ({"topology": "v5e:2x2"}, {}):
        plan_prediction.traced(make_job(tmp_path, **chips))
    assert counted == [128, 1]
