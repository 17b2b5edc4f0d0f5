"""Pax checkpoints that don't fit or are not whole are refused, with the variable, the shapes and the nearest name."""

import json
import os
import re
import shutil

import jax
import numpy as np
import pytest
from facts import assert_names, raises_naming
from flax import serialization
from pax_models import assert_holds, job_on, restored
from pax_writer import rewrite_flax, write_array, write_flax, write_metadata

from spmd_trainer import pax
from spmd_trainer.checkpointing import CheckpointNotFoundError, CheckpointReadError, DamagedCheckpointError
from spmd_trainer.errors import UserError
from spmd_trainer.pax.arrays import read_error

ADAM = "UnevenRepeatedAdam"
W = "mdl_vars.params.lm.softmax.logits_ffn.linear.w"
B = "mdl_vars.params.lm.softmax.logits_ffn.bias.b"
M = "opt_states_0.no_prefix_2.m.params.lm.softmax.logits_ffn.bias.b"


@pytest.fixture
def copied(pax_data, tmp_path):
    """A function that copies a checkpoint and returns the copy's step directory."""

    def copy(kind="zarr_1.1"):
        shutil.copytree(pax_data.checkpoints(ADAM, kind), tmp_path / "checkpoints")
        return next((tmp_path / "checkpoints").iterdir())

    return copy


def refusal(step_dir, **settings):
    """The message with which a checkpoint is refused."""
    with pytest.raises(UserError) as error:
        restored(step_dir.parent, job_on(ADAM, (1, 4, 2)), **settings)
    return str(error.value)


def test_a_missing_leaf(copied):
    step_dir = copied()
    shutil.rmtree(step_dir / "state" / M)
    message = refusal(step_dir)
    assert "1 missing, 0 extra" in message
    assert re.search("missing .*: opt_states/0/no_prefix/2/m/params/lm/softmax/logits_ffn/bias/b", message)
    assert str(step_dir) in message


def test_a_surplus_leaf(copied):
    step_dir = copied()
    write_array(step_dir / "state" / "opt_states_0.no_prefix_2.u.params.lm.final_ln.bias", np.ones(15, np.float32))
    message = refusal(step_dir)
    assert_names(
        message, "0 missing, 1 extra", "opt_states/0/no_prefix/2/u/params/lm/final_ln/bias", "saved (15,) float32"
    )


@pytest.mark.parametrize("kind", ["zarr_1.1", "zarr_0.0"])
def test_a_renamed_leaf_comes_with_its_new_name(copied, kind):
    step_dir = copied(kind)
    folder = step_dir / "state" if kind == "zarr_1.1" else step_dir
    (folder / W).rename(folder / W.replace("linear.w", "linear.kernel"))
    message = refusal(step_dir)
    assert re.search(r"missing .*: mdl_vars/params/lm/softmax/logits_ffn/linear/w\b", message)
    assert "linear/kernel" in message


@pytest.mark.parametrize("name", [B, M])
@pytest.mark.parametrize("shape", [(200,), (300,), (258, 1)])
def test_a_misshapen_leaf(copied, name, shape):
    step_dir = copied()
    write_array(step_dir / "state" / name, np.zeros(shape, np.float32))
    message = refusal(step_dir)
    assert "other shape" in message
    assert f"bias/b, saved {shape} float32, in the model (257,) float32" in message


@pytest.mark.parametrize("shape", [(200,), (300,)])
def test_a_misshapen_leaf_of_a_checkpoint_without_notes(copied, shape):
    """Version 0.0 tells no logical shapes, and old ones no shardings: the shape must be the variable's, padded for some mesh."""
    step_dir = copied("zarr_0.0")
    (step_dir / "_sharding").unlink()
    write_array(step_dir / M, np.zeros(shape, np.float32), [100])
    assert f"bias/b, saved {shape} float32, in the model (257,) float32" in refusal(step_dir)


def test_another_dtype(copied):
    step_dir = copied()
    write_array(step_dir / "state" / B, np.zeros(258, np.float16), [129])
    assert "other dtype: mdl_vars/params/lm/softmax/logits_ffn/bias/b, saved (257,) float16" in refusal(step_dir)


@pytest.mark.parametrize("name", [B, M])
@pytest.mark.parametrize("value", [0.5, np.nan])
def test_padding_that_is_not_zero(copied, pax_data, name, value):
    step_dir = copied()
    padded = np.append(pax_data.expected(ADAM)["state/" + B.replace(".", "/")], np.float32(value)).astype(np.float32)
    write_array(step_dir / "state" / name, padded, [129])
    message = refusal(step_dir)
    assert_names(message, "padding", "not zero")
    assert "bias/b: stored (258,), in the model (257,)" in message
    assert "[257]" in message


def test_a_smaller_model_is_named(copied):
    """The model's vocabulary is checked against the logical shape, not against what padding allows."""
    step_dir = copied()
    content = json.loads((step_dir / "metadata" / "metadata").read_text())
    content["train_state_metadata"]["mdl_vars"]["params"]["lm"]["softmax"]["logits_ffn"]["bias"]["b"][
        "unpadded_shape"
    ] = [258]
    (step_dir / "metadata" / "metadata").write_text(json.dumps(content))
    assert "saved (258,) float32, in the model (257,) float32" in refusal(step_dir)


@pytest.mark.parametrize(
    ("kind", "gone", "says"),
    [
        ("zarr_1.1", "metadata", "no 'metadata'"),
        ("zarr_1.1", "metadata/metadata", "metadata/metadata is missing"),
        ("zarr_1.1", "state", "no 'state'"),
        ("zarr_1.1", f"state/{W}/.zarray", W),
        ("zarr_1.1", f"state/{W}/2.1", W),
        ("zarr_0.0", f"{W}/0.0", W),
        ("ocdbt_1.2", "state/manifest.ocdbt", "manifest.ocdbt"),
        ("ocdbt_1.2", "state/d", "is not complete or is damaged"),
        ("flax_1.1", "state/checkpoint", "holds no arrays"),
    ],
)
def test_a_checkpoint_that_lacks_files(copied, kind, gone, says):
    step_dir = copied(kind)
    path = step_dir / gone
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    with pytest.raises(DamagedCheckpointError) as error:
        restored(step_dir.parent, job_on(ADAM, (1, 4, 2)))
    assert says in str(error.value)
    assert str(step_dir) in str(error.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[" * 200_000 + "]" * 200_000, "deeper"),
        ('{"shape": [1e400]}', "not finite"),
        ("", "empty"),
        ("[1]", "not an object"),
    ],
)
def test_an_array_is_described_by_json_that_is_read_within_limits(copied, content, says):
    step_dir = copied("zarr_1.1")
    (step_dir / "state" / W / ".zarray").write_text(content)
    assert_names(refusal(step_dir), W, says)


def test_a_relative_path(copied, monkeypatch):
    step_dir = copied("zarr_1.1")
    monkeypatch.chdir(step_dir.parent)
    found = jax.tree.leaves(pax.read_checkpoint("."))
    assert np.isfinite(np.asarray(found[-1])).all()


@pytest.mark.parametrize("kind", ["flax_0.0", "flax_1.1"])
def test_a_msgpack_file_that_is_cut_short(copied, kind):
    step_dir = copied(kind)
    file = next(path for path in (step_dir / "checkpoint", step_dir / "state" / "checkpoint") if path.exists())
    file.write_bytes(file.read_bytes()[:50_000])
    assert "cut short" in refusal(step_dir)


@pytest.mark.parametrize(
    "state",
    [
        {"a": 1},
        np.zeros(2),
        {"flattened_state": np.zeros(2), "str_pytree_state": "*"},
        {"flattened_state": {"0": "text"}, "str_pytree_state": "PyTreeDef(*)"},
        {"flattened_state": {"0": np.zeros(2, "M8[ns]")}, "str_pytree_state": "PyTreeDef(*)"},
    ],
)
def test_a_msgpack_file_of_another_program(tmp_path, state):
    (tmp_path / "checkpoint_7").write_bytes(serialization.msgpack_serialize(state))
    assert_names(refusal(tmp_path / "checkpoint_7"), tmp_path / "checkpoint_7", "Pax checkpoint", "msgpack")


def test_a_save_that_was_cut_off(copied):
    step_dir = copied()
    name = "checkpoint_00000020.orbax-checkpoint-tmp-1700000000"
    step_dir.rename(step_dir.parent / name)
    assert name in refusal(step_dir)
    assert_names(refusal(step_dir, step=20), "step 20", name, "cut off")


def test_an_unknown_version(copied):
    step_dir = copied()
    write_metadata(step_dir, 2.5)
    message = refusal(step_dir)
    assert "version 2.5" in message
    assert "0.0, 1.0, 1.1, 1.2" in message


@pytest.mark.parametrize(
    "content",
    [
        '{"version": 1.1, "train_state_metadata": ' + '{"a":' * 200_000,
        '{"version": 1e400}',
        '{"version": 1.1, "train_state_metadata": {"a": {"_array_metadata_tag": true, "unpadded_shape": [1e400]}}}',
        '{"version": 1.1, "train_state_metadata": {"a": {"_array_metadata_tag": true, "unpadded_shape": [2.5]}}}',
        '{"version": 1.1, "train_state_metadata": {"a": {"_array_metadata_tag": true, "unpadded_shape": "34"}}}',
        '{"version": 1.1, "train_state_metadata": [1]}',
        "[1]",
    ],
)
def test_metadata_that_is_absurd_json(copied, content):
    file = copied() / "metadata" / "metadata"
    file.write_text(content)
    with raises_naming(DamagedCheckpointError, file) as raised:
        restored(file.parents[2], job_on(ADAM, (1, 4, 2)))
    assert raised.value.exit_status == 5


def test_a_deep_note_of_shardings_only_narrows_the_shapes(copied):
    step_dir = copied()
    (step_dir / "state" / "_sharding").write_text('{"a":' * 200_000)
    assert restored(step_dir.parent, job_on(ADAM, (1, 4, 2))).step == 20


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("zarr_1.1", "metadata/metadata"),
        ("zarr_1.1", f"state/{W}/2.1"),
        ("ocdbt_1.2", "state/manifest.ocdbt"),
        ("flax_1.1", "state/checkpoint"),
    ],
)
def test_a_named_pipe_is_not_waited_for(copied, kind, name):
    path = copied(kind) / name
    path.unlink()
    os.mkfifo(path)
    with raises_naming(DamagedCheckpointError, path, "named pipe"):
        restored(path.parents[len(name.split("/"))], job_on(ADAM, (1, 4, 2)))


def test_version_1_0_has_no_logical_shapes(copied):
    step_dir = copied()
    write_metadata(step_dir, 1.0)
    assert restored(step_dir.parent, job_on(ADAM, (1, 4, 2))).step == 20


def test_a_step_that_is_not_there_is_not_called_damaged(copied):
    step_dir = copied()
    with pytest.raises(CheckpointNotFoundError, match=r"no step 21 in .*; there are 20") as error:
        restored(step_dir.parent, job_on(ADAM, (1, 4, 2)), step=21)
    assert not isinstance(error.value, DamagedCheckpointError)
    with raises_naming(CheckpointNotFoundError, "step 21", "step 20", step_dir.parent):
        restored(step_dir, job_on(ADAM, (1, 4, 2)), step=21)
    with raises_naming(CheckpointNotFoundError, step_dir / "metadata", "no Pax checkpoint"):
        pax.read_checkpoint(step_dir / "metadata")


def test_flax_leaves_of_another_order(copied):
    """Leaves go by position; the printed structure tells if a position holds another variable."""
    step_dir = copied("flax_1.1")

    def rename(content):
        content["str_pytree_state"] = content["str_pytree_state"].replace("'final_ln'", "'last_ln'", 1)

    rewrite_flax(step_dir / "state" / "checkpoint", rename)
    message = refusal(step_dir)
    assert re.search("missing .*: mdl_vars/params/lm/final_ln/bias", message)
    assert "mdl_vars/params/lm/last_ln/bias" in message


def test_flax_leaves_of_another_optimizer(copied):
    step_dir = copied("flax_1.1")

    def rename(content):
        content["str_pytree_state"] = content["str_pytree_state"].replace("'m', 'v'", "'mu', 'nu'")

    rewrite_flax(step_dir / "state" / "checkpoint", rename)
    message = refusal(step_dir)
    assert re.search("missing .*: opt_states/0/no_prefix/2/m/params/lm/final_ln/bias", message)
    assert re.search("nearest .*opt_states/0/no_prefix/2/mu/params/lm/final_ln/bias", message)


def test_flax_leaves_whose_structure_is_not_understood_go_by_position(copied, pax_data):
    step_dir = copied("flax_1.1")

    def forget(content):
        content["str_pytree_state"] = "PyTreeDef(...)"

    rewrite_flax(step_dir / "state" / "checkpoint", forget)
    job = job_on(ADAM, (1, 4, 2))
    assert_holds(restored(step_dir.parent, job).state, job.partitioner.metadata.variables, pax_data.expected(ADAM))

    def shorten(content):
        content["flattened_state"].pop()

    rewrite_flax(step_dir / "state" / "checkpoint", shorten)
    assert_names(refusal(step_dir), "53 arrays", "by position", 54, 16)


def test_a_variable_that_only_the_metadata_has(copied, tmp_path):
    """Without a model, too: it must not be left out of a converted checkpoint in silence."""
    step_dir = copied()
    (step_dir / "state" / W).rename(step_dir / "state" / W.replace("linear.w", "linear.v"))
    path = "mdl_vars/params/lm/softmax/logits_ffn/linear"
    for use in (pax.read_checkpoint, lambda directory: pax.convert(directory, tmp_path / "ours")):
        with pytest.raises(pax.PaxDamagedError, match=rf"its metadata lists {path}/w, .*; did you mean .*{path}/v"):
            use(step_dir)


def test_large_arrays_of_flax_are_in_chunks(tmp_path, monkeypatch):
    from flax import serialization

    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 64)
    value = np.arange(60, dtype=np.float32).reshape(3, 20)
    structure = "PyTreeDef(CustomNode(TrainState[()], [*, {'params': {'w': *}}, [{}], ()]))"
    write_flax(tmp_path / "checkpoint_5" / "checkpoint", [np.uint32(5), value], structure)
    tree = pax.read_checkpoint(tmp_path)
    assert int(np.asarray(tree.step)) == 5
    np.testing.assert_array_equal(np.asarray(tree.mdl_vars["params"]["w"]), value)
    np.testing.assert_array_equal(tree.mdl_vars["params"]["w"][1, 5:9], value[1, 5:9])


def test_converting_without_a_model_asks_for_one_where_padding_is_unknown(copied, tmp_path):
    """Version 1.0 does not tell the logical shapes of split variables."""
    step_dir = copied()
    write_metadata(step_dir, 1.0)
    with raises_naming(pax.PaxMismatchError, "padding", "bias/b (258,)", "--exp=NAME"):
        pax.convert(step_dir.parent, tmp_path / "ours")
    metadata = job_on(ADAM, (1, 4, 2)).partitioner.metadata
    assert pax.convert(step_dir, tmp_path / "ours", variables=metadata.variables, mesh=metadata.mesh) == 20


def test_a_database_that_is_cut_short_is_damaged(copied):
    step_dir = copied("ocdbt_1.2")
    largest = max((step_dir / "state").rglob("d/*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    with raises_naming(DamagedCheckpointError, step_dir.parent, "not complete", "damaged"):
        restored(step_dir.parent, job_on(ADAM, (1, 4, 2)))


def test_a_disk_that_does_not_answer_is_no_damage():
    error = read_error(ValueError('UNKNOWN: Error reading local file "x" [os_error_code=5]'), "w", "step 1")
    assert isinstance(error, CheckpointReadError)
