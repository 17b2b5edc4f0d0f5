"""Helpers of the checkpoint tests: meshes, and a train state with every kind of leaf that a real one has."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from etils import epath
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from praxis.py_utils import NestedMap

from spmd_trainer.checkpointing import manifest
from spmd_trainer.sharding.variables import VariableSpec, make_variable_spec, path_str
from spmd_trainer.train_states import TrainState

AXES = ("replica", "data", "mdl")


def make_mesh(*shape: int, axes: tuple[str, ...] = AXES) -> Mesh:
    """Returns a mesh over the first devices."""
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    return Mesh(devices, axes, axis_types=(AxisType.Auto,) * len(shape))


def specs_for(logical: Any, specs: Any, mesh: Mesh) -> Any:
    """Returns the VariableSpecs of a tree of logical arrays and a tree of PartitionSpecs."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x, spec: make_variable_spec(path_str(path), x.shape, x.dtype, spec, dict(mesh.shape), "test"),
        logical,
        specs,
    )


def place(logical: Any, variables: Any, mesh: Mesh) -> Any:
    """Pads logical host arrays with zeros and places them on the mesh."""

    def put(x: Any, v: VariableSpec) -> jax.Array:
        if not jax.dtypes.issubdtype(v.dtype, jax.dtypes.extended):
            x = np.asarray(x)
            x = np.pad(x, [(0, pad) for pad in v.paddings]) if x.ndim else x
        return jax.device_put(x, NamedSharding(mesh, v.spec))

    return jax.tree.map(put, logical, variables)


def logical_of(array: jax.Array, spec: VariableSpec) -> np.ndarray:
    """Returns the logical region of a placed array on the host; of a PRNG key, its data."""
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(array))
    return np.asarray(array)[tuple(slice(size) for size in spec.logical_shape)]


def assert_restored(state: Any, variables: Any, logical: Any, mesh: Mesh) -> None:
    """Checks the structure, the bits of the logical region, zeros in the padding, and the shardings."""
    assert jax.tree.structure(state) == jax.tree.structure(variables)
    for array, spec, want in zip(*map(jax.tree.leaves, (state, variables, logical)), strict=True):
        assert array.shape == spec.padded_shape, spec.path
        assert array.dtype == spec.dtype, spec.path
        assert array.sharding == NamedSharding(mesh, spec.spec), spec.path
        if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
            want = jax.random.key_data(want)
        found = logical_of(array, spec)
        assert found.tobytes() == np.asarray(want).tobytes(), spec.path
        if any(spec.paddings):
            padding = np.asarray(array).copy()
            padding[tuple(slice(size) for size in spec.logical_shape)] = 0
            assert not padding.astype(np.float32).any(), spec.path


def train_state(seed: int = 0) -> TrainState:
    """Returns a logical state: uneven dimensions, bfloat16, integers, a key, empty and masked nodes, None, a (0,) leaf."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    params = NestedMap(
        emb=NestedMap(w=normal(13, 6)),
        ffn=[NestedMap(w=normal(6, 10), b=normal(10).astype(jnp.bfloat16)), NestedMap(w=normal(10, 5))],
        mask=rng.integers(0, 2, 7).astype(bool),
        skipped=None,
    )
    moments = jax.tree.map(lambda x: x.astype(np.float32), params)
    return TrainState(
        step=np.uint32(7),
        mdl_vars={"params": params, "non_trainable": {"count": rng.integers(0, 9, 3, dtype=np.int32), "none": {}}},
        opt_states=[
            (
                optax.EmptyState(),
                optax.ScaleByAdamState(
                    count=np.int32(7), mu=moments, nu=NestedMap(emb=optax.MaskedNode(), x=normal(5))
                ),
                NestedMap(ema=NestedMap(params=NestedMap(emb=NestedMap(w=normal(13, 6))))),
            )
        ],
        extra_state=(np.zeros((0,), np.float32), jax.random.key(seed), ()),
    )


def partition_specs(logical: TrainState) -> Any:
    """Splits matrices over ('data', 'mdl') and vectors over 'mdl'."""
    by_rank = {2: P("data", "mdl"), 1: P("mdl"), 0: P()}
    return jax.tree.map(lambda x: P() if x.size == 0 else by_rank[np.ndim(x)], logical)


def files_problem(step_dir, step, share=0, shares=1):
    """What is wrong with a step's files, contents included, or None."""
    listed = manifest.read(epath.Path(step_dir), step)
    return listed if isinstance(listed, str) else manifest.contents_problem(epath.Path(step_dir), listed, share, shares)
