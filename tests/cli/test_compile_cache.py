"""Where compiled programs are kept from one run to the next."""

import os
import pathlib
import stat

import jax
import pytest
from facts import assert_names

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


def folder(tmp_path, mode=0o700, entry=0o600):
    path = tmp_path / "shared"
    path.mkdir()
    (path / "jit_step-0123-cache").write_bytes(b"a program")
    (path / "jit_step-0123-cache").chmod(entry)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("mode", "entry", "culprit"),
    [(0o777, 0o600, "shared"), (0o1777, 0o600, "shared"), (0o770, 0o600, "shared"), (0o755, 0o664, "cache")],
)
@pytest.mark.parametrize("told", ["by the flag", "by JAX's setting"])
def test_where_others_may_write_nothing_is_read(tmp_path, caplog, mode, entry, culprit, told):
    path = folder(tmp_path, mode, entry)
    if told == "by JAX's setting":
        jax.config.update("jax_compilation_cache_dir", str(path))
    assert launch.enable_compile_cache(str(path) if told == "by the flag" else None) is None
    assert jax.config.jax_compilation_cache_dir is None
    assert_names(
        caplog.text, path if culprit == "shared" else path / "jit_step-0123-cache", "chmod", "--jax_cache_dir=DIR"
    )
    assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.parametrize(("mode", "entry"), [(0o700, 0o666), (0o755, 0o644), (0o750, 0o646)])
def test_where_nobody_else_can_write_the_cache_is_used(tmp_path, caplog, mode, entry):
    path = str(folder(tmp_path, mode, entry))
    assert launch.enable_compile_cache(path) == jax.config.jax_compilation_cache_dir == path
    assert not caplog.text


@pytest.mark.parametrize("whose", ["the folder", "an entry"])
def test_what_another_user_wrote_is_not_read(tmp_path, caplog, monkeypatch, whose):
    path = folder(tmp_path)
    theirs = path if whose == "the folder" else path / "jit_step-0123-cache"
    real = pathlib.Path.stat

    def owned(self, **settings):
        found = list(real(self, **settings))
        found[stat.ST_UID] = 12345 if self == theirs else os.getuid()
        return os.stat_result(found)

    monkeypatch.setattr(pathlib.Path, "stat", owned)  # only root could make such files
    assert launch.enable_compile_cache(str(path)) is None
    assert_names(caplog.text, theirs, 12345)


def test_a_directory_of_an_unknown_scheme_is_refused():
    with pytest.raises(UserError, match="--jax_cache_dir=hdfs://x/y: hdfs:// is no storage"):
        launch.enable_compile_cache("hdfs://x/y")
