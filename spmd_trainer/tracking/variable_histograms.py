"""Histograms of a model's variables, computed on the devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from spmd_trainer.step.layout import Layout
from spmd_trainer.tracking.base import Histogram
from spmd_trainer.train_states import PyTree, TrainState

_BINS = 64


class VariableHistograms:
    """Computes a histogram of each variable. Compiled once per mesh; all processes call it together."""

    def __init__(self, metadata: Layout):
        """`metadata` describes the training state."""
        self._mesh = metadata.mesh

        def count(state: TrainState) -> PyTree:
            return jax.tree.map(_counts, metadata.slice(state).mdl_vars)

        self._count = jax.jit(count, out_shardings=NamedSharding(metadata.mesh, PartitionSpec()))

    def __call__(self, state: TrainState) -> dict[str, Histogram]:
        """Returns histograms of all floating-point variables by path, e.g. 'params/lm/softmax/w'.

        Waits for the devices. NaN and infinity are in no bin. `state` has padded shapes, on the mesh.
        """
        with jax.set_mesh(self._mesh):
            found = jax.device_get(self._count(state))
        leaves = jax.tree_util.tree_leaves_with_path(found, is_leaf=lambda x: isinstance(x, tuple))
        return {
            jax.tree_util.keystr(path, simple=True, separator="/"): _histogram(*leaf) for path, leaf in leaves if leaf
        }


def _counts(x: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the minimum, the maximum, and the number of values up to each edge after the first; () for integers.

    One reduction per edge keeps the variable sharded: sorting or flattening it would gather it.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return ()
    x = x.astype(jnp.float32)
    finite = jnp.isfinite(x)
    low = jnp.min(x, initial=jnp.inf, where=finite)
    high = jnp.max(x, initial=-jnp.inf, where=finite)
    steps = jnp.arange(1, _BINS + 1, dtype=jnp.float32) / _BINS
    edges = jnp.where(steps == 1, high, low + (high - low) * steps)
    at_most = jax.lax.map(lambda edge: jnp.sum(finite & (x <= edge), dtype=jnp.float32), edges)
    return low, high, at_most


def _histogram(low: np.ndarray, high: np.ndarray, at_most: np.ndarray) -> Histogram:
    counts = np.rint(np.diff(at_most.astype(np.float64), prepend=0.0)).astype(np.int64)
    begin, end = (
        (float(low), float(high)) if np.isfinite(low) else (0.0, 0.0)
    )  # without a finite value, low is infinity
    if begin == end:  # bins need a width
        begin, end = begin - 0.5, end + 0.5
    return Histogram(counts, np.linspace(begin, end, _BINS + 1))
