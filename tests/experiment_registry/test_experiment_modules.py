"""From a name to an experiment: each way in which a name can be wrong has a message of its own."""

import importlib
import pathlib
import sys
from collections.abc import Iterator

import pytest
from facts import assert_names, raises_naming

from spmd_trainer import experiment_modules, experiment_registry
from spmd_trainer.errors import UserError

EXPERIMENTS = """
from spmd_trainer import base_experiment, experiment_registry


class Base(base_experiment.BaseExperiment):
    def datasets(self):
        return []

    def task(self):
        return None


@experiment_registry.register
class Mine(Base):
    '''My own.'''


class Forgotten(Base):
    pass


@experiment_registry.register
class Unfinished(base_experiment.BaseExperiment):
    def datasets(self):
        return []


class Other:
    pass
"""


@pytest.fixture
def project(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A folder with a user's package, on Python's path; the names in it are this test's alone, and leave with it."""
    package = f"pkg_{tmp_path.name.replace('-', '_')}"
    folder = tmp_path / package
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "mine.py").write_text(EXPERIMENTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for names in experiment_registry._full_names_by_key.values():
        names[:] = [name for name in names if not name.startswith(f"{package}.")]


def message(name: str) -> str:
    with pytest.raises(UserError) as raised:
        experiment_registry.get(name)
    return str(raised.value)


def test_an_experiment_of_a_users_package_is_found_by_its_name(project):
    cls = experiment_registry.get(f"{project.name}.mine.Mine")
    assert cls.__doc__ == "My own."
    assert experiment_registry.get("mine.Mine") is cls


def test_a_missing_package_names_the_working_directory_and_the_nearest(project):
    text = message(f"{project.name[:-1]}.mine.Mine")
    assert_names(text, f"no package {project.name[:-1]!r}", project.parent, f"mean {project.name}?")


def test_a_mistyped_module_names_the_nearest_one(project):
    assert_names(message(f"{project.name}.mime.Mine"), f"no module {project.name}.mime", project)
    assert f"did you mean {project.name}.mine?" in message(f"{project.name}.mime.Mine")


def test_a_mistyped_class_names_the_nearest_one_and_its_file(project):
    text = message(f"{project.name}.mine.Mime")
    assert f"did you mean {project.name}.mine.Mine?" in text
    assert str(project / "mine.py") in text


def test_a_forgotten_register_says_where_to_put_it(project):
    text = message(f"{project.name}.mine.Forgotten")
    assert_names(text, "not registered", "@experiment_registry.register")
    assert f"{project / 'mine.py'}:18" in text


def test_a_class_that_is_no_experiment(project):
    assert_names(message(f"{project.name}.mine.Other"), "no experiment", "base_experiment.BaseExperiment")


def test_an_import_that_fails_inside_is_shown_with_the_users_line(project):
    (project / "broken.py").write_text("import os\nimport numppy\n")
    text = message(f"{project.name}.broken.Mine")
    assert_names(text, "ModuleNotFoundError", "'numppy'")
    assert f"{project / 'broken.py'}:2" in text
    (project / "syntax.py").write_text("x = 1\ndef f(:\n")
    assert f"{project / 'syntax.py'}:2" in message(f"{project.name}.syntax.Mine")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("..", "is not of the form module.Class"),
        ("my pkg.X", "is not of the form module.Class"),
        ("my_pkg/mine.py", "--exp=my_pkg.mine.MyExperiment"),
        ("/", "is not of the form module.Class"),
        (".py", "is not of the form module.Class"),
        ("x" * 5000, "no experiment is registered as"),
    ],
)
def test_what_is_no_name_at_all(name, says):
    assert says in message(name)


@pytest.mark.parametrize("name", ["../beside.py", "~/beside.py", "/elsewhere/beside.py"])
def test_a_file_outside_the_working_directory_is_named_from_its_own_folder(name, project, monkeypatch):
    monkeypatch.setenv("HOME", str(project.parent.parent))
    monkeypatch.chdir(project)
    folder = {"..": project.parent, "~": project.parent.parent}.get(name.split("/")[0], pathlib.Path("/elsewhere"))
    text = message(name)
    assert_names(text, folder, "--exp=beside.MyExperiment")


def test_all_modules_of_a_package_are_imported_and_the_broken_ones_named(project):
    (project / "broken.py").write_text("raise RuntimeError('no luck')\n")
    (project / "__main__.py").write_text("raise SystemExit('a program, not to be run')\n")
    with raises_naming(UserError, f"{project.name}.broken", "RuntimeError", "no luck"):
        experiment_modules.import_package(project.name)
    assert f"{project.name}.mine.Mine" in experiment_registry.get_all()


def test_a_package_called_experiments_and_the_shipped_ones_live_side_by_side(project, monkeypatch):
    own = project.parent / "experiments"
    (own / "lm").mkdir(parents=True)
    (own / "__init__.py").write_text("")
    (own / "lm" / "__init__.py").write_text("")
    (own / "lm" / "stdlib.py").write_text(EXPERIMENTS)
    monkeypatch.delitem(sys.modules, "experiments", raising=False)
    for name in [name for name in sys.modules if name.startswith("experiments.")]:
        monkeypatch.delitem(sys.modules, name)
    assert experiment_registry.get("experiments.lm.stdlib.Mine").__module__ == "experiments.lm.stdlib"
    assert experiment_registry.get("lm.stdlib.StdlibBytesTiny").__module__ == "spmd_trainer.experiments.lm.stdlib"


def test_running_a_notebooks_cell_again_is_no_error():
    cell = "@register\nclass CellExperiment:\n    '''{}'''\n"
    for text in ("first", "second"):
        exec(cell.format(text), {"register": experiment_registry.register, "__name__": "__main__"})
    assert experiment_registry.get("__main__.CellExperiment").__doc__ == "second"


def test_entry_points_announce_experiments(project, monkeypatch):
    metadata = project.parent / "announced-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: announced\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[spmd_trainer.experiments]\nx = {project.name}\n")
    assert project.name in experiment_modules.packages()
    assert experiment_modules.import_packages() == []
    assert f"{project.name}.mine.Mine" in experiment_registry.get_all()


def test_two_classes_of_one_name_in_a_file_are_refused(project):
    twice = EXPERIMENTS + "\n\n@experiment_registry.register\nclass Mine(Base):\n    pass\n"
    (project / "twice.py").write_text(twice)
    assert "is registered already" in message(f"{project.name}.twice.Mine")


def test_a_reloaded_module_replaces_its_experiments(project):
    first = experiment_registry.get(f"{project.name}.mine.Mine")
    importlib.reload(sys.modules[f"{project.name}.mine"])
    second = experiment_registry.get(f"{project.name}.mine.Mine")
    assert first is not second


def test_a_script_of_a_shipped_folders_name_is_not_run(project, monkeypatch):
    (project.parent / "lm.py").write_text("raise SystemExit('I was run')\n")
    monkeypatch.delitem(sys.modules, "lm", raising=False)
    assert experiment_registry.get("lm.stdlib.StdlibBytesTiny").__name__ == "StdlibBytesTiny"


def test_a_package_that_exits_is_named_and_the_others_are_imported(project):
    (project / "exits").mkdir()
    (project / "exits" / "__init__.py").write_text("raise SystemExit(0)\n")
    with pytest.raises(UserError, match=r"exits failed: SystemExit"):
        experiment_modules.import_package(project.name)
    assert f"{project.name}.mine.Mine" in experiment_registry.get_all()


def test_a_module_given_for_a_class(project):
    # One of a user, a shipped one, and one that an installed paxml has.
    for name in (f"{project.name}.mine", "lm.stdlib", "spmd_trainer.tasks.lm.params.lm_cloud"):
        assert_names(message(name), name, "is a module")
