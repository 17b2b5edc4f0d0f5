"""Every kind and version of Pax checkpoint opens, with and without a model, and is never written to."""

import shutil

import jax
import numpy as np
import pytest
from facts import raises_naming
from pax_models import assert_holds, job_on, restored, snapshot
from pax_writer import write_zarr

from spmd_trainer import pax
from spmd_trainer.checkpointing import Checkpointer, restore
from spmd_trainer.pax import contents, flax_file
from spmd_trainer.sharding.variables import named_leaves

ADAM, ADAFACTOR, EMA = "UnevenRepeatedAdam", "UnevenRepeatedAdafactor", "PlainAdamEma"
KINDS = [
    (ADAM, "zarr_0.0", 0.0, "zarr"),
    (ADAM, "zarr_1.1", 1.1, "zarr"),
    (ADAM, "ocdbt_1.2", 1.2, "ocdbt"),
    (ADAM, "flax_0.0", 0.0, "msgpack"),
    (ADAM, "flax_1.1", 1.1, "msgpack"),
    (ADAFACTOR, "zarr_1.1", 1.1, "zarr"),
    (ADAFACTOR, "ocdbt_1.2", 1.2, "ocdbt"),
    (EMA, "zarr_1.1", 1.1, "zarr"),
]

# Opened onto a mesh by `make test`.
SHORT = [(ADAM, "zarr_0.0"), (ADAM, "flax_1.1"), (ADAFACTOR, "ocdbt_1.2")]


@pytest.mark.parametrize(
    ("name", "kind", "version", "storage"),
    [kind if kind[:2] in SHORT else pytest.param(*kind, marks=pytest.mark.full) for kind in KINDS],
)
def test_opens_onto_a_mesh(pax_data, name, kind, version, storage):
    directory = pax_data.checkpoints(name, kind)
    before = snapshot(directory)
    job = job_on(name, (1, 4, 2))
    contents = pax.open_source(directory, None, job.partitioner.metadata.variables).contents
    assert (contents.step, contents.version, contents.kind) == (20, version, storage)
    found = restored(directory, job)
    assert found.step == 20
    assert_holds(found.state, job.partitioner.metadata.variables, pax_data.expected(name))
    assert snapshot(directory) == before


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kind, _, _ in KINDS])
def test_opens_without_a_model(pax_data, name, kind):
    """Paths, dtypes and bits are those of the model; shapes too, as far as the checkpoint tells."""
    expected = {k.removeprefix("state/"): v for k, v in pax_data.expected(name).items() if k.startswith("state/")}
    tree = pax.read_checkpoint(pax_data.checkpoints(name, kind))
    leaves = dict(named_leaves(tree))
    assert leaves.keys() == expected.keys()
    for path, leaf in leaves.items():
        assert (leaf.shape, leaf.dtype) == (expected[path].shape, expected[path].dtype)
        np.testing.assert_array_equal(np.asarray(leaf), expected[path])


def test_a_part_of_an_array_is_read_by_its_index(pax_data):
    value = pax_data.expected(ADAM)["state/mdl_vars/params/lm/softmax/logits_ffn/linear/w"]
    for kind in ("zarr_1.1", "flax_1.1"):
        array = pax.read_checkpoint(pax_data.checkpoints(ADAM, kind)).mdl_vars["params"]["lm"]["softmax"]["logits_ffn"][
            "linear"
        ]["w"]
        for index in (
            np.s_[3],
            np.s_[2:5, 250:],
            np.s_[-1, ::7],
            np.s_[:, -1],
            np.s_[::-1],
            np.s_[[1, 3]],
            np.s_[..., 0],
        ):
            np.testing.assert_array_equal(array[index], value[index])
        with pytest.raises(IndexError):
            array[15]
        own = np.array(array)  # a copy, which may be written to
        own[:] = 0
        np.testing.assert_array_equal(np.asarray(array), value)
        assert array[2:5].flags.writeable


def test_any_directory_of_a_run_is_understood(pax_data, tmp_path):
    checkpoints = pax_data.checkpoints(ADAM)
    (tmp_path / "run").mkdir()
    shutil.copytree(checkpoints, tmp_path / "run" / "checkpoints")
    assert pax.find(tmp_path / "run") == pax.PaxDirectory(tmp_path / "run" / "checkpoints")
    assert pax.find(checkpoints) == pax.PaxDirectory(checkpoints)
    assert pax.find(checkpoints / "checkpoint_00000020") == pax.PaxDirectory(checkpoints, 20)
    # Pax reads directories of the bare number, too; this trainer's own have a record.
    (tmp_path / "run" / "checkpoints" / "checkpoint_00000020").rename(tmp_path / "run" / "checkpoints" / "20")
    assert pax.finished_steps(pax.find(tmp_path / "run")) == [20]
    assert pax.find(tmp_path / "nowhere") is None


def test_a_legacy_flax_file_is_a_step(pax_data, tmp_path):
    shutil.copy(pax_data.checkpoints(ADAM, "flax_0.0") / "checkpoint_20" / "checkpoint", tmp_path / "checkpoint_20")
    job = job_on(ADAM, (1, 1, 1))
    assert_holds(restored(tmp_path, job).state, job.partitioner.metadata.variables, pax_data.expected(ADAM))
    assert pax.find(tmp_path / "checkpoint_20") == pax.PaxDirectory(tmp_path, 20)


def test_the_newest_finished_step_is_read(pax_data, tmp_path):
    shutil.copytree(pax_data.checkpoints(ADAFACTOR, "ocdbt_1.2"), tmp_path / "checkpoints")
    (tmp_path / "checkpoints" / "checkpoint_00000040.orbax-checkpoint-tmp-1700000000").mkdir()
    (tmp_path / "checkpoints" / "tmp_1700000000.checkpoint_00000060").mkdir()
    job = job_on(ADAFACTOR, (1, 1, 1))
    assert restored(tmp_path, job).step == 20
    assert restored(tmp_path, job, step=0).step == 0


def test_a_checkpoint_without_optimizer_states_serves_inference(pax_data):
    """TimesFM's checkpoints are like that."""
    job = job_on(ADAM, (1, 8, 1))
    metadata = job.partitioner.layout.without_opt_states()
    directory = pax_data.checkpoints(ADAM, "flax_eval_1.1")
    source = pax.open_source(directory, None, metadata.variables)
    found = restore(source, metadata, partial=True, with_input=False)
    assert_holds(found.state, metadata.variables, pax_data.expected(ADAM))
    with raises_naming(pax.PaxMismatchError, "missing", "opt_states/0/no_prefix/0/count"):
        restored(directory, job)


def test_the_input_continues_where_pax_left_it(pax_data):
    job = job_on(ADAFACTOR, (1, 1, 1))
    assert restored(pax_data.checkpoints(ADAFACTOR, "ocdbt_1.2"), job).input_state == {"state": b"20"}
    assert restored(pax_data.checkpoints(ADAFACTOR, "zarr_1.1"), job).input_state is None


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "bool", "uint32", "float16"])
def test_dtypes_are_kept(tmp_path, dtype):
    import jax.numpy as jnp

    value = np.asarray(jnp.arange(5).astype(dtype))
    write_zarr(tmp_path / "checkpoint_00000003", {"step": np.uint32(3), "mdl_vars.params.w": value})
    array = pax.read_checkpoint(tmp_path).mdl_vars["params"]["w"]
    assert array.dtype == value.dtype
    np.testing.assert_array_equal(np.asarray(array), value)


def test_lists_named_tuples_and_extra_state_have_their_places(tmp_path):
    arrays = {
        "step": np.uint32(1),
        "mdl_vars.params.w": np.ones(2, np.float32),
        "opt_states_0_0.count": np.int32(1),
        "opt_states_0_3.inner_state.mu.params.w": np.ones(2, np.float32),
        "opt_states_1.p#2.3#i0.i-1_2.m.params.w": np.ones((2, 3), np.float32),
        "extra_state_0": np.ones(3, np.float32),
    }
    write_zarr(tmp_path / "checkpoint_00000001", arrays)
    tree = pax.read_checkpoint(tmp_path)
    assert tree.opt_states[0][1] is None
    assert tree.opt_states[0][3]["inner_state"]["mu"]["params"]["w"].shape == (2,)
    assert tree.opt_states[1]["p#2.3#i0.i-1"][2]["m"]["params"]["w"].shape == (2, 3)
    assert tree.extra_state[0].shape == (3,)


@pytest.mark.parametrize(
    "path",
    [
        "step",
        "mdl_vars/params/lm/x_layers_0/w",
        "opt_states/0/2/m/params/lm/x_layers_0/w",
        "opt_states/0/no_prefix/2/v/params/lm/w_0",
        "opt_states/0/p#2#i-1/2/m/params/repeat_1/w",
        "opt_states/1/p#2.3#i0.i-1/0/count",
        "opt_states/0/p#2.3#tsdata,smdl./1/m/w",
    ],
)
def test_a_name_gives_the_path_that_it_was_made_of(path):
    assert contents.path_of(contents.directory_name(path)) == path
    assert contents.path_of(contents.dotted_name(path)) == path


def test_a_printed_structure_gives_the_paths_of_its_leaves():
    state = {"a": [1, None, (2, {"b c": 3})], "it's": (), "z": {}}
    printed = str(jax.tree.structure(state))
    assert flax_file.structure_paths(printed) == ["a/0", "a/2/0", "a/2/1/b c"]
    fields = "*, CustomNode(NestedMap[('p', 'q')], [*, *]), [CustomNode(namedtuple[S], [*])], ()"
    assert flax_file.structure_paths(f"PyTreeDef(CustomNode(TrainState[()], [{fields}]))") == [
        "step",
        "mdl_vars/p",
        "mdl_vars/q",
        "opt_states/0/0",
    ]
    assert flax_file.structure_paths("PyTreeDef(CustomNode(Unknown[<object>], [*") is None


@pytest.mark.parametrize("name", [ADAM, *(pytest.param(n, marks=pytest.mark.full) for n in (ADAFACTOR, EMA))])
@pytest.mark.full
def test_a_converted_checkpoint_is_one_of_ours(pax_data, tmp_path, name):
    source = pax_data.checkpoints(name)
    before = snapshot(source)
    assert pax.convert(source, tmp_path / "checkpoints") == 20
    assert snapshot(source) == before
    job = job_on(name, (2, 2, 2))
    metadata = job.partitioner.metadata
    with Checkpointer(tmp_path / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.all_steps() == [20]
        found = checkpoints.restore(metadata.variables, metadata.mesh)
    assert_holds(found.state, metadata.variables, pax_data.expected(name))
    with pytest.raises(pax.PaxError, match="has a step 20 already"):
        pax.convert(source, tmp_path / "checkpoints")
    with pytest.raises(pax.PaxError, match="only read"):
        pax.convert(source, source / "ours")
