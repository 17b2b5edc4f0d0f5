"""Mesh equivalence as a property of random small NNX nets: widths, depths, ties, stacks, batch norm, dropout, meshes."""

import functools

import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_helpers import Config, failing_steps, nnx_task

from spmd_trainer.shard_map_partitioning import ShardMapPartitioner

pytestmark = pytest.mark.full

OVER_DATA = 'fsdp(axis="data", min_size_to_shard_mb=0, allow_uneven=True)'
OVER_BOTH = 'fsdp(axis="data, mdl", min_size_to_shard_mb=0, allow_uneven=True)'
LAST = 'shard_dim(-1, "mdl", allow_uneven=True)'
STRATEGIES = [
    [(".*", OVER_DATA)],
    [(".*", OVER_BOTH)],
    [(".*", LAST)],
    [("kernel$", [LAST, OVER_DATA]), (".*", OVER_DATA)],
    [("kernel$", 'shard_dim(0, "data", allow_uneven=True)')],
]


class RandomNet(nnx.Module):
    """Layers of random widths and, for `stacked`, a scan over layers of width 8; `tied` uses the first layer twice."""

    def __init__(self, widths, tied, norm, rate=0.0, stacked=0, *, rngs):
        self.norm = nnx.BatchNorm(8, rngs=rngs) if norm else None
        self.drop = nnx.Dropout(rate, rngs=rngs)
        layers = [nnx.Linear(8, width, rngs=rngs) for width in widths]
        for layer in layers[:1] if tied else []:
            layers += [layer]  # the same variables twice
        self.layers = nnx.List(layers)
        self.stack = nnx.vmap(lambda rngs: nnx.Linear(8, 8, rngs=rngs))(rngs.split(stacked)) if stacked else None

    def __call__(self, x):
        x = self.norm(x) if self.norm is not None else x
        if self.stack is not None:
            scan = nnx.scan(lambda layer, x: nnx.tanh(layer(x)), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            x = scan(self.stack, x)
        total = jnp.zeros_like(x)
        for number, layer in enumerate(self.layers):
            hidden = self.drop(nnx.tanh(layer(jnp.roll(x, number, axis=1))))
            total += hidden @ layer.kernel.T
        return total / len(self.layers)


WIDTHS = st.lists(st.integers(1, 9), min_size=1, max_size=3)
MESHES = st.sampled_from([(8, 1), (1, 8), (4, 2), (3, 2), (5, 1)])
FEW = settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@FEW
@given(
    widths=WIDTHS,
    tied=st.booleans(),
    norm=st.booleans(),
    rate=st.sampled_from([0.0, 0.3]),
    stacked=st.integers(0, 3),
    strategy=st.sampled_from(STRATEGIES),
    sizes=MESHES,
)
def test_any_net_on_any_mesh(widths, tied, norm, rate, stacked, strategy, sizes):
    module = Config(RandomNet, widths=widths, tied=tied, norm=norm, rate=rate, stacked=stacked)
    assert not failing_steps(nnx_task(module, strategy=strategy), sizes)


@FEW
@given(
    widths=WIDTHS,
    tied=st.booleans(),
    stacked=st.integers(0, 3),
    strategy=st.sampled_from(["dp", "fsdp"]),
    num_minibatches=st.sampled_from([1, 2]),
    sizes=st.sampled_from([(8, 1), (4, 2), (2, 1)]),
)
def test_any_net_with_written_out_collectives(widths, tied, stacked, strategy, num_minibatches, sizes):
    """Without dropout and batch norm, which are those of each device's rows there."""
    fields = {"min_weight_size": 1} if strategy == "fsdp" else {}
    make = functools.partial(ShardMapPartitioner, strategy, num_minibatches=num_minibatches, **fields)
    module = Config(RandomNet, widths=widths, tied=tied, norm=False, stacked=stacked)
    assert not failing_steps(nnx_task(module), sizes, make)
