"""Where compiled programs are kept from one run to the next."""

import os
import stat

import jax
import pytest

from spmd_trainer.cli import launch
from spmd_trainer.errors import UserError

SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_enable_compilation_cache")


@pytest.fixture(autouse=True)
def untouched(monkeypatch, tmp_path):
    """As on a user's machine: JAX was told nothing, and the home folder is empty."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_it_is_on_without_being_asked_for_and_private(tmp_path):
    path = launch.enable_compile_cache(None)
    assert path == jax.config.jax_compilation_cache_dir == str(tmp_path / "cache/spmd-trainer/jax")
    assert stat.S_IMODE(os.stat(path).st_mode) & 0o077 == 0
    assert jax.config.jax_persistent_cache_min_compile_time_secs < 0.5, "steps of small models are kept too"


def test_without_xdg_it_is_in_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert launch.enable_compile_cache(None) == str(tmp_path / "home/.cache/spmd-trainer/jax")


def test_what_jax_was_told_comes_first(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    assert launch.enable_compile_cache(None) == str(tmp_path / "own")
    assert not (tmp_path / "cache").exists()


def test_a_threshold_that_jax_was_told_stays(monkeypatch):
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "7")
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    launch.enable_compile_cache(None)
    assert jax.config.jax_persistent_cache_min_compile_time_secs == before


def test_the_flag_comes_before_what_jax_was_told(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    assert launch.enable_compile_cache(str(tmp_path / "given")) == str(tmp_path / "given")


def test_it_can_be_switched_off(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    assert launch.enable_compile_cache("") is None
    assert jax.config.jax_compilation_cache_dir is None
    jax.config.update("jax_enable_compilation_cache", False)
    assert launch.enable_compile_cache(None) is None
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_cannot_be_made_is_a_warning(caplog, tmp_path):
    (tmp_path / "file").write_text("")
    assert launch.enable_compile_cache(str(tmp_path / "file" / "cache")) is None
    assert jax.config.jax_compilation_cache_dir is None
    assert "--jax_cache_dir=DIR" in caplog.text


def test_a_directory_of_an_unknown_scheme_is_refused():
    with pytest.raises(UserError, match="--jax_cache_dir=hdfs://x/y: hdfs:// is no storage"):
        launch.enable_compile_cache("hdfs://x/y")
