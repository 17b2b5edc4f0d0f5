"""README: the files it names exist, and its callback example runs as pasted."""

import importlib
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint
import pytest

import spmd_trainer as st
from spmd_trainer.metrics.writers import read_metrics

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
# Paths of a run, of a user's package and of the user's project, which the checkout does not have.
OF_USERS = re.compile(r"runs/|my_pkg/|text/|summaries/|decode_out/|eval_out/|best/|logs/")
NAMES = sorted(
    name
    for name in set(re.findall(r"`([\w./]+(?:/|\.py))`", README))
    if not OF_USERS.match(name) and name != "benchmarks/results/"
)


def block(text):
    """Returns the one Python block of README that contains `text`."""
    (found,) = [
        code for code in re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE) if text in code
    ]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_readme_names_exists(name):
    assert (ROOT / name).exists() or (ROOT / "spmd_trainer" / name).exists()


def test_readme_names_files():
    assert {"steps/step_fns.py", "tests/golden/", "benchmarks/plan_baseline.py"} <= set(NAMES)


@pytest.fixture(scope="module")
def my_pkg(tmp_path_factory):
    """README's package my_pkg, imported; the working directory is the user's folder."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "my_pkg").mkdir()
    (folder / "my_pkg" / "__init__.py").write_text("")
    (folder / "my_pkg" / "tiny.py").write_text(block("class MyTinyLm"))
    (folder / "my_pkg" / "target.py").write_text(block("class StopAtTarget"))
    (folder / "my_pkg" / "wave.py").write_text(block("class Wave"))
    (text,) = re.findall(r"^mkdir -p text && python3 .*$", README, re.MULTILINE)
    subprocess.run(text, shell=True, cwd=folder, check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        yield importlib.import_module("my_pkg.target")
    for module in [module for module in sys.modules if module.partition(".")[0] == "my_pkg"]:
        del sys.modules[module]


def test_the_callback_of_an_experiment_ends_training_where_readme_says(my_pkg):
    result = st.train(my_pkg.TinyWithTarget, "runs/target")
    assert f"ends at step {result.step} of 30" in README
    assert result.metrics["same_text/log_pplx"] <= 3.2
    assert "perplexity" in pathlib.Path("runs/target/summaries/train/metrics.jsonl").read_text()


def test_the_callback_of_a_caller_ends_training_too(my_pkg):
    (call,) = re.findall(r"`(st\.train\([^`]*callbacks=[^`]*)`", README)
    names = {"st": st, "MyTinyLm": my_pkg.MyTinyLm, "StopAtTarget": my_pkg.StopAtTarget}
    assert f"ends at step {eval(call, names).step} of 30" in README


def test_a_notebook_trains_a_flax_model_in_15_lines(my_pkg):
    code = block("class Mine(")
    assert len([line for line in code.splitlines() if line.strip()]) == 15
    names = {}
    exec(compile(code, "notebook", "exec"), names)
    assert int(names["state"].step) == 60
    losses = [record["loss"] for record in read_metrics("runs/net", "train").values()]
    assert losses[-1] < losses[0]


def test_the_flax_model_learns(my_pkg):
    wave = importlib.import_module("my_pkg.wave")
    st.train(wave.Wave, "runs/wave")
    loss = st.evaluate(wave.Wave, "runs/wave").metrics["same_data/loss"]
    assert loss < 0.25  # half of the target's variance

    names = {**vars(wave), "jax": jax, "orbax": orbax, "job_log_dir": pathlib.Path("runs/wave").absolute()}
    exec(block("net = nnx.merge(graphdef"), names)
    names["net"].eval()
    data = wave.wave()
    np.testing.assert_allclose(np.mean((names["net"](data["x"]) - data["y"]) ** 2), loss, rtol=1e-4)
