"""Optimizer states that are not shaped like their variables: Shampoo's factors, GaLore's projections, flat vectors."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from facts import assert_names
from model_helpers import Config, Net, batch, failing_steps, nnx_task, shapes_of

from spmd_trainer import sharding
from spmd_trainer.shard_map_partitioning import ShardMapPartitioner
from spmd_trainer.step.pjit import PjitPartitioner


class Statistics(NamedTuple):
    """Shampoo's state of one variable: a second moment for each dimension, and the momentum of the update."""

    factors: tuple[jax.Array, ...]
    momentum: jax.Array


class ShampooState(NamedTuple):
    count: jax.Array
    statistics: Any


def is_statistics(x):
    return isinstance(x, Statistics)


def shampoo(learning_rate):
    """A small Shampoo (Gupta et al., 2018): factors [d0, d0], [d1, d1], ... of each variable, kept beside its momentum."""

    def init(params):
        def start(p):
            return Statistics(tuple(jnp.eye(size) * 1e-2 for size in p.shape), jnp.zeros_like(p))

        return ShampooState(jnp.zeros((), jnp.int32), jax.tree.map(start, params))

    def update(updates, state, params=None):
        del params

        def one(grad, old):
            factors, direction = [], grad
            for dim, factor in enumerate(old.factors):
                rows = jnp.moveaxis(grad, dim, 0).reshape(grad.shape[dim], -1)
                factors.append(factor + rows @ rows.T)
                values, vectors = jnp.linalg.eigh(factors[-1])
                root = (vectors * jnp.maximum(values, 1e-4) ** (-0.5 / grad.ndim)) @ vectors.T
                direction = jnp.moveaxis(jnp.tensordot(root, direction, axes=(1, dim)), 0, dim)
            return Statistics(tuple(factors), 0.9 * old.momentum + direction)

        statistics = jax.tree.map(one, updates, state.statistics)
        moves = jax.tree.map(lambda s: -learning_rate * s.momentum, statistics, is_leaf=is_statistics)
        return moves, ShampooState(state.count + 1, statistics)

    return optax.GradientTransformation(init, update)


def flat_momentum(learning_rate):
    """SGD whose momentum is one vector for all variables."""
    return optax.chain(optax.flatten(optax.trace(0.9)), optax.scale(-learning_rate))


def records(built, partitioner=None):
    partitioner = partitioner or PjitPartitioner()
    partitioner.setup(built, shapes_of(batch()))
    return {v.path: v for v in partitioner.metadata.records()}


def fsdp():
    return ShardMapPartitioner("fsdp", min_weight_size=1, mesh=sharding.create_device_mesh([("data", 4), ("mdl", 2)]))


@pytest.mark.parametrize("partitioner", [PjitPartitioner, fsdp])
def test_shampoo_factors_are_replicated_and_the_report_says_why(partitioner):
    found = records(nnx_task(Config(Net, width=9), optimizer=shampoo(0.1)), partitioner())
    variable = found["mdl_vars/params/first/kernel"]
    assert (variable.logical_shape, variable.padded_shape) == ((8, 9), (8, 9))
    start = "opt_states/0/statistics/params/first/kernel"
    for dim, size in enumerate((8, 9)):
        factor = found[f"{start}/factors/{dim}"]
        assert (factor.logical_shape, factor.padded_shape) == ((size, size), (size, size))
        assert not any(factor.spec)
        assert_names(factor.reason, "replicated", (size, size), (8, 9))
    assert found["opt_states/0/count"].reason == "replicated: a scalar"


def test_a_momentum_beside_the_factors_follows_its_variable():
    found = records(nnx_task(Config(Net, width=9), optimizer=shampoo(0.1)))
    start = "opt_states/0/statistics/params/layers/0/kernel"
    variable = found["mdl_vars/params/layers/0/kernel"]
    assert variable.padded_shape == (9, 16)  # 8 devices don't divide 9
    # The factors of a square variable have its shape as well.
    for part in ("momentum", "factors/0", "factors/1"):
        assert (found[f"{start}/{part}"].spec, found[f"{start}/{part}"].padded_shape) == (variable.spec, (9, 16))
        assert found[f"{start}/{part}"].reason == "follows its variable"


def test_a_state_of_no_variable_says_so():
    found = records(nnx_task(optimizer=flat_momentum(0.1)))
    (vector,) = (v for path, v in found.items() if path.startswith("opt_states/") and v.logical_shape)
    assert not any(vector.spec)
    assert_names(vector.reason, "replicated", "no variable")


def test_a_state_of_a_variable_that_is_whole_says_so():
    built = nnx_task(optimizer=optax.adam(0.1), strategy=[("kernel$", "replicate")])
    reasons = {v.reason for path, v in records(built).items() if path.endswith("mu/params/first/kernel")}
    (reason,) = reasons
    assert_names(reason, "replicated", "its variable")


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(shampoo(0.05), id="shampoo"),
        *(
            pytest.param(optimizer, id=name, marks=pytest.mark.full)
            for name, optimizer in {
                "flat": flat_momentum(0.1),
                "galore": optax.contrib.galore(1e-2, rank=3),
                "schedule_free": optax.contrib.schedule_free_sgd(0.1),
                "ademamix": optax.chain(optax.contrib.scale_by_ademamix(), optax.scale(-1e-2)),
                "lbfgs": optax.chain(optax.scale_by_lbfgs(memory_size=3), optax.scale(-1e-2)),
            }.items()
        ),
    ],
)
@pytest.mark.full
def test_any_state_gives_the_numbers_of_one_device(optimizer):
    """3 x 2 devices divide neither 8 nor 7."""
    assert not failing_steps(nnx_task(Config(Net, width=7), optimizer=optimizer), (3, 2))
