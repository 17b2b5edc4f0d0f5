"""Whose line is it: the user's, the trainer's, a library's?"""

import json
import pathlib
import sysconfig

import jax.numpy as jnp
import pytest

from spmd_trainer.errors import user_code
from spmd_trainer.sharding import mesh

SITE = pathlib.Path(sysconfig.get_path("purelib"))


def test_libraries_the_trainer_and_the_rest(tmp_path):
    assert user_code.is_users(str(tmp_path / "my_pkg" / "mine.py"))
    for library in (
        json.__file__,
        jnp.__file__,
        str(SITE / "some_pkg" / "x.py"),
        "<string>",
        "<frozen importlib._bootstrap>",
    ):
        assert not user_code.is_users(library)
        assert user_code.is_library(library)
    assert not user_code.is_users(mesh.__file__)
    assert not user_code.is_library(mesh.__file__)


def test_a_wheels_own_files_lie_among_the_packages_and_are_the_trainers_all_the_same(monkeypatch):
    monkeypatch.setattr(user_code, "_TRAINER", SITE / "spmd_trainer")
    monkeypatch.setattr(user_code, "_SHIPPED", SITE / "spmd_trainer" / "experiments")
    user_code.is_users.cache_clear()
    try:
        assert not user_code.is_library(str(SITE / "spmd_trainer" / "training" / "train.py"))
        assert user_code.is_users(str(SITE / "spmd_trainer" / "experiments" / "lm" / "stdlib.py"))
        assert user_code.is_library(str(SITE / "praxis" / "layers" / "linears.py"))
    finally:
        user_code.is_users.cache_clear()


def test_an_installed_package_of_a_user_is_the_users_once_it_is_claimed():
    file = str(SITE / "claimed_pkg" / "mine.py")
    assert not user_code.is_users(file)
    user_code.claim("claimed_pkg.mine")
    assert user_code.is_users(file)


def test_where_names_the_innermost_line_of_the_user_and_falls_back_to_the_class(tmp_path):
    code = "import json\n\ndef f():\n    json.loads('{')\n"
    path = tmp_path / "mine.py"
    path.write_text(code)
    scope = {}
    exec(compile(code, str(path), "exec"), scope)
    with pytest.raises(json.JSONDecodeError) as raised:
        scope["f"]()
    assert user_code.where(raised.value) == f" ({path}:4)"
    wrapped = ValueError("outer")
    wrapped.__cause__ = raised.value
    assert user_code.where(wrapped) == f" ({path}:4)"
    assert user_code.where(ValueError("of nowhere"), type(self_class())).startswith(f" ({__file__}:")
    assert user_code.where(ValueError("of nowhere")) == ""


def self_class():
    class Here:
        pass

    return Here()
