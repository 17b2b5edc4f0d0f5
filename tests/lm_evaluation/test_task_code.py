"""Task files that name code are refused before lm-eval, which would import it, sees them."""

import pathlib

import pytest
from facts import raises_naming

from spmd_trainer.errors import UserError
from spmd_trainer.lm_eval import task_code

pytest.importorskip("yaml", reason="lm-eval brings PyYAML")

PLAIN = "task: tiny\ndataset_path: json\nmetric_list:\n  - metric: acc\ndoc_to_text: '{{text}} !function'\n"
CODE = {
    "a function": PLAIN + "process_docs: !function evil.run\n",
    "the tag in full": PLAIN + "process_docs: !<!function> evil.run\n",
    "a handle of the tag": "%TAG !e! !func\n---\n" + PLAIN + "process_docs: !e!tion evil.run\n",
    "in a list of metrics": PLAIN + "x:\n  - {aggregation: !function evil.run}\n",
    "a class": "task: tiny\nclass: !function evil.run\n",
    "as a key": PLAIN + "? !function evil.run\n: x\n",
    "behind an alias": PLAIN + "a: &a [!function evil.run]\nb: *a\n",
    "a group's own task": "group: g\ntask:\n  - task: inner\n    doc_to_text: !function evil.run\n",
}


def refuse(tmp_path, directory=None, files=()):
    task_code.refuse(None if directory is None else str(directory), map(str, files), str(tmp_path / "lm_eval"))


@pytest.mark.parametrize("text", CODE.values(), ids=CODE)
def test_a_file_that_names_code_is_refused(tmp_path, text):
    (tmp_path / "tasks" / "deep").mkdir(parents=True)
    file = tmp_path / "tasks" / "deep" / "t.yaml"
    file.write_text(text)
    for given in ({"directory": tmp_path / "tasks"}, {"files": [file]}):
        with raises_naming(UserError, file, "evil.run", "--confirm_run_unsafe_code"):
            refuse(tmp_path, **given)


@pytest.mark.parametrize("line", ["include: {}", "base: &b {{include: {}}}\n<<: *b"])
@pytest.mark.parametrize("include", ["base.txt", "[fine.txt, base.txt]", "../tasks/base.txt", "{folder}/base.txt"])
def test_so_is_one_that_includes_it(tmp_path, include, line):
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "fine.txt").write_text("a: 1\ninclude: t.yaml\n")  # in a circle
    (folder / "base.txt").write_text(CODE["a function"])
    (folder / "t.yaml").write_text(f"{PLAIN}{line.format(include.format(folder=folder))}\n")
    with raises_naming(UserError, folder / "base.txt", "evil.run"):
        refuse(tmp_path, files=[folder / "t.yaml"])


def test_a_metric_that_is_a_program_is_refused(tmp_path):
    (tmp_path / "t.yaml").write_text(PLAIN.replace("metric: acc", "metric: someone/evil"))
    with raises_naming(UserError, tmp_path / "t.yaml", "someone/evil"):
        refuse(tmp_path, files=[tmp_path / "t.yaml"])


def test_plain_files_and_those_of_the_library_are_taken(tmp_path):
    library = tmp_path / "lm_eval" / "tasks"
    library.mkdir(parents=True)
    (library / "own.yaml").write_text(CODE["a function"])
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "plain.yaml").write_text(f"{PLAIN}include: {library / 'own.yaml'}\n")
    (folder / "broken.yaml").write_text("a: [\n")
    (folder / "empty.yaml").write_text("")
    (folder / "circle.yaml").write_text("a: &a\n  b: *a\n")
    (folder / "missing.yaml").write_text(f"{PLAIN}include: absent.yaml\n")
    refuse(tmp_path, directory=folder, files=[pathlib.Path("absent.yaml"), library / "own.yaml"])
