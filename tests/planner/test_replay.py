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
from facts import assert_names, raises_naming
from nan_layers import NanTiny

from spmd_trainer.errors import UserError
from spmd_trainer.planner import replay, replay_report
from spmd_trainer.planner.nan_origin import Flags, Value
from spmd_trainer.planner.value_flags import Frame
from spmd_trainer.sharding.variables import named_leaves
from spmd_trainer.step import shard_map
from spmd_trainer.step.packing import Scalars
from spmd_trainer.training import start_up, train
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import make_run_config
from spmd_trainer.training.summary_writers import read_metrics
from spmd_trainer.watch import invalid_batches

STEP, SAVED = 6, 4
LAYER = "lm/transformer/repeat[{}]/sub/x_layers_0/ff_layer/ffn_layer1/activation"
TESTS = Path(__file__).parents[1]


def make_job(directory, *overrides, exp=NanTiny, **settings):
    return Job.build(make_run_config(exp, directory, overrides=overrides, **settings))


def test_a_replay_gets_the_batches_of_training(tmp_path):
    job = make_job(tmp_path / "run", mode="replay", replay_step=1)
    expected = job.build_train_input().get_next()
    with start_up.train_batches(job, None) as batches:
        found = next(batches)
    jax.tree.map(np.testing.assert_array_equal, dict(found.batch), dict(expected))


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


def origin(text, what):
    """What a report says of where `what` began: the pass and the layer, and the operation in the line below."""
    return "\n".join(text.partition(f"{what}: ")[2].splitlines()[:2])


def files(directory):
    return {path: Path(path).stat().st_mtime_ns for path in map(str, Path(directory).rglob("*"))}


@pytest.mark.full
def test_the_layer_the_repetition_and_the_operation_of_a_nan_are_named(capsys):
    before = files(trained("forward"))
    text = report("forward", capsys)
    assert_names(text, f"step {STEP} is invalid", "loss nan", "gradient norm nan")
    layer = LAYER.format(wrong_layer()[0])
    assert_names(origin(text, "first NaN"), f"forward pass, {layer}\n", "div", "finite values", "nan_layers.py")
    assert_names(text, "run wrote down", "gives the same")
    assert "new state      finite" in text  # the learner has skipped the step
    assert files(trained("forward")) == before  # nothing of the run is touched


@pytest.mark.slow
def test_a_nan_of_a_gradient_alone_is_named(capsys):
    text = report("backward", capsys)
    assert f"step {STEP} is invalid: loss 4" in text
    assert_names(origin(text, "first infinity"), "backward pass")
    layer = LAYER.format(wrong_layer()[0])
    assert_names(origin(text, "then NaN"), f"backward pass, {layer}\n", "mul", "an infinity")
    assert "loss           finite" in text
    # The layers before it, in the order of the backward pass, and none behind it.
    assert "params/lm/softmax/logits_ffn/bias/b" not in text
    assert "ffn_layer1/bias/b: NaN" in text


@pytest.mark.full
def test_a_valid_step_is_said_to_be_valid_with_the_numbers_of_the_run(capsys, caplog):
    text = report("forward", capsys, step=8)
    assert "step 8 is valid: loss" in text
    assert_names(text, "batch: from the")
    assert "taken again" not in caplog.text  # the losses of steps 5 to 8 are those that the run wrote
    written = read_metrics(trained("forward"), "train")
    assert f"loss {written[8]['loss']:g}, gradient norm {written[8]['learning/raw_grad_norm']:g}" in text
    assert written[8]["loss_spikes"] == 0


@pytest.mark.full
def test_another_batch_than_the_run_had_is_said(tmp_path, capsys):
    shutil.copytree(trained("forward"), tmp_path / "run")
    job = make_job(tmp_path / "run", *overrides("forward"))
    padded = job.partitioner.layout.pad_inputs_shape_dtype(job.inputs_shape_dtype)
    rows = invalid_batches.read(tmp_path / "run", STEP, padded)
    rows["ids"][0, 0] = (rows["ids"][0, 0] + 1) % 256
    batch = job.partitioner.layout.put(rows)
    invalid_batches.write(epath.Path(tmp_path / "run"), STEP, batch)
    text = report("forward", capsys, directory=tmp_path / "run")
    assert_names(text, "another one (ids differ)")
    assert LAYER.format(wrong_layer()[0]) in text


@pytest.mark.full
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
    assert_names(origin(text, "first NaN"), "the parameters", "variable params/lm/final_ln/scale")


@pytest.mark.full
@pytest.mark.parametrize(
    ("step", "facts"),
    [
        (9, ("--step=9", "ended at step 8", "1 to 8")),
        (
            3,
            ("--step=3", "step 2", "there are 4, 8", "task.train.save_max_to_keep=2", "earliest step", "replayed is 5"),
        ),
    ],
)
def test_a_step_that_cannot_be_replayed(step, facts, tmp_path, capsys):
    shutil.copytree(trained("forward"), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "0")
    with raises_naming(UserError, tmp_path / "run", *facts):
        report("forward", capsys, step=step, directory=tmp_path / "run")


@pytest.mark.full
def test_a_step_that_the_run_has_not_reached(monkeypatch):
    monkeypatch.setattr(replay.run_directory, "end_of_training", lambda directory: None)  # as if it had been killed
    job = make_job(
        trained("forward"), *overrides("forward"), "task.train.num_train_steps=100", mode="replay", replay_step=20
    )
    with raises_naming(UserError, "--step=20", trained("forward"), "up to step 8", "1 to 8"):
        replay.replay(job)


@pytest.mark.full
def test_a_written_batch_that_is_damaged_or_missing_is_said_and_the_input_is_used(tmp_path, capsys):
    shutil.copytree(trained("forward"), tmp_path / "run")
    file = invalid_batches.batch_file(epath.Path(tmp_path / "run"), STEP)
    file.write_bytes(file.read_bytes()[:100])
    text = report("forward", capsys, directory=tmp_path / "run")
    assert_names(text, "batch: from the", "not used: process 0:")
    assert LAYER.format(wrong_layer()[0]) in text


@pytest.mark.full
def test_a_step_that_is_finite_with_flags_alone_is_said(tmp_path):
    frame = Frame(results=[0], num_values=1)
    observed = replay.Observed(Flags(frame, {}), [], {"loss": Value((), 0)}, {}, 0)
    text = "\n".join(replay_report.lines(observed, Scalars(float("nan")), 3, make_job(tmp_path).task))
    assert_names(text, "step 3 is invalid", "loss nan", "--check_repeat_every=1 finds out")


def test_any_name_of_a_field_can_be_written(tmp_path):
    batch = {"file": jax.numpy.arange(4), "arr_0": jax.numpy.ones((4, 2), jax.numpy.bfloat16)}
    invalid_batches.write(epath.Path(tmp_path), 1, batch)
    read = invalid_batches.read(epath.Path(tmp_path), 1, batch)
    jax.tree.map(np.testing.assert_array_equal, batch, read)
    with raises_naming(ValueError, tmp_path, "file as int32", "gives float32"):
        invalid_batches.read(epath.Path(tmp_path), 1, batch | {"file": jax.numpy.ones(4)})


@pytest.mark.full
def test_the_first_batches_that_are_too_large_are_kept_and_leave_room_for_a_nan(tmp_path, caplog):
    limit = "task.train.learner.skip_step_gradient_norm_value=1e-9"  # every step is invalid
    train.train(make_job(tmp_path / "run", limit, "task.train.num_train_steps=4"))
    assert invalid_batches.written_steps(tmp_path / "run") == {1, 2, 3}
    assert_names(caplog.text, "last of 3 batches")


class NanTinyByHand(NanTiny):
    """The same with the partitioner that says its collectives itself."""

    def partitioner(self):
        return shard_map.ShardMapPartitioner()


@pytest.mark.full
def test_an_input_that_cannot_go_back_is_replaced_by_the_written_batch(tmp_path, capsys):
    fields = ("task.train.enable_input_checkpointing=False", "task.train.num_train_steps=6")
    with raises_naming(UserError, "training input", "no saved position", "batch of step 5", trained("forward")):
        replay.replay(make_job(trained("forward"), *overrides("forward"), *fields, mode="replay", replay_step=STEP))
    fields = (*overrides("forward"), *fields, "task.train.save_interval_steps=5")
    train.train(make_job(tmp_path / "run", *fields))
    capsys.readouterr()
    replay.replay(make_job(tmp_path / "run", *fields, mode="replay", replay_step=STEP))
    text = capsys.readouterr().out
    assert_names(text, "run wrote down", "can't give it")
    assert_names(origin(text, "first NaN"), f"forward pass, {LAYER.format(wrong_layer()[0])}")


@pytest.mark.slow
def test_what_the_learner_makes_of_good_gradients_is_followed(tmp_path, capsys):
    fields = ("task.train.num_train_steps=1", "task.train.learner.optimizer.learning_rate=1e400")
    with pytest.raises(UserError, match="step 1 was not saved"):
        train.train(make_job(tmp_path / "run", *fields))
    replay.replay(make_job(tmp_path / "run", *fields, mode="replay", replay_step=1))
    text = capsys.readouterr().out
    assert_names(text, "step 1", "taken as valid", "is not: loss 5")
    assert_names(origin(text, "first NaN"), "update, the learner\n", "mul", "finite values")
    assert "get_learning_rate" in text
    assert "gradients      all 15 are finite" in text


@pytest.mark.slow
def test_the_other_partitioner_names_the_layer_too(tmp_path, capsys):
    fields = (*overrides("forward"), "AT_STEP=1")
    train.train(make_job(tmp_path / "run", *fields, "task.train.num_train_steps=1", exp=NanTinyByHand))
    config = make_run_config(NanTinyByHand, tmp_path / "run", overrides=fields, mode="replay", replay_step=1)
    capsys.readouterr()
    replay.replay(Job.build(config))
    assert_names(origin(capsys.readouterr().out, "first NaN"), f"forward pass, {LAYER.format(wrong_layer()[0])}")


def command(*flags):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    return subprocess.run(
        [sys.executable, "-m", "spmd_trainer.main", *flags], env=env, text=True, capture_output=True, timeout=200
    )


@pytest.mark.full
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
    assert_names(origin(done.stdout, "first NaN"), f"forward pass, {LAYER.format(layer)}")
