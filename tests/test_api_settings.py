"""What a call from Python says reaches the job that it builds."""

import numpy as np
import pytest
from facts import raises_naming

import spmd_trainer as st
from spmd_trainer import api
from spmd_trainer.errors import UserError
from spmd_trainer.training.run_config import TrainConfig

EXPERIMENT = "lm.stdlib.StdlibBytesTiny"


class Built(Exception):
    """Ends a call where it builds its job; its argument is the job's config."""


@pytest.fixture
def config_of(monkeypatch):
    """A function from a call to the config of its job."""

    def build(config):
        raise Built(config)

    monkeypatch.setattr(api.launch, "build_job", build)

    def config(call, *args, **settings):
        with pytest.raises(Built) as built:
            call(EXPERIMENT, *args, **settings)
        return built.value.args[0]

    return config


@pytest.mark.parametrize("mesh", ["data:4,mdl:2", {"data": 4, "mdl": 2}, [("data", 4), ("mdl", 2)]])
def test_the_mesh(config_of, mesh, tmp_path):
    for call, args in ((st.inspect, ()), (st.train, (tmp_path,)), (st.evaluate, (tmp_path,))):
        assert [tuple(pair) for pair in config_of(call, *args, mesh=mesh).mesh] == [("data", 4), ("mdl", 2)]
    assert config_of(st.inspect).mesh is None


def test_the_checkpoint(config_of, tmp_path):
    for call in (st.evaluate, st.decode):
        config = config_of(call, tmp_path, restore_checkpoint_dir=tmp_path / "other", restore_checkpoint_step=7)
        assert config.restore_checkpoint_step == 7
        assert config.restore_checkpoint_dir.name == "other"
        assert config.job_log_dir.name == tmp_path.name


def test_trackers_and_the_mode(config_of, tmp_path):
    config = config_of(st.train, tmp_path, track=["tensorboard"])
    assert (config.mode, tuple(config.track)) == ("train", ("tensorboard",))


def test_python_sets_whatever_the_command_line_sets(config_of, tmp_path):
    given = {"num_minibatches": 2, "eval_on_test": False, "hang_seconds": 900, "jax_cache_dir": ""}
    config = config_of(st.train, tmp_path, **given)
    assert {name: getattr(config, name) for name in given} == given
    assert config_of(st.plan, topology="v5e:2x2").topology == "v5e:2x2"
    assert config_of(st.export, tmp_path, tmp_path / "out", checkpoint=True).directory.name == "out"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_minibatch": 2}, ["'num_minibatch'", "did you mean num_minibatches"]),
        ({"num_minibatches": 0}, ["num_minibatches=0", "a whole number, 1 or more"]),
        ({"check_replicas_every": 1.5}, ["check_replicas_every=1.5", "a whole number"]),
        ({"watchdog_seconds": float("nan")}, ["watchdog_seconds=nan", "a number, 0 or more"]),
        ({"eval_on_test": None}, ["eval_on_test=None", "True or False"]),
        ({"hang_seconds": 300}, ["hang_seconds=300", "watchdog_seconds=600"]),
        ({"restore_checkpoint_step": 3}, ["restore_checkpoint_step=3 needs restore_checkpoint_dir"]),
        ({"topology": "v5e:2x2"}, ["--mode=train has no setting 'topology'"]),
        ({"mode": "eval"}, ["'mode'", "'eval'", "hang_seconds"]),
        ({"experiment": "lm"}, ["'experiment'", "'lm'", "hang_seconds"]),
        ({"join": 3}, ["'join'", "3", "hang_seconds"]),
        ({"writes_report": False}, ["'writes_report'", "False", "hang_seconds"]),
        ({"track": [5]}, ["track=[5]", "list of texts"]),
        ({"track": 5}, ["track=5", "list of texts"]),
        ({"mesh": 4}, ["mesh=4", "'data:4,mdl:2'"]),
        ({"mesh": [4]}, ["mesh=[4]", "'data:4,mdl:2'"]),
        ({"overrides": [5]}, ["overrides=[5]", "list of texts"]),
        ({"callbacks": 5}, ["callbacks=5", "list"]),
        ({"restore_checkpoint_dir": 5}, ["restore_checkpoint_dir=5", "text", "Path"]),
        ({"jax_cache_dir": 5}, ["jax_cache_dir=5", "text"]),
        ({"decode_during_train": True}, ["overrides=['task.train.decode_interval_steps=1000']"]),
    ],
)
def test_a_wrong_keyword_is_refused_as_a_flag_is(settings, says, tmp_path):
    with raises_naming(UserError, *says) as error:
        st.train(EXPERIMENT, tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()
    assert "--" not in str(error.value).replace("--mode=train", "")
    assert "writes_reports" not in str(error.value)


def test_arguments_of_other_functions_are_refused(tmp_path):
    with raises_naming(UserError, "topology=5", "text"):
        st.plan(EXPERIMENT, topology=5)
    with raises_naming(UserError, "'job_log_dir'", tmp_path, "mesh"):
        st.plan(EXPERIMENT, job_log_dir=str(tmp_path))
    with raises_naming(UserError, "'directory'", "'out'", "checkpoint"):
        st.export(EXPERIMENT, tmp_path, tmp_path / "out", directory="out")
    with raises_naming(UserError, "dtype=int8", "float32"):
        st.export(EXPERIMENT, tmp_path, tmp_path / "out", dtype="int8")
    for wrong in (None, 5):
        with raises_naming(UserError, "job_log_dir", wrong, "text"):
            st.train(EXPERIMENT, wrong)
    with raises_naming(UserError, "export_dir=5", "text"):
        st.export(EXPERIMENT, tmp_path, 5)


def test_what_processes_and_restarts_compare():
    config = TrainConfig(None, "run", mesh="data:4", eval_on_test=False, track=["wandb"])
    compared = list(config.compared_lines())
    assert "--mesh: (('data', 4),)" in compared
    assert "--eval_on_test: False" in compared
    assert "--hang_seconds: 0.0" in compared
    assert not any("track" in line or "jax_cache_dir" in line for line in compared)
    noted = list(config.noted_lines())
    assert {"--eval_on_test: False", "--hang_seconds: 0.0"} <= set(noted)
    assert not any("mesh" in line or "track" in line for line in noted)


def test_a_number_of_another_kind_is_no_changed_setting():
    whole, typed = (
        TrainConfig(None, "run", hang_seconds=seconds, check_repeat_every=every)
        for seconds, every in ((900, np.int64(3)), (900.0, 3))
    )
    assert whole == typed
    assert list(whole.noted_lines()) == list(typed.noted_lines())
