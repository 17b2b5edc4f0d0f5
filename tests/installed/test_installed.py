"""The trainer as a user has it: installed from a wheel, run from the user's own folder, on the user's own package."""

import json
import re
import shutil

import pytest
from facts import assert_names
from readme_page import PAGE
from readme_page import ROOT as PAGE_ROOT

pytestmark = pytest.mark.installed

TRAIN = PAGE.command("spmd-trainer", "my_pkg.tiny.MyTinyLm", "runs/mine")
SHORT = " --fdl.set=task.train.num_train_steps=2"


@pytest.mark.parametrize("way", ["pip", "uv"])
def test_each_documented_way_gives_an_installation_in_order(projects, way):
    done = projects[way].good("spmd-trainer --doctor")
    assert "No problems found." in done.stdout
    assert "praxis 1.4.0" in done.stdout


@pytest.mark.parametrize("extra", ["", "[cuda12]", "[plan-gpu]", "[tpu]"])
def test_the_checkout_itself_resolves_with_its_extras(project, extra):
    command = f"uv pip install --dry-run --quiet --python .venv/bin/python '{PAGE_ROOT}{extra}'"
    project.good(command)


def test_before_the_further_command_the_first_error_and_the_doctor_name_it(project):
    status, message = (project.folder / "before_praxis.txt").read_text().split("\n", 1)
    assert status == "2"
    assert "Traceback" not in message
    assert "pip install --no-deps praxis==1.4.0 lingvo==0.14.2" in message
    status, report = (project.folder / "doctor_before_praxis.txt").read_text().split("\n", 1)
    assert status == "2"
    assert "pip install --no-deps praxis==1.4.0 lingvo==0.14.2" in report


def test_an_experiment_of_ones_own_trains_and_says_so(project):
    shutil.rmtree(project.folder / "runs" / "mine", ignore_errors=True)  # of a test that ran before
    done = project.good(TRAIN)
    lines = [line.split(" ", 1)[1] for line in done.stderr.splitlines()]
    assert "my_pkg.tiny.MyTinyLm: mesh replica=1, data=4, mdl=2 on 8 host devices" in lines[0]
    wanted = [
        "compiling the train step",
        "first step done: loss",
        "step 10/30  loss",
        "saved step 30 in",
        "finished: step 30 of 30",
    ]
    found = [next((i for i, line in enumerate(lines) if line.startswith(start)), None) for start in wanted]
    assert None not in found, done.stderr
    assert found == sorted(found)
    assert f"tensorboard --logdir {project.folder}/runs/mine/summaries" in done.stderr
    for notice in ("InitializeLog", "oneDNN", "tensor_split_dims_mapping"):
        assert notice not in done.stderr + done.stdout
    log = (project.folder / "runs" / "mine" / "logs" / "train.log").read_text()
    assert "finished: step 30 of 30" in log


def test_a_tokenizer_is_trained_and_text_tokenised_by_commands_of_the_wheel(project):
    (project.folder / "words.jsonl").write_text("".join(json.dumps({"text": f"{n} words"}) + "\n" for n in range(900)))
    done = project.good("spmd-trainer --mode=tokenizer --output=words.model --vocab_size=300 words.jsonl")
    assert "300 tokens of bpe from 900 documents" in done.stdout
    for mode, output, extra in (("tokenizer", "runs/words", "hf"), ("tokenise", "runs/tokens", "data")):
        message = project.refused(f"spmd-trainer --mode={mode} --output={output} words.jsonl")
        assert f"spmd-trainer[{extra}]" in message


def test_its_checkpoint_is_evaluated(project):
    project.good(TRAIN)
    done = project.good(TRAIN + " --mode=eval")
    assert re.search(r"eval same_text at step 30", done.stderr)


ERRORS = {
    "field": (
        "        task_p = super().task()\n        task_p.train.num_train_step = 3\n        return task_p\n",
        "did you mean num_train_steps?",
        "task_p.train.num_train_step = 3",
    ),
    "split_mapping": (
        "        task_p = super().task()\n        task_p.train.inputs_split_mapping = {'map_1d': ('data',)}\n"
        "        return task_p\n",
        "has no map_2d",
        "class Broken",
    ),
    "own_bug": ("        return {}['x']\n", "KeyError: 'x'", "return {}['x']"),
    "mesh": (
        "        task_p = super().task()\n        task_p.model.ici_mesh_shape = [1, 4]\n        return task_p\n",
        "task.model.ici_mesh_shape",
        "class Broken",
    ),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_a_users_error_is_one_message_with_the_users_own_line(project, kind):
    body, says, line = ERRORS[kind]
    source = (
        "from spmd_trainer import experiment_registry\nfrom my_pkg.tiny import MyTinyLm\n\n\n"
        f"@experiment_registry.register\nclass Broken(MyTinyLm):\n    def task(self):\n{body}"
    )
    file = project.folder / "my_pkg" / f"broken_{kind}.py"
    file.write_text(source)
    message = project.refused(f"spmd-trainer --exp=my_pkg.{file.stem}.Broken --job_log_dir=runs/{kind}")
    assert says in message
    number = next(i for i, text in enumerate(source.splitlines(), start=1) if line in text)
    assert re.search(rf"{re.escape(str(file))}:({number}|{number - 1})\b", message), message


def test_an_error_within_the_model_names_its_lines_and_the_log_has_the_traceback(project):
    file = project.folder / "my_pkg" / "bad_model.py"
    file.write_text(
        "import jax.numpy as jnp\nfrom praxis import layers\nfrom spmd_trainer import experiment_registry\n"
        "from my_pkg.tiny import Config, MyTinyLm\n\n\n"
        "class BadLm(layers.LanguageModel):\n    def compute_predictions(self, batch):\n"
        "        jnp.zeros((2, 3)) @ jnp.zeros((4, 5))\n        return super().compute_predictions(batch)\n\n\n"
        "@experiment_registry.register\nclass BadModel(MyTinyLm):\n    def task(self):\n        task_p = super().task()\n"
        "        task_p.model = Config(BadLm, name='lm', lm_tpl=task_p.model.lm_tpl, ici_mesh_shape=[1, 4, 2],\n"
        "                              mesh_axis_names=['replica', 'data', 'mdl'])\n        return task_p\n"
    )
    message = project.refused("spmd-trainer --exp=my_pkg.bad_model.BadModel --job_log_dir=runs/bad_model")
    assert "TypeError" in message
    assert f"{file}:9" in message
    assert "Traceback" in (project.folder / "runs" / "bad_model" / "logs" / "train.log").read_text()


def test_names_that_are_wrong(project):
    (project.folder / "my_pkg" / "broken_import.py").write_text("import numppy\n")
    for name, says in {
        "my_pkg.tiny.MyTinyLn": "did you mean my_pkg.tiny.MyTinyLm?",
        "my_pkg.tinny.MyTinyLm": "did you mean my_pkg.tiny?",
        "my_pkgs.tiny.MyTinyLm": "did you mean my_pkg?",
        "my_pkg.broken_import.X": f"{project.folder}/my_pkg/broken_import.py:1",
    }.items():
        assert says in project.refused(f"spmd-trainer --exp={name} --job_log_dir=runs/x")
    (project.folder / "my_pkg" / "broken_import.py").unlink()


def test_list_shows_the_users_own(projects):
    asked = projects["pip"].run(PAGE.command("--list", "--exp_module"))
    assert re.search(r"^my_pkg\.tiny\.MyTinyLm +2-layer byte-level LM", asked.stdout, re.MULTILINE)
    announced = projects["uv"].good("spmd-trainer --list")
    assert re.search(r"^my_pkg\.tiny\.MyTinyLm +2-layer byte-level LM", announced.stdout, re.MULTILINE)
    assert re.search(r"^lm\.stdlib\.StdlibBytesTiny ", announced.stdout, re.MULTILINE)


def test_a_package_called_experiments_hides_nothing(project):
    own = project.folder / "experiments"
    own.mkdir()
    (own / "__init__.py").write_text("")
    (own / "mine.py").write_text(PAGE.files["my_pkg/tiny.py"])
    try:
        for name in ("experiments.mine.MyTinyLm", "lm.stdlib.StdlibBytesTiny"):
            assert "task.train.num_train_steps: " in project.good(f"spmd-trainer --exp={name} --dump").stdout
    finally:
        (own / "mine.py").unlink()
        (own / "__init__.py").unlink()


@pytest.mark.parametrize(
    ("devices", "mesh"), [(1, "data=1, mdl=1"), (3, "data=3, mdl=1"), (6, "data=3, mdl=2"), (12, "data=6, mdl=2")]
)
def test_it_runs_on_any_number_of_devices(project, devices, mesh):
    done = project.good(f"{TRAIN}_{devices}{SHORT}", devices=devices)
    first = done.stderr.splitlines()[0]
    assert f"mesh replica=1, {mesh} on {devices} host device" in first
    assert_names(first, "adapted", "declared (replica=1, data=4, mdl=2)")
    assert "finished: step 2 of 2" in done.stderr


@pytest.mark.parametrize("name", ["lm.stdlib.StdlibBytesTiny", "my_pkg.short.MyShortLm"])
def test_shipped_and_short_experiments_run_too(projects, name):
    done = projects["uv"].good(f"spmd-trainer --exp={name} --job_log_dir=runs/{name}{SHORT}", devices=1)
    assert "finished: step 2 of 2" in done.stderr


def test_other_programs_of_the_environment_never_load_the_trainer(project):
    code = "import sys, sympy; print('spmd_trainer' in sys.modules, 'praxis' in sys.modules, type(sympy).__name__)"
    assert project.good(f'python -c "{code}"').stdout.split() == ["False", "False", "module"]
    # praxis may be imported first, unless that is switched off.
    project.good('python -c "from praxis import layers"')
    off = project.run('python -c "from praxis import layers"', SPMD_TRAINER_BRIDGE="0")
    assert off.returncode == 1
    project.good('python -c "import spmd_trainer; from praxis import layers"', SPMD_TRAINER_BRIDGE="0")


def test_a_notebook_trains_evaluates_and_shows(project):
    project.good("pip install --quiet nbconvert ipykernel")
    again = (
        "from spmd_trainer import experiment_registry\n\n@experiment_registry.register\nclass Cell(MyTinyLm):\n    pass"
    )
    sources = [*PAGE.cells, again, again, "st.inspect('__main__.Cell')"]
    cells = [
        {
            "cell_type": "code",
            "id": f"cell-{i}",
            "execution_count": None,
            "metadata": {},
            "outputs": [],
            "source": source,
        }
        for i, source in enumerate(sources)
    ]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    notebook = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    (project.folder / "mine.ipynb").write_text(json.dumps(notebook))
    project.good(
        "jupyter nbconvert --execute --to notebook --output done.ipynb mine.ipynb", PYTHONPATH=str(project.folder)
    )
    done = json.loads((project.folder / "done.ipynb").read_text())["cells"]
    trained, evaluated, inspected = (done[i]["outputs"] for i in (0, 1, 2))
    assert "finished: step 5 of 5" in _streams(trained)
    assert "tensor_split_dims_mapping" not in _streams(trained)
    shown = _result(trained)["text/plain"]
    assert "TrainState(step=5, mdl_vars=" in "".join(shown)
    assert len("".join(shown)) < 300
    assert "same_text/log_pplx" in "".join(_result(evaluated)["text/plain"])
    assert "params" in "".join(_result(inspected)["text/html"])
    assert "__main__.Cell" in "".join(_result(done[-1]["outputs"])["text/plain"])


def _streams(outputs: list[dict]) -> str:
    return "".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")


def _result(outputs: list[dict]) -> dict:
    (found,) = [output["data"] for output in outputs if output["output_type"] == "execute_result"]
    return found
