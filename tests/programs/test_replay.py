"""`--mode=replay` names the layer, the repetition and the operation that an injected NaN comes from, and leaves the run alone."""

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
from etils import epath
from nan_layers import NanTiny

from spmd_trainer.analysis.nan_origin import Flags, Value
from spmd_trainer.analysis.value_flags import Frame
from spmd_trainer.callbacks import invalid_batches
from spmd_trainer.errors import UserError
from spmd_trainer.metrics.packing import Scalars
from spmd_trainer.metrics.writers import read_metrics
from spmd_trainer.partitioning import shard_map
from spmd_trainer.programs import replay, replay_report, train
from spmd_trainer.programs.job import Job
from spmd_trainer.programs.run_config import make_run_config
from spmd_trainer.sharding.variables import named_leaves

STEP, SAVED = 6, 4
LAYER = "lm/transformer/repeat[{}]/sub/x_layers_0/ff_layer/ffn_layer1/activation"
TESTS = Path(__file__).parents[1]


def make_job(directory, *overrides, exp=NanTiny, **settings):
    return Job.build(make_run_config(exp, directory, overrides=overrides, **settings))


@functools.cache
def wrong_layer():
    """The repetition with the largest `place`, and a number between it and the next."""
    job = make_job("/nowhere")
    state = job.partitioner.initialize_train_state(job.prng_key)
    (place,) = (np.asarray(x) for name, x in named_leaves(state.mdl_vars) if name.endswith("/place"))
    return int(place.argmax()), float(np.sort(place)[-2:].mean())


def overrides(kind):
    return (f"KIND='{kind}'", f"ABOVE={wrong_layer()[1]}")


@functools.cache
def trained(kind):
    """The directory of a run with checkpoints of steps 4 and 8, and the NaN of `kind` at step 6. To be read only."""
    directory = tempfile.mkdtemp(prefix="spmd_trainer_nan_")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    train.train(make_job(directory + "/run", *overrides(kind), "task.train.save_max_to_keep=2"))
    return epath.Path(directory) / "run"


def report(kind, capsys, step=STEP, directory=None, **settings):
    directory = directory or trained(kind)
    capsys.readouterr()
    replay.replay(make_job(directory, *overrides(kind), mode="replay", replay_step=step, **settings))
    return capsys.readouterr().out


def files(directory):
    return {path: Path(path).stat().st_mtime_ns for path in map(str, Path(directory).rglob("*"))}


def test_the_layer_the_repetition_and_the_operation_of_a_nan_are_named(capsys):
    before = files(trained("forward"))
    text = report("forward", capsys)
    assert f"step {STEP} is invalid: loss nan, gradient norm nan" in text
    assert f"the first NaN: forward pass, {LAYER.format(wrong_layer()[0])}\n    div made it of finite values" in text
    assert "nan_layers.py" in text
    assert "the one that the run wrote down; the input gives the same" in text
    assert "new state      finite" in text  # the learner has skipped the step
    assert files(trained("forward")) == before  # nothing of the run is touched


@pytest.mark.slow
def test_a_nan_of_a_gradient_alone_is_named(capsys):
    text = report("backward", capsys)
    assert f"step {STEP} is invalid: loss 4" in text
    assert "the first infinity: backward pass" in text
    assert f"then NaN: backward pass, {LAYER.format(wrong_layer()[0])}\n    mul made it of an infinity" in text
    assert "loss           finite" in text
    # The layers before it, in the order of the backward pass, and none behind it.
    assert "params/lm/softmax/logits_ffn/bias/b" not in text
    assert "ffn_layer1/bias/b: NaN" in text


def test_a_valid_step_is_said_to_be_valid_with_the_numbers_of_the_run(capsys, caplog):
    text = report("forward", capsys, step=8)
    assert "step 8 is valid: loss" in text
    assert "batch: from the input" in text
    assert "when it is taken again" not in caplog.text  # the losses of steps 5 to 8 are those that the run wrote
    written = read_metrics(trained("forward"), "train")
    assert f"loss {written[8]['loss']:g}, gradient norm {written[8]['learning/raw_grad_norm']:g}" in text
    assert written[8]["loss_spikes"] == 0


def test_another_batch_than_the_run_had_is_said(tmp_path, capsys):
    shutil.copytree(trained("forward"), tmp_path / "run")
    job = make_job(tmp_path / "run", *overrides("forward"))
    padded = job.partitioner.pad_inputs_shape_dtype(job.inputs_shape_dtype)
    rows = invalid_batches.read(tmp_path / "run", STEP, padded)
    rows["ids"][0, 0] = (rows["ids"][0, 0] + 1) % 256
    batch = job.partitioner.preprocess_inputs(rows, job.partitioner.inputs_partition_spec(padded))
    invalid_batches.write(epath.Path(tmp_path / "run"), STEP, batch)
    text = report("forward", capsys, directory=tmp_path / "run")
    assert "THE INPUT GIVES ANOTHER ONE (ids differ)" in text
    assert LAYER.format(wrong_layer()[0]) in text


def test_a_variable_that_holds_nan_is_named(capsys, monkeypatch):
    whole = replay._restore

    def with_nan(job, step):
        restored = whole(job, step)
        names = [name for name, _ in named_leaves(restored.state)]
        leaves, treedef = jax.tree.flatten(restored.state)
        index = names.index("mdl_vars/params/lm/final_ln/scale")
        leaves[index] = leaves[index].at[3].set(np.nan)
        return restored.__class__(**{**vars(restored), "state": jax.tree.unflatten(treedef, leaves)})

    monkeypatch.setattr(replay, "_restore", with_nan)
    text = report("forward", capsys, step=5)
    assert "the first NaN: the parameters themselves hold it: variable params/lm/final_ln/scale" in text


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (9, r"--step=9: the run in .* ended at step 8; give 1 to 8"),
        (
            3,
            r"needs a whole checkpoint of step 2 or earlier in .*; there are 4, 8.*the earliest step that can be replayed is 5",
        ),
    ],
)
def test_a_step_that_cannot_be_replayed(step, words, tmp_path, capsys):
    shutil.copytree(trained("forward"), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "0")
    with pytest.raises(UserError, match=words):
        report("forward", capsys, step=step, directory=tmp_path / "run")


def test_a_step_that_the_run_has_not_reached(monkeypatch):
    monkeypatch.setattr(replay.run_directory, "end_of_training", lambda directory: None)  # as if it had been killed
    job = make_job(
        trained("forward"), *overrides("forward"), "task.train.num_train_steps=100", mode="replay", replay_step=20
    )
    with pytest.raises(UserError, match=r"--step=20: the run in .* has written up to step 8; give 1 to 8"):
        replay.replay(job)


def test_a_written_batch_that_is_damaged_or_missing_is_said_and_the_input_is_used(tmp_path, capsys):
    shutil.copytree(trained("forward"), tmp_path / "run")
    file = invalid_batches.batch_file(epath.Path(tmp_path / "run"), STEP)
    file.write_bytes(file.read_bytes()[:100])
    text = report("forward", capsys, directory=tmp_path / "run")
    assert "batch: from the input; what the run wrote down is not used: process 0:" in text
    assert LAYER.format(wrong_layer()[0]) in text


def test_a_step_that_is_finite_with_flags_alone_is_said(tmp_path):
    frame = Frame(results=[0], num_values=1)
    observed = replay.Observed(Flags(frame, {}), [], {"loss": Value((), 0)}, {}, 0)
    text = "\n".join(replay_report.lines(observed, Scalars(float("nan")), 3, make_job(tmp_path).task))
    assert "step 3 is invalid: loss nan" in text
    assert "--check_repeat_every=1 finds out which" in text


def test_any_name_of_a_field_can_be_written(tmp_path):
    batch = {"file": jax.numpy.arange(4), "arr_0": jax.numpy.ones((4, 2), jax.numpy.bfloat16)}
    invalid_batches.write(epath.Path(tmp_path), 1, batch)
    read = invalid_batches.read(epath.Path(tmp_path), 1, batch)
    jax.tree.map(np.testing.assert_array_equal, batch, read)
    with pytest.raises(ValueError, match="holds file as int32; the input gives float32"):
        invalid_batches.read(epath.Path(tmp_path), 1, batch | {"file": jax.numpy.ones(4)})


def test_the_first_batches_that_are_too_large_are_kept_and_leave_room_for_a_nan(tmp_path, caplog):
    limit = "task.train.learner.skip_step_gradient_norm_value=1e-9"  # every step is invalid
    train.train(make_job(tmp_path / "run", limit, "task.train.num_train_steps=4"))
    assert invalid_batches.written_steps(tmp_path / "run") == {1, 2, 3}
    assert "the last of 3 batches that are kept" in caplog.text


class NanTinyByHand(NanTiny):
    """The same with the partitioner that says its collectives itself."""

    def partitioner(self):
        return shard_map.ShardMapPartitioner()


def test_an_input_that_cannot_go_back_is_replaced_by_the_written_batch(tmp_path, capsys):
    fields = ("task.train.enable_input_checkpointing=False", "task.train.num_train_steps=6")
    with pytest.raises(
        UserError, match=r"can't go back to the checkpoint.*the batch of step 5 is not in the run's directory"
    ):
        replay.replay(make_job(trained("forward"), *overrides("forward"), *fields, mode="replay", replay_step=STEP))
    fields = (*overrides("forward"), *fields, "task.train.save_interval_steps=5")
    train.train(make_job(tmp_path / "run", *fields))
    capsys.readouterr()
    replay.replay(make_job(tmp_path / "run", *fields, mode="replay", replay_step=STEP))
    text = capsys.readouterr().out
    assert "the one that the run wrote down; the input can't give it again" in text
    assert f"the first NaN: forward pass, {LAYER.format(wrong_layer()[0])}" in text


@pytest.mark.slow
def test_what_the_learner_makes_of_good_gradients_is_followed(tmp_path, capsys):
    fields = ("task.train.num_train_steps=1", "task.train.learner.optimizer.learning_rate=1e400")
    with pytest.raises(UserError, match="step 1 was not saved"):
        train.train(make_job(tmp_path / "run", *fields))
    replay.replay(make_job(tmp_path / "run", *fields, mode="replay", replay_step=1))
    text = capsys.readouterr().out
    assert "step 1 is taken as valid, and is not: loss 5" in text
    assert "the first NaN: update, the learner\n    mul made it of finite values" in text
    assert "get_learning_rate" in text
    assert "gradients      all 15 are finite" in text


@pytest.mark.slow
def test_the_other_partitioner_names_the_layer_too(tmp_path, capsys):
    fields = (*overrides("forward"), "AT_STEP=1")
    train.train(make_job(tmp_path / "run", *fields, "task.train.num_train_steps=1", exp=NanTinyByHand))
    config = make_run_config(NanTinyByHand, tmp_path / "run", overrides=fields, mode="replay", replay_step=1)
    capsys.readouterr()
    replay.replay(Job.build(config))
    assert f"the first NaN: forward pass, {LAYER.format(wrong_layer()[0])}" in capsys.readouterr().out


def command(*flags):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    return subprocess.run(
        [sys.executable, "-m", "spmd_trainer.main", *flags], env=env, text=True, capture_output=True, timeout=200
    )


def test_flags_of_replay():
    for flags, words in (
        (["--mode=replay"], "--mode=replay needs --step=N"),
        (["--mode=eval", "--step=3"], "--step goes with --mode=replay"),
    ):
        done = command("--exp=lm.stdlib.StdlibBytesTiny", "--job_log_dir=/nowhere", *flags)
        assert (done.returncode, words in done.stderr) == (2, True), done.stderr


@pytest.mark.slow
def test_the_command_names_the_layer(tmp_path):
    layer, above = wrong_layer()
    common = ["--exp=nan_layers.NanTiny", "--exp_module=nan_layers", f"--fdl.set=ABOVE={above}"]
    common += [f"--job_log_dir={tmp_path / 'run'}"]
    done = command(*common)
    assert done.returncode == 0, done.stderr
    assert f"--mode=replay --step={STEP}" in done.stderr
    done = command(*common, "--mode=replay", f"--step={STEP}")
    assert done.returncode == 0, done.stderr
    assert f"the first NaN: forward pass, {LAYER.format(layer)}" in done.stdout
