"""The collectives on their own: gathering undoes splitting, means are global means, nothing but JAX is needed."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from spmd_trainer import sharding
from spmd_trainer.step import collectives, minibatches

MESH = sharding.create_device_mesh([("replica", 2), ("data", 4)], devices=jax.devices()[:8])
BOTH = ("replica", "data")


def on_devices(fn, in_specs, out_specs, *args):
    return jax.jit(jax.shard_map(fn, mesh=MESH, in_specs=in_specs, out_specs=out_specs, check_vma=False))(*args)


def specs_of(variables):
    return jax.tree.map(lambda variable: variable.spec, variables)


shapes = st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple)
axes = st.sampled_from(["data", "replica", BOTH, ("data", "replica")])


@pytest.mark.full
@settings(max_examples=25, deadline=None)
@given(shapes, axes)
def test_gathering_undoes_splitting_whatever_the_shape(shape, axis_name):
    param = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    variable = collectives.plan_shards(param, axis_name, MESH, min_weight_size=1)
    shards = on_devices(lambda x: collectives.shard_params(x, variable), P(), variable.spec, param)
    assert shards.shape == variable.padded_shape
    np.testing.assert_array_equal(np.asarray(shards)[tuple(slice(size) for size in shape)], param)
    assert np.sum(np.asarray(shards)) == np.sum(param)  # zeros in the padding
    gathered = on_devices(lambda x: collectives.gather_params(x, variable), variable.spec, P(), shards)
    np.testing.assert_array_equal(gathered, param)


@settings(max_examples=25, deadline=None)
@given(shapes, axes)
def test_gradients_are_means_over_all_devices_and_split_like_their_parameters(shape, axis_name):
    param = np.ones(shape, np.float32)
    variable = collectives.plan_shards(param, axis_name, MESH, min_weight_size=1)
    factors = np.arange(1.0, 9.0, dtype=np.float32)  # each device's loss is its factor times the sum of cubes

    def grads(shard, factor):
        grad = jax.grad(lambda s: factor[0] * jnp.sum(collectives.gather_params(s, variable) ** 3))(shard)
        return collectives.sync_gradients(grad, variable, BOTH)

    split = on_devices(lambda x: collectives.shard_params(x, variable), P(), variable.spec, param)
    got = np.asarray(on_devices(grads, (variable.spec, P(BOTH)), variable.spec, split, factors))
    logical = tuple(slice(size) for size in shape)
    np.testing.assert_allclose(got[logical], np.full(shape, 3 * factors.mean()), rtol=1e-6)
    assert np.isclose(np.sum(got), np.sum(got[logical]))


def test_the_dimension_to_split_divides_where_one_does_and_pads_least_where_none_does():
    params = {
        "divides": jax.ShapeDtypeStruct((9, 8), np.float32),
        "largest": jax.ShapeDtypeStruct((8, 16), np.float32),
        "padded": jax.ShapeDtypeStruct((5, 101), np.float32),
        "small": jax.ShapeDtypeStruct((4,), np.float32),
        "stacked": jax.ShapeDtypeStruct((8, 3, 5), np.float32),
    }
    first = {"divides": 0, "largest": 0, "padded": 0, "small": 0, "stacked": 1}
    plan = collectives.plan_shards(params, "data", MESH, min_weight_size=8, first_dim=first)
    assert specs_of(plan) == {
        "divides": P(None, "data"),
        "largest": P(None, "data"),
        "padded": P(None, "data"),
        "small": P(),
        "stacked": P(None, "data", None),
    }
    assert plan["padded"].padded_shape == (5, 104)
    assert "min_weight_size" in plan["small"].reason
    assert "padded" in plan["padded"].reason


@pytest.mark.parametrize("axis_name", ["model", (), ("data", "data")])
def test_axes_that_the_mesh_does_not_have_are_named(axis_name):
    with pytest.raises(ValueError, match=r"axis_name .*'replica', 'data'"):
        collectives.plan_shards(jnp.ones((8,)), axis_name, MESH)


def test_each_device_draws_its_own_random_numbers_along_the_axes_named():
    def draw(key, axis_name):
        return jax.random.bits(collectives.fold_rng_over_axis(key, axis_name))[None]

    key = jax.random.key(0)
    assert len(set(np.asarray(on_devices(functools.partial(draw, axis_name=BOTH), P(), P(BOTH), key)).tolist())) == 8
    per_column = np.asarray(on_devices(functools.partial(draw, axis_name="data"), P(), P(BOTH), key)).reshape(2, 4)
    assert len(set(per_column[0].tolist())) == 4
    np.testing.assert_array_equal(per_column[0], per_column[1])


@pytest.mark.parametrize("num_minibatches", [1, 2, 4])
def test_accumulated_gradients_are_those_of_the_whole_batch(num_minibatches):
    rows = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    weights = np.array([1.0, 2.0, 3.0], np.float32)

    def loss_fn(params, carry, minibatch, key, index):
        predictions = jnp.tanh(minibatch @ params)
        return jnp.sum(predictions), (carry + 1, {"sum": jnp.sum(predictions)}, predictions)

    grads, calls, sums, outputs = minibatches.accumulate_gradients(
        loss_fn, weights, 0, rows, jax.random.key(0), num_minibatches
    )
    np.testing.assert_allclose(grads, jax.grad(lambda p: jnp.sum(jnp.tanh(rows @ p)))(weights), rtol=1e-5)
    np.testing.assert_allclose(outputs, np.tanh(rows @ weights), rtol=1e-5)
    np.testing.assert_allclose(sums["sum"], np.sum(np.tanh(rows @ weights)), rtol=1e-5)
    assert calls == num_minibatches


def test_rows_that_do_not_divide_are_named():
    with pytest.raises(ValueError, match=r"x: 6 rows .* 4 minibatches"):
        minibatches.accumulate_gradients(
            lambda *_: (jnp.zeros(()), (None, None, None)), None, None, {"x": jnp.ones((6, 1))}, jax.random.key(0), 4
        )


@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 5)), min_size=8, max_size=8))
@settings(max_examples=20, deadline=None)
@pytest.mark.full
def test_metrics_are_weighted_means_over_all_devices(pairs):
    values, weights = (np.array(column, np.float32) for column in zip(*pairs, strict=True))
    values[weights == 0] = np.nan  # a mean over nothing

    def reduce(value, weight):
        pair = collectives.sync_gradients(minibatches.weighted_sum(value[0], weight[0]), None, BOTH)
        return minibatches.weighted_mean(*pair)

    expected = np.sum(values[weights > 0] * weights[weights > 0]) / max(weights.sum(), 1)
    np.testing.assert_allclose(on_devices(reduce, (P(BOTH), P(BOTH)), P(), values, weights), expected, atol=1e-5)


class Classifier(nn.Module):
    """A plain Flax module, with a width that nothing divides."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.relu(nn.Dense(67)(x)))


@pytest.mark.full
def test_a_plain_flax_module_trains_as_on_one_device():
    model, optimizer = Classifier(), optax.adam(1e-2)
    rng = np.random.default_rng(1)
    images, labels = rng.normal(size=(16, 10)).astype(np.float32), rng.integers(0, 3, 16)
    params = model.init(jax.random.key(0), images)

    def loss_of(params, images, labels):
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, images), labels).mean()

    variables = collectives.plan_shards(params, "data", MESH, min_weight_size=64)

    def step(shards, opt_state, images, labels):
        grad_fn = jax.value_and_grad(lambda s: loss_of(collectives.gather_params(s, variables), images, labels))
        loss, grads = grad_fn(shards)
        grads, loss = collectives.sync_gradients((grads, loss), (variables, None), BOTH)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(shards, updates), opt_state, loss

    specs = specs_of(variables)
    assert specs["params"]["Dense_0"]["kernel"] != P()
    shards = on_devices(lambda p: collectives.shard_params(p, variables), P(), specs, params)
    opt_state = optimizer.init(shards)
    opt_specs = optax.tree.map_params(optimizer, lambda _, s: s, opt_state, specs, transform_non_params=lambda _: P())
    reference, reference_opt = params, optimizer.init(params)
    for _ in range(5):
        in_specs = (specs, opt_specs, P(BOTH), P(BOTH))
        shards, opt_state, loss = on_devices(step, in_specs, (specs, opt_specs, P()), shards, opt_state, images, labels)
        expected, grads = jax.value_and_grad(loss_of)(reference, images, labels)
        updates, reference_opt = optimizer.update(grads, reference_opt)
        reference = optax.apply_updates(reference, updates)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    whole = on_devices(lambda s: collectives.gather_params(s, variables), (specs,), P(), shards)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), whole, reference)
