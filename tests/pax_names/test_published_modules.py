"""Every experiment that paxml registers imports and builds, with `paxml` renamed and nothing else."""

import importlib
import sys

import pax_helpers
import pytest

import spmd_trainer
from spmd_trainer.pax import published

TABLE = pax_helpers.pax_table()


def documented():
    text = TABLE.DOCS.read_text().partition(TABLE.BEGIN)[2].partition(TABLE.END)[0]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in text.strip().splitlines()[2:]]


def test_every_module_that_registers_experiments_is_tried():
    folder = published.paxml_folder()
    registering = {
        ".".join(path.relative_to(folder).with_suffix("").parts)
        for path in folder.rglob("*.py")
        if "@experiment_registry.register" in path.read_text() and "test" not in path.stem and path.parent != folder
    }
    assert registering == set(TABLE.MODULES)


def test_the_documentation_has_every_registered_experiment():
    named = [(module, name) for module, name, *_ in documented()]
    assert sorted(named) == sorted((module, name) for module in TABLE.MODULES for name in TABLE.experiments(module))
    trained = {name for _, name, _, _, trains in documented() if trains == "4 steps"}
    assert trained == set(TABLE.TRAINED)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        pytest.param("tasks.lm.params.lm_cloud", "SmallMlp", marks=pytest.mark.full),
        ("tasks.lm.params.c4_multislice", "C4Spmd22BAdam1xv4_8"),
        ("tasks.vision.params.mnist", "MnistExperiment"),
        pytest.param("contrib.gpu.scripts_gpu.configs", "Lambada126M", marks=pytest.mark.full),
    ],
)
def test_an_experiment_builds_as_the_documentation_says(module, name):
    cls = TABLE.experiments(module)[name]
    mesh = ", ".join(f"{axis} {size}" for axis, size in TABLE.build(cls).mesh.items())
    (builds,) = [builds for _, other, _, builds, _ in documented() if other == name]
    assert builds.startswith(f"{mesh}: ")


@pytest.mark.slow
@pytest.mark.parametrize("module", TABLE.MODULES)
def test_the_documentation_has_the_rows_that_the_tool_makes(module):
    assert [row for row in documented() if row[0] == module] == list(TABLE.rows((module,)))


def test_only_import_lines_are_renamed():
    text = "from paxml import x\n  import paxml.y\n# from paxml\nname = 'paxml'\n"
    assert (
        published.renamed(text) == "from spmd_trainer import x\n  import spmd_trainer.y\n# from paxml\nname = 'paxml'\n"
    )


def test_without_paxml_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(published, "paxml_folder", lambda: None)
    for module in ("tasks.lm.params.bert", "automl"):
        monkeypatch.delitem(sys.modules, f"spmd_trainer.{module}", raising=False)
    monkeypatch.delattr(spmd_trainer, "automl", raising=False)
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps paxml"):
        importlib.import_module("spmd_trainer.tasks.lm.params.bert")
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps paxml"):
        from spmd_trainer import automl  # noqa: F401


def test_without_pyglove_the_error_of_automl_says_what_to_install(monkeypatch):
    for module in ("automl", "automl_interfaces"):
        monkeypatch.delitem(sys.modules, f"spmd_trainer.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "pyglove", None)
    with pytest.raises(ModuleNotFoundError) as error:
        importlib.import_module("spmd_trainer.automl")
    assert str(error.value).count("spmd-trainer[pyglove]") == 1


def test_without_seqio_the_error_says_what_to_install(monkeypatch):
    for name in ("seqio", "spmd_trainer.tasks.lm.params.c4"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "seqio", None)
    with pytest.raises(ModuleNotFoundError, match=r"spmd-trainer\[seqio\]"):
        importlib.import_module("spmd_trainer.tasks.lm.params.c4")


def test_paxml_is_never_imported():
    importlib.import_module("spmd_trainer.tasks.lm.params.lm_cloud")
    assert "paxml" not in sys.modules
