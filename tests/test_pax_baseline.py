"""The hand-written program of `benchmarks.pax_layers` does the work of the trainer's step of a Pax experiment."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import pax_baseline, pax_layers
from spmd_trainer import sharding

TINY = pax_baseline.Sizes(layers=2, width=16, hidden=32, heads=2, vocab=16, seq=8, rows=8, dtype=jnp.float32)


@pytest.mark.full
def test_both_programs_take_the_same_steps():
    mesh = sharding.create_device_mesh(pax_layers.MESH)
    partitioner, step = pax_layers.trainer(mesh, TINY)
    inputs = partitioner.layout.put(pax_baseline.batch(TINY))
    state = partitioner.initialize_train_state(pax_layers.KEY)
    params = pax_baseline.parameters(jax.tree.map(np.asarray, state.mdl_vars))
    compiled = pax_baseline.lower_hand_written(pax_baseline.Choices(), TINY, mesh, params).compile()
    zeros = jax.tree.map(np.zeros_like, params)
    hand = {"step": np.zeros((), np.int32), "params": params, "m": zeros, "v": zeros}
    in_shardings = compiled.input_shardings[0]
    hand = jax.device_put(hand, in_shardings[0])
    rows = jax.device_put(dict(pax_baseline.batch(TINY)), in_shardings[1])
    for _ in range(3):
        state, output = step(state, pax_layers.KEY, inputs)
        hand, metrics, scores = compiled(hand, rows)
        np.testing.assert_allclose(metrics[0], output.loss, rtol=1e-5)
        np.testing.assert_allclose(scores, output.per_example_out["scores"], rtol=1e-5)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-7)
    learnt = pax_baseline.parameters(jax.tree.map(np.asarray, state.mdl_vars))
    jax.tree.map(close, hand["params"], learnt)
    assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(learnt), jax.tree.leaves(params), strict=True))


def test_the_breakdown_ends_with_no_choice():
    *_, last = pax_layers.cumulative().values()
    assert not any(dataclasses.asdict(last).values())
