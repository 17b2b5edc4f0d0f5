"""Names of experiments."""

import subprocess
import sys
import types

import pytest

from spmd_trainer import experiment_registry


def make(module: str, name: str, **kwargs) -> type:
    cls = types.new_class(name)
    cls.__module__ = module
    return experiment_registry.register(cls, **kwargs)


def test_full_name_tail_and_short_form_without_params():
    cls = make("pkg.tasks.lm.params.cloud", "Registered2B")
    for name in (
        "pkg.tasks.lm.params.cloud.Registered2B",
        "params.cloud.Registered2B",
        "Registered2B",
        "lm.cloud.Registered2B",
        "pkg.tasks.lm.cloud.Registered2B",
    ):
        assert experiment_registry.get(name) is cls


def test_two_of_a_name_must_be_told_apart():
    first, second = make("pkg.a", "Twin"), make("pkg.b", "Twin")
    with pytest.raises(ValueError, match=r"pkg\.a\.Twin.*pkg\.b\.Twin"):
        experiment_registry.get("Twin")
    assert experiment_registry.get("a.Twin") is first
    assert experiment_registry.get("b.Twin") is second


def test_registering_again_needs_allow_overwrite():
    make("pkg.c", "Again", tags=["x"])
    with pytest.raises(ValueError, match="registered already"):
        make("pkg.c", "Again")
    newer = make("pkg.c", "Again", tags=["y"], allow_overwrite=True)
    assert experiment_registry.get("c.Again") is newer
    assert experiment_registry.get_registry_tags("pkg.c.Again") == ["y"]


def test_unknown_name_names_the_nearest():
    with pytest.raises(ValueError, match=r"lm\.stdlib\.StdlibBytes\b"):
        experiment_registry.get("lm.stdlib.StdlibByte")


@pytest.mark.full
def test_modules_are_imported_when_asked_for_and_print_nothing():
    code = (
        "from spmd_trainer import experiment_registry as r; assert not r.get_all();"
        "assert r.get('lm.stdlib.StdlibBytesTiny').__module__ == 'spmd_trainer.experiments.lm.stdlib'"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
