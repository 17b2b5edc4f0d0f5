"""--mode=port: what a file written for paxml needs here, without importing anything of the file."""

import ast
import importlib
import importlib.util
import pathlib
import subprocess
import textwrap
import types

import pytest
from facts import assert_names, raises_naming

from spmd_trainer import main
from spmd_trainer.errors import UserError
from spmd_trainer.pax import port, port_names, port_settings, port_source, published
from spmd_trainer.training.mode_configs import PortConfig

PAXML = pathlib.Path(importlib.util.find_spec("praxis").origin).parents[1] / "paxml"
PUBLISHED = sorted(path for path in PAXML.glob("tasks/*/params/*.py") if not path.stem.endswith("_test"))


def report(directory: pathlib.Path, text: str) -> port.Report:
    """The report of a file with this text."""
    path = directory / "mine.py"
    path.write_text(textwrap.dedent(text))
    return port.Report.of_file(path)


def found(findings):
    """(line, name, whether it blocks) of each finding."""
    return [(finding.line, finding.name, finding.blocks) for finding in findings]


# Its imports are those of a generated ci_configs.py: names of paxml's modules in one line, bases from tasks/.
CI_CONFIGS = """\
import math
from paxml import tasks_lib, experiment_registry
from paxml.tasks.lm.params.lm_cloud import (
    SyntheticDataset,
    LmCloudTransformerAdam,
)
from praxis import base_layer, layers

open("imported", "w")

@experiment_registry.register
class Small(LmCloudTransformerAdam, SyntheticDataset):
  def task(self):
    task_p = super().task()
    task_p.train.always_use_train_for_model_init = False
    task_p.train.num_train_steps = math.ceil(9.5)
    task_p.model.params_init = base_layer.WeightInit.Gaussian(0.02)
    return task_p
"""


def test_a_file_whose_names_are_all_here_needs_the_renaming_only(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ci_configs.py").write_text(CI_CONFIGS)
    for module in ("ci_configs.py", "ci_configs", "./ci_configs.py"):
        with pytest.raises(SystemExit) as exit_status:
            main._port(PortConfig(module))
        assert exit_status.value.code == 0
        printed = capsys.readouterr().out
        assert_names(printed, "ci_configs.py: renaming", "imports is enough\n")
        imports = "from {} import tasks_lib, experiment_registry\n"
        assert f"-{imports.format('paxml')}" in printed
        assert f"+{imports.format('spmd_trainer')}" in printed
    assert not (tmp_path / "imported").exists()

    subprocess.run(["patch", "-p0"], input=printed, text=True, check=True, capture_output=True)
    assert (tmp_path / "ci_configs.py").read_text() == CI_CONFIGS.replace("paxml", "spmd_trainer")


def test_names_that_do_not_exist_here_are_listed_with_the_nearest(tmp_path, monkeypatch, capsys):
    text = """\
        import paxml.tasks_lib
        from paxml import learners, no_such_module, tasks_lib as tl
        from paxml.learners import Lerner
        from praxis import layers
        from paxml import summary_utils

        def make(layers):
            return layers.NotOfTheModule, tl.SingleTask.Trian, paxml.tasks_lib.SingleTask.Train, learners.Learner.loss_name

        summary_utils.write_summary_tensor(1, 2, 3)
        BAD = tl.SingleTusk
    """
    got = report(tmp_path, text)
    assert found(got.names) == [
        (2, "paxml.no_such_module", True),
        (3, "paxml.learners.Lerner", True),
        (5, "paxml.summary_utils", True),
        (8, "paxml.tasks_lib.SingleTask.Trian", True),
        (11, "paxml.tasks_lib.SingleTusk", True),
    ]
    assert_names(got.names[1].text, "mean Learner")
    assert_names(got.names[2].text, "a callback's run.log(...)")
    assert_names(got.names[3].text, "mean Train")
    assert not got.runs
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_status:
        main._port(PortConfig("mine.py"))
    assert exit_status.value.code == 1
    assert "  line  3  paxml.learners.Lerner             does not exist" in capsys.readouterr().out


def test_a_name_that_stands_for_something_absent_says_what_to_use(tmp_path):
    """As in TimesFM's finetuning script, which saves with Pax's checkpoints."""
    got = report(
        tmp_path,
        """\
        from paxml import checkpoint_types, checkpoints, learners, tasks_lib, trainer_lib

        KIND = checkpoint_types.CheckpointType.GDA, checkpoints.CheckpointType.FLAX
        checkpoints.save_checkpoint(None, "directory", overwrite=True)
        """,
    )
    assert found(got.names) == [(4, "paxml.checkpoints.save_checkpoint", True)]
    assert_names(got.names[0].text, "not used", "spmd_trainer.checkpointing.Checkpointer")


def test_fields_of_the_task_that_mean_nothing_here(tmp_path):
    got = report(
        tmp_path,
        """\
        from paxml import base_experiment, learners, tasks_lib
        from praxis import pax_fiddle

        class Mine(base_experiment.BaseExperiment):
            def task(self):
                mine = pax_fiddle.Config(tasks_lib.SingleTask, name="x", loss_aggregator=object())
                train_p = mine.train
                train_p.async_summary_writing = False
                train_p.tensorstore_metadata_key = None
                mine.train.num_train_stps = 3
                mine.train.num_train_steps: int = 3
                lp = train_p.learner
                lp.stochastic_gradient = object()
                lp.optimizer.anything = lp.bprop_variable_exclusion = []
                mine.vn.vn_scale = 0.1
                mine.train.set(restore_transformations={}, save_max_to_keep=1)
                mine.decode = tasks_lib.SingleTask.DecodeHParams(profiler_num_steps=2, random_seed=1)
                self.train.not_of_the_task = mine.model.not_checked = 1
                return mine

            def other(self, task_p):
                task_p.train.report_progress_hook = True
                task_p.infer_writer = None
        """,
    )
    assert found(got.settings) == [
        (6, "task.loss_aggregator", True),
        (8, "task.train.async_summary_writing", False),
        (10, "task.train.num_train_stps", True),
        (13, "task.train.learner.stochastic_gradient", True),
        (15, "task.vn.vn_scale", True),
        (16, "task.train.restore_transformations", True),
        (17, "task.decode.profiler_num_steps", False),
        (22, "task.train.report_progress_hook", False),
    ]
    assert_names(got.settings[2].text, "does not exist", "num_train_steps")
    assert got.settings[1].text.startswith("is ignored: ")
    assert got.settings[0].text.startswith("is refused: ")


def test_methods_that_mean_something_else_here_are_those_of_experiments(tmp_path):
    got = report(
        tmp_path,
        """\
        from paxml import base_experiment, experiment_registry
        from paxml.tasks.lm.params import lm_cloud
        from elsewhere import Unknown

        class Base(base_experiment.BaseExperiment):
            def sub_experiments(self): ...

        class Derived(Base):
            def train_programs(self): ...

        class Published(lm_cloud.LmCloudSpmd2B):
            def sub_experiments(self): ...

        @experiment_registry.register(allow_overwrite=True)
        class Registered(Unknown):
            def executor(self): ...

        class NoExperiment(Unknown):
            def sub_experiments(self): ...
        """,
    )
    assert found(got.methods) == [
        (6, "Base.sub_experiments()", False),
        (9, "Derived.train_programs()", True),
        (12, "Published.sub_experiments()", False),
        (16, "Registered.executor()", True),
    ]
    assert found(got.packages) == [(3, "elsewhere", False)]


def test_inputs_that_need_an_extra_are_listed_and_block_nothing(tmp_path):
    (tmp_path / "beside.py").write_text("")
    got = report(
        tmp_path,
        """\
        import beside
        import tensorflow_datasets as tfds
        from paxml import seqio_input
        from . import sibling

        tfds.load
        seqio_input.SeqIOInput
        VOCABULARY = "gs://bucket/vocabulary.model"
        """,
    )
    assert [(finding.line, finding.name) for finding in got.extras] == [
        (2, "tensorflow_datasets"),
        (3, "paxml.seqio_input"),
        (8, "gs://"),
    ]
    assert "needs the extra 'seqio'" in got.extras[1].text
    assert got.runs
    assert not got.packages


def test_paxmls_experiments_need_an_installed_paxml(tmp_path, monkeypatch):
    monkeypatch.setattr(published, "paxml_folder", lambda: None)
    got = report(tmp_path, "from paxml.tasks.lm.params import not_imported_before\n")
    assert [finding.name for finding in got.extras] == ["paxml.tasks.lm.params.not_imported_before"]
    assert_names(got.extras[0].text, "not installed", "pip install --no-deps paxml==1.4.0")
    assert "needs the package" not in got.extras[0].text
    assert got.runs


def test_a_module_that_wants_a_setting_first_blocks_nothing(tmp_path, monkeypatch):
    """As paxml's GPU scripts assert that VOCAB_PATH is set."""

    errors = iter([AssertionError("set VOCAB_PATH"), ValueError("registered twice")])

    def import_module(name):
        if name.endswith("made_up"):
            raise next(errors)
        return importlib.import_module(name)

    monkeypatch.setattr(
        port_names, "importlib", types.SimpleNamespace(import_module=import_module, util=importlib.util)
    )
    got = report(tmp_path, "from paxml.contrib.gpu.scripts_gpu.made_up import Base, Other\n")
    for finding in got.extras:
        # The second import would give another error.
        assert_names(finding.text, "the import of", "AssertionError: set VOCAB_PATH")
    assert [finding.name.rpartition(".")[2] for finding in got.extras] == ["Base", "Other"]
    assert got.runs
    assert_names(got.text(), "renaming its imports", "installed and set")


def test_only_imports_and_the_names_they_bind_are_renamed(tmp_path):
    text = """\
# paxml in a comment\x0c
import os, paxml.tasks_lib, paxml.learners as paxml_learners
from paxml \\
    import tasks_lib
from paxml_like import paxml as not_paxml
é = paxml.tasks_lib.SingleTask, "paxml.tasks_lib", paxml_learners
"""
    got = report(tmp_path, text)
    renamed = text.replace("os, paxml.tasks_lib, paxml.learners", "os, spmd_trainer.tasks_lib, spmd_trainer.learners")
    renamed = renamed.replace("from paxml \\", "from spmd_trainer \\").replace("é = paxml", "é = spmd_trainer")
    assert port_source.Source(got.path).renamed() == renamed
    assert got.mentions == [6]


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_paxmls_own_experiments_lose_every_import_of_paxml(path):
    source = port_source.Source(path)
    nodes = list(ast.walk(ast.parse(source.renamed())))
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    assert not [module for module in modules if module.startswith("paxml")]
    assert any(module.startswith("spmd_trainer") for module in modules)
    assert not [finding for finding in port_settings.settings(source) if finding.blocks]


def test_lm_cloud_needs_the_renaming_only():
    assert port.Report.of_file(PAXML / "tasks/lm/params/lm_cloud.py").runs


@pytest.mark.parametrize(
    ("module", "facts"),
    [
        (None, ("--mode=port needs --module=FILE",)),
        ("gone.py", ("--module=gone.py", "no such file")),
        ("gone.pkg", ("gone.pkg", "no such module")),
        ("empty", ("empty", "no Python files")),
        ("broken.py", ("broken.py:2", "not valid Python")),
    ],
)
def test_what_is_no_file_is_refused(module, facts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.py").write_text("import paxml\ndef (:\n")
    with raises_naming(UserError, *facts):
        main._port(PortConfig(module))


def test_every_file_of_a_package_has_a_report(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        (tmp_path / "my_pkg" / "inner").mkdir(parents=True, exist_ok=True)
        (tmp_path / "my_pkg" / "inner" / f"{name}.py").write_text("from paxml import tasks_lib\n")
    (tmp_path / "my_pkg" / "__init__.py").write_text("raise SystemExit('run')")
    with pytest.raises(SystemExit):
        main._port(PortConfig("my_pkg"))
    printed = capsys.readouterr().out
    assert printed.count("renaming its imports") == 2
    (package,) = [line for line in printed.splitlines() if "__init__.py" in line]
    assert_names(package, "imports nothing", "paxml")
    with pytest.raises(SystemExit):
        main._port(PortConfig("my_pkg.inner.second"))
    assert capsys.readouterr().out.count("renaming its imports") == 1


@pytest.mark.parametrize(
    "text",
    [
        "from paxml import tasks_lib\ny = tasks_lib" + ".a" * 20000,
        "y = 1" + "+1" * 20000,
        "y = " + "-" * 20000 + "1",
        "if 1:\n x\n" + "elif 1:\n x\n" * 5000,
        "from paxml import base_experiment\nclass C0(base_experiment.BaseExperiment): pass\n"
        + "".join(f"class C{n + 1}(C{n}): pass\n" for n in reversed(range(2000))),
    ],
    ids=["attributes", "a sum", "signs", "elif", "classes"],
)
def test_a_file_that_nests_too_deeply_is_refused(text, tmp_path):
    with raises_naming(UserError, str(tmp_path / "mine.py"), "nest too deeply"):
        report(tmp_path, text)


def test_each_of_many_missing_names_is_told_once(tmp_path):
    names = [f"n{number}" for number in range(300)]
    text = "from paxml.tasks_lib import " + ", ".join(names) + "\n" + "".join(f"{name}.more\n" for name in names)
    assert [finding.name for finding in report(tmp_path, text).names] == [f"paxml.tasks_lib.{name}" for name in names]
