"""What is in a checkpoint: arrays at logical shapes, which plain Orbax programs read; and checkpoints of older formats."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoint_helpers import assert_restored, make_mesh, partition_specs, specs_for, train_state
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd_trainer.checkpointing import Checkpointer, CheckpointError, checkpoint_bytes, records
from spmd_trainer.sharding.variables import make_variable_spec

FORMAT_2 = Path(__file__).parent / "data/format_2"


def assert_same(found, variables, logical):
    """Checks the bits of a restored tree of dictionaries, and that it has nothing else."""
    number = 0
    for spec, want in zip(*map(jax.tree.leaves, (variables, logical)), strict=True):
        if 0 in spec.logical_shape:  # Orbax stores no arrays without elements
            continue
        value = found
        for key in spec.path.split("/"):
            value = value[key]
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            value, want = jax.random.key_data(value), jax.random.key_data(want)
        assert np.asarray(value).shape == np.shape(want), spec.path
        assert np.asarray(value).tobytes() == np.asarray(want).tobytes(), spec.path
        number += 1
    assert len(jax.tree.leaves(found)) == number


def test_plain_orbax_reads_logical_shapes(saved):
    """The mesh pads 13 rows to 16, 10 columns to 12 and so on; none of that is in the checkpoint."""
    found = ocp.PyTreeCheckpointer().restore(saved.directory / "20" / "state")
    assert found["mdl_vars"]["params"]["emb"]["w"].shape == (13, 6)
    assert_same(found, saved.variables, saved.states[20])


def test_plain_orbax_reads_onto_another_mesh(saved):
    mesh = make_mesh(1, 2, 1)
    leaf = {"w": jax.ShapeDtypeStruct((10, 5), np.float32, sharding=NamedSharding(mesh, P("data")))}
    item = {"mdl_vars": {"params": {"ffn": {"1": leaf}}}}
    options = ocp.args.PyTreeRestore(
        item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
    )
    found = ocp.PyTreeCheckpointHandler().restore(saved.directory / "20" / "state", args=options)
    array = found["mdl_vars"]["params"]["ffn"]["1"]["w"]
    assert array.sharding == NamedSharding(mesh, P("data"))
    np.testing.assert_array_equal(array, saved.states[20].mdl_vars["params"].ffn[1].w)


@pytest.mark.parametrize("sizes", [(1, 4, 2), (2, 2, 2), (1, 1, 1), (1, 8, 1)], ids=str)
def test_checkpoints_of_format_2_are_read(sizes, tmp_path):
    """They hold padded arrays in a flat dictionary: an emb of (16, 6), saved on mesh (1, 4, 2)."""
    shutil.copytree(FORMAT_2, tmp_path / "checkpoints")
    logical, mesh = train_state(20), make_mesh(*sizes)
    variables = specs_for(logical, partition_specs(logical), mesh)
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:
        old = records.saved_variables(checkpoints.read_metadata(20))["mdl_vars/params/emb/w"]
        assert (old.shape, old.stored_shape) == ((13, 6), (16, 6))
        restored = checkpoints.restore(variables, mesh)
        assert (restored.step, restored.input_state) == (20, {"position": 20})
        assert_restored(restored.state, variables, logical, mesh)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("a.b", "a/b"), "'a.b' and 'a/b' would be one array"),
        (("a", "a/b"), "'a' is a variable, and so is 'a/b' below it"),
    ],
)
def test_names_that_collide_in_a_tree_are_refused(names, message, tmp_path):
    mesh = make_mesh(1, 4, 2)
    variables = tuple(make_variable_spec(name, (8,), np.float32, P("data"), dict(mesh.shape), "test") for name in names)
    with pytest.raises(CheckpointError, match=message):
        checkpoint_bytes(variables)
    state = tuple(jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, P("data"))) for _ in names)
    with Checkpointer(tmp_path / "checkpoints") as checkpoints, pytest.raises(CheckpointError, match=message):
        checkpoints.save(1, state, variables, input_state=None, metadata={})
    assert not (tmp_path / "checkpoints" / "1").exists()


@pytest.mark.full
def test_padded_keys(tmp_path):
    """The data of PRNG keys have a dimension more than the keys."""
    mesh = make_mesh(1, 4, 2)
    logical = {"keys": jax.random.split(jax.random.key(0), 5)}
    variables = specs_for(logical, {"keys": P("data")}, mesh)
    padded = jax.device_put(jax.random.split(jax.random.key(1), 8), NamedSharding(mesh, P("data")))
    padded = padded.at[:5].set(logical["keys"])
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(
            1,
            {"keys": jax.device_put(padded, NamedSharding(mesh, P("data")))},
            variables,
            input_state=None,
            metadata={},
        )
    found = ocp.PyTreeCheckpointer().restore(tmp_path / "checkpoints/1/state")["keys"]
    np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(logical["keys"]))
