"""What a call from Python says reaches the job that it builds."""

import pytest

import spmd_trainer as st
from spmd_trainer import api

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
