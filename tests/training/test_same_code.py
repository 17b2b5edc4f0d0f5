"""Processes with other code, or with another environment that the code reads, are refused."""

import importlib
import sys

import pytest
from facts import raises_naming

from spmd_trainer.errors import UserError
from spmd_trainer.training import same_settings

HELPER = """
import os

SCALE = float(os.environ.get("HELPER_SCALE", "1"))
RANK = os.environ.get("SLURM_PROCID", "0")
"""


@pytest.fixture
def helper(tmp_path, monkeypatch):
    """A module of the user's, imported as a loss would."""
    (tmp_path / "own_helper.py").write_text(HELPER)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("own_helper")
    yield module
    sys.modules.pop("own_helper")


def process_0_has(monkeypatch, change):
    """The other process of a job of two, whose code is this process's after `change`."""
    first = same_settings._code()
    change(first)
    monkeypatch.setattr(same_settings, "joined", lambda: (2, 1))
    monkeypatch.setattr(same_settings, "broadcast", lambda own, name: first)
    monkeypatch.setattr(same_settings, "gather", lambda name, difference: [None, difference])


def test_the_same_code_passes(helper, monkeypatch):
    process_0_has(monkeypatch, lambda code: None)
    same_settings.check_same_code()


def test_a_module_that_only_one_process_has_imported_passes(helper, monkeypatch):
    process_0_has(monkeypatch, lambda code: code.pop("the code of own_helper"))
    same_settings.check_same_code()


def test_another_module_of_the_users_is_named(helper, monkeypatch):
    process_0_has(monkeypatch, lambda code: code.update({"the code of own_helper": "0"}))
    with raises_naming(UserError, "process 1", "process 0", "own_helper"):
        same_settings.check_same_code()


def test_a_variable_that_the_users_code_reads_is_named_without_its_value(helper, monkeypatch):
    process_0_has(monkeypatch, lambda code: None)
    monkeypatch.setenv("HELPER_SCALE", "0.123")
    with raises_naming(UserError, "process 1", "HELPER_SCALE") as caught:
        same_settings.check_same_code()
    assert "0.123" not in str(caught.value)


@pytest.mark.parametrize("variable", ["SLURM_PROCID", "_".join(["NOBODY", "READS", "THIS"])])
def test_other_variables_may_differ(helper, monkeypatch, variable):
    process_0_has(monkeypatch, lambda code: None)
    monkeypatch.setenv(variable, "1")
    same_settings.check_same_code()


def test_paths_may_differ_between_hosts_but_not_be_missing(helper, monkeypatch):
    monkeypatch.setenv("HELPER_SCALE", "/scratch/first")
    process_0_has(monkeypatch, lambda code: None)
    monkeypatch.setenv("HELPER_SCALE", "/scratch/second")
    same_settings.check_same_code()
    monkeypatch.delenv("HELPER_SCALE")
    with raises_naming(UserError, "HELPER_SCALE"):
        same_settings.check_same_code()


def test_what_python_and_packages_hold_is_compared_by_version():
    code = same_settings._code()
    assert "the code of spmd_trainer.errors" in code
    assert not {f"the code of {name}" for name in ("json", "jax", "numpy")} & code.keys()
