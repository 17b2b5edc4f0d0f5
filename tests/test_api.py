"""The trainer from Python: what a notebook calls, and what it gets back."""

import contextlib
import errno
import importlib.metadata
import json
import os
import pathlib
import shutil
import subprocess
import sys
import traceback
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from facts import raises_naming

import spmd_trainer as st
from spmd_trainer import api, sharding
from spmd_trainer.checkpointing import CheckpointError
from spmd_trainer.errors import UserError
from spmd_trainer.experiments.lm.stdlib import StdlibBytesTiny
from spmd_trainer.storage import files
from spmd_trainer.train_states import TrainState
from spmd_trainer.training import averages, checkpoints, decode, evaluate
from spmd_trainer.training.summary_writers import read_metrics
from spmd_trainer.watch.pages import run_texts

# One worker: what these tests share is made once.
pytestmark = pytest.mark.xdist_group("api")


class Unregistered(StdlibBytesTiny):
    """A notebook's own class."""

    NUM_TRAIN_STEPS = 2
    WARMUP_STEPS = 1
    EVAL_INTERVAL_STEPS = 100
    CHECKPOINT_EVERY_N_STEPS = 100


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("api") / "run"
    return st.train(Unregistered, directory, overrides=["task.train.summary_interval_steps=1"])


def test_train_returns_state_step_and_metrics(trained):
    assert trained.step == 2
    assert int(trained.state.step) == 2
    assert np.isfinite(trained.metrics["loss"])
    assert "heldout/bits_per_byte" in trained.metrics
    assert (trained.job_log_dir / "checkpoints" / "2").exists()
    assert "finished" in (trained.job_log_dir / "logs" / "train.log").read_text()


def test_a_disk_that_is_full_at_the_end_is_an_error_of_the_user(trained, tmp_path, monkeypatch):
    directory = epath.Path(shutil.copytree(trained.job_log_dir, tmp_path / "run"))
    write = files.write_atomically

    def full(path, lines):
        if path == directory / "run.json" and "finished" in "".join(lines):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, lines)

    monkeypatch.setattr(files, "write_atomically", full)
    record = json.loads((directory / "run.json").read_text())
    del record["last_step"]
    (directory / "run.json").write_text(json.dumps({**record, "status": "running"}))
    with raises_naming(UserError, directory / "run.json", os.strerror(errno.ENOSPC)) as info:
        st.train(Unregistered, directory)
    assert info.value.exit_status == 2
    monkeypatch.undo()
    assert st.train(Unregistered, directory).step == 2
    assert json.loads((directory / "run.json").read_text())["status"] == "finished"


def test_load_variables_needs_the_directory_alone(trained):
    directory = trained.job_log_dir
    for place in (directory, directory / "checkpoints", directory / "checkpoints" / str(trained.step)):
        found = st.load_variables(place)
        scale = found["params"]["lm"]["final_ln"]["scale"]
        assert isinstance(scale, np.ndarray)
        np.testing.assert_array_equal(scale, trained.state.mdl_vars["params"]["lm"]["final_ln"]["scale"])
    # The vocabulary of 257 is stored without the mesh's padding.
    assert 257 in {size for array in jax.tree.leaves(found) for size in array.shape}
    with raises_naming(CheckpointError, "load_variables", directory / "logs"):
        st.load_variables(directory / "logs")
    one_step = directory / "checkpoints" / str(trained.step)
    assert st.load_variables(one_step, step=trained.step).keys() == found.keys()
    with raises_naming(CheckpointError, "load_variables", one_step, f"is step {trained.step}", "step=7"):
        st.load_variables(one_step, step=7)


def test_evaluate_gives_the_metrics_of_the_checkpoint(trained):
    result = st.evaluate(Unregistered(), trained.job_log_dir)
    assert result.step == 2
    name = "heldout/bits_per_byte"
    assert result.metrics[name] == pytest.approx(trained.metrics[name], rel=1e-6)


@pytest.fixture
def job_of_a_call(tmp_path, monkeypatch):
    """Makes the functions of `api` work on a job that has a directory and one decode dataset, and nothing to compute with."""
    config = types.SimpleNamespace(decode_datasets=[types.SimpleNamespace(name="prompts")])
    config = types.SimpleNamespace(job_log_dir=epath.Path(tmp_path), experiment=types.SimpleNamespace(config=config))
    job = types.SimpleNamespace(config=config, task=None)
    monkeypatch.setattr(api, "_job", lambda *args, **more: contextlib.nullcontext(job))


@pytest.mark.parametrize("process", [0, 1])
def test_process_0_alone_writes_the_summaries_of_an_evaluation(process, job_of_a_call, tmp_path, monkeypatch):
    class Evaluations:
        def __init__(self, job, writers):
            self.writers = writers

        def run(self, state, step):
            self.writers.write("eval_heldout", step, {"loss": 1.0})
            return {"heldout/loss": 1.0}

    monkeypatch.setattr(jax, "process_index", lambda: process)
    monkeypatch.setattr(evaluate, "Evaluations", Evaluations)
    monkeypatch.setattr(averages, "of", lambda job: None)
    restored = types.SimpleNamespace(state=None, step=3)
    monkeypatch.setattr(checkpoints, "restore_for_inference", lambda job, kind: restored)
    assert st.evaluate(Unregistered, tmp_path).metrics == {"heldout/loss": 1.0}
    assert list(read_metrics(tmp_path, "eval_heldout")) == [3] * (process == 0)


def test_decode_takes_an_output_with_other_separators_than_newlines_as_one_line(job_of_a_call, tmp_path, monkeypatch):
    records = [{"index": 0, "output": "a\u2028b\u2029c\x85d\x1ce"}, {"index": 1, "output": ""}]
    file = epath.Path(tmp_path) / "decode_out" / "prompts" / "step_3.jsonl"
    file.parent.mkdir(parents=True)
    files.write_atomically(file, [json.dumps(record, ensure_ascii=False) for record in records])
    monkeypatch.setattr(decode, "decode_once", lambda job: 3)
    assert st.decode(Unregistered, tmp_path).examples == {"prompts": records}
    assert [row["output"] for row in run_texts.read_examples(file)] == [row["output"] for row in records]


@pytest.mark.full
def test_decode_gives_the_examples(trained):
    result = st.decode(Unregistered, trained.job_log_dir, mesh={"data": 4, "mdl": 2})
    (examples,) = result.examples.values()
    assert len(examples) == Unregistered.NUM_PROMPTS
    path = trained.job_log_dir / "decode_out" / "heldout_prompts" / "step_2.jsonl"
    assert examples == [json.loads(line) for line in path.read_text().splitlines()]


def test_inspect_gives_a_report_and_writes_nothing(tmp_path: pathlib.Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = st.inspect("lm.stdlib.StdlibBytesTiny", mesh="data:2,mdl:4")
    assert isinstance(report, sharding.ShardingReport)
    assert dict(report.mesh.shape) == {"replica": 1, "data": 2, "mdl": 4}
    assert "<table" in report._repr_html_()
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_plan_gives_bytes_and_a_text_to_read():
    plan = st.plan(Unregistered)
    assert plan.total > 0
    assert "bytes per chip" in str(plan)
    assert "bytes per chip" in plan._repr_html_()


@pytest.mark.parametrize(
    ("exp", "says"),
    [("lm.stdlib.StdlibByte", "did you mean"), (int, "is not an experiment"), (42, "is not an experiment")],
)
def test_what_is_no_experiment(exp, says):
    with pytest.raises(UserError, match=says):
        st.inspect(exp)


@pytest.mark.full
def test_errors_of_the_call_are_those_of_the_command_line(trained, tmp_path):
    with pytest.raises(UserError, match="num_train_steps"):
        st.train(Unregistered, tmp_path / "x", overrides=["task.train.num_train_step=2"])
    with raises_naming(UserError, "mesh=", "6 devices", "are 8"):
        st.train(Unregistered, tmp_path / "x", mesh={"data": 3, "mdl": 2})
    with pytest.raises(UserError, match="axis twice"):
        st.train(Unregistered, tmp_path / "x", mesh=[("data", 2), ("data", 4)])
    with raises_naming(UserError, "overrides", "one text", "list"):
        st.train(Unregistered, tmp_path / "x", overrides="task.train.num_train_steps=2")
    with pytest.raises(UserError, match="hdfs:// is no storage"):
        st.train(Unregistered, "hdfs://bucket/run")
    with pytest.raises(UserError, match="no checkpoint"):
        st.evaluate(Unregistered, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_an_error_ends_with_its_message_after_the_users_own_lines(tmp_path):
    class Mine(StdlibBytesTiny):
        def task(self):
            return jax.jit(lambda x: {}["absent"])(1)

    with pytest.raises(UserError, match="absent") as raised:
        st.train(Mine, tmp_path)
    shown = "".join(traceback.format_exception(raised.value)).splitlines()
    assert shown[-1].endswith(str(raised.value).splitlines()[-1])
    assert not [line for line in shown if "JAX_TRACEBACK_FILTERING" in line]
    files = {line.split('"')[1] for line in shown if line.lstrip().startswith("File ")}
    assert files <= {__file__, api.__file__}


def test_importing_the_package_brings_in_nothing_heavy_and_knows_its_functions():
    code = (
        "import sys, spmd_trainer as st; assert 'jax' not in sys.modules; print(sorted(set(st.__all__) & set(dir(st))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (
        done.stdout.strip()
        == "['Muon', 'Mup', 'Soap', '__version__', 'decode', 'evaluate', 'export', 'generate', 'inspect', 'load_variables', "
        "'plan', 'sweep', 'train']"
    )
    assert st.__version__ == importlib.metadata.version("spmd-trainer")
    with pytest.raises(AttributeError, match="trian"):
        st.trian  # noqa: B018


@pytest.mark.full
def test_overrides_may_be_any_iterable(tmp_path: pathlib.Path):
    directory = tmp_path / "run"
    result = st.train(Unregistered, directory, overrides=(text for text in ["task.train.num_train_steps=1"]))
    assert result.step == 1
    assert "task.train.num_train_steps: 1" in (directory / "config.txt").read_text()


def test_a_states_repr_is_a_line():
    state = TrainState(jnp.uint32(3), {"params": {"w": jnp.zeros((2, 5)), "b": jnp.zeros(5)}}, [{"m": jnp.zeros(5)}])
    assert repr(state) == "TrainState(step=3, mdl_vars=2 arrays of 15 elements, opt_states=1 arrays)"
    shapes = jax.eval_shape(lambda: state)
    assert "step=ShapeDtypeStruct" in repr(shapes)
    seen = []
    jax.jit(lambda s: seen.append(repr(s)) or s.step)(state)
    assert "Tracer" in seen[0]
