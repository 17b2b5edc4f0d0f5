"""Integers that the model writes are not taken from a part of the batch."""

import jax.numpy as jnp

from spmd_trainer.step import minibatches


def test_integers_stay_and_floats_are_taken():
    old = {"count": jnp.int32(7), "seen": jnp.array([True, False]), "mean": jnp.float32(0.5)}
    new = {"count": jnp.int32(8), "seen": jnp.array([True, True]), "mean": jnp.bfloat16(2)}
    kept = minibatches.keep_integers(new, old)
    assert kept["count"] == 7
    assert kept["seen"].tolist() == [True, False]
    assert kept["mean"] == 2
    assert kept["mean"].dtype == jnp.float32
