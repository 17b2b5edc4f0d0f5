"""`--mode=verify` and `--mode=inspect` as a user meets them."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from facts import assert_names, raises_naming
from trained_helpers import make_job

from spmd_trainer.errors import UserError
from spmd_trainer.sharding.report_data import input_data
from spmd_trainer.training import report_parts, verify, xla_flags

TINY = "--exp=lm.stdlib.StdlibBytesTiny"


def command(*args, cwd):
    return subprocess.run(
        [sys.executable, "-m", "spmd_trainer.main", *args], capture_output=True, text=True, timeout=300, cwd=cwd
    )


@pytest.mark.full
def test_verify_prints_both_runs_side_by_side(tmp_path):
    done = command("--mode=verify", TINY, "--verify_steps=2", "--mesh=replica:1,data:2,mdl:4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["0", "1", "2"]
    step, one, mesh, norm, norm_mesh, worst, path = lines[2].split()
    assert (step, path.split("/")[0] in ("mdl_vars", "opt_states")) == ("1", True)
    assert float(one) == pytest.approx(float(mesh), rel=1e-5)
    assert float(norm) == pytest.approx(float(norm_mesh), rel=1e-4)
    assert float(worst) < 1e-4
    assert_names(lines[-1], "same numbers", "one device", "replica=1, data=2, mdl=4")
    assert not list(tmp_path.iterdir())


SMALL = ("opt_state_dtype='8bit'", "opt_state_dtype_rules=[('/m/','bfloat16')]")


def small_states_job(directory, **settings):
    job = make_job(directory, mode="verify", fields=[f"task.train.learner.{field}" for field in SMALL], **settings)
    assert "uint8" in {str(variable.dtype) for variable in job.partitioner.layout.records()}
    return job


@pytest.mark.parametrize("options", [None, {"xla_cpu_multi_thread_eigen": False}])
def test_small_optimizer_states_are_kept_in_float32_and_the_output_says_so(tmp_path, capsys, monkeypatch, options):
    meshes = []

    def run_steps(partitioner, *_, **__):
        assert {str(variable.dtype) for variable in partitioner.layout.records()} <= {"float32", "int32", "uint32"}
        meshes.append(partitioner.mesh.size)
        yield verify.Snapshot(0, None, None, {"step": np.zeros(())})

    monkeypatch.setattr(verify, "run_steps", run_steps)
    job = small_states_job(tmp_path, verify_steps=1, verify_against=options)
    verify.verify(job)
    assert meshes == [1 if options is None else 8, 8]
    assert_names(capsys.readouterr().out.splitlines()[0], "float32", "opt_state_dtype")
    assert job.task.learner.opt_state_dtype == "8bit"  # the caller's


@pytest.mark.full
def test_a_learner_with_small_states_gives_the_same_numbers(tmp_path, capsys):
    verify.verify(small_states_job(tmp_path, verify_steps=5))
    assert_names(capsys.readouterr().out.splitlines()[-1], "same numbers")


@pytest.mark.full
def test_options_that_change_the_bits_are_told_from_those_that_do_not(tmp_path, capsys, monkeypatch):
    def verified(options):
        verify.verify(make_job(tmp_path, mode="verify", verify_steps=2, verify_against=options))
        return capsys.readouterr().out.splitlines()[-1]

    assert_names(verified({"xla_cpu_multi_thread_eigen": False}), "same numbers", "all bits")
    # With the tests' own low level of optimisation, fast sums alone change nothing.
    fast = {"xla_backend_optimization_level": 3, "xla_cpu_enable_fast_math": True}
    same = verified(fast)
    text = "xla_backend_optimization_level=3 xla_cpu_enable_fast_math=true"
    assert_names(same, "same numbers", "replica=1, data=4, mdl=2", f"without and with {text}")
    assert "bits" not in same
    monkeypatch.setattr(verify.Tolerance, "for_task", lambda task: verify.Tolerance(loss=0, variables=0))
    with pytest.raises(SystemExit) as ended:
        verified(fast)
    assert ended.value.code == 1
    assert "DIFFERENT numbers" in capsys.readouterr().out


@pytest.mark.full
def test_an_option_that_xla_does_not_know_names_the_nearest(tmp_path):
    done = command("--mode=verify", TINY, "--verify_against=--xla_cpu_enable_fast_maths=true", cwd=tmp_path)
    assert done.returncode == 2
    assert_names(done.stderr, "--verify_against has 'xla_cpu_enable_fast_maths'", "mean xla_cpu_enable_fast_math")


def test_options_that_change_nothing_are_refused(tmp_path, monkeypatch):
    job = make_job(tmp_path, mode="verify", verify_against={"xla_gpu_enable_triton_gemm": False})
    with raises_naming(UserError, "--verify_against", "xla_gpu_enable_triton_gemm changes nothing", "cpu devices"):
        verify.verify(job)
    options = {"xla_cpu_multi_thread_eigen": False}
    job = make_job(tmp_path, mode="verify", verify_against=options)
    monkeypatch.setattr(job.config.experiment.experiment, "XLA_FLAGS", options)
    with raises_naming(UserError, "--verify_against", "XLA_FLAGS already", "xla_cpu_multi_thread_eigen"):
        verify.verify(job)


@pytest.mark.parametrize("text", ["--xla_a=true --xla_b=2 xla_c=x,y", "xla_a,xla_b=2,--xla_c=x,y"])
def test_options_are_written_as_xla_writes_them(text):
    assert xla_flags.read("--verify_against", text) == {"xla_a": True, "xla_b": 2, "xla_c": "x,y"}


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("", ("--verify_against is empty",)),
        ("fast_math=true", ("--verify_against", "'fast_math=true'", "NAME=VALUE")),
        ("xla_a=1 xla_a=2", ("--verify_against: xla_a", "1 and 2")),
    ],
)
def test_what_is_no_option_is_refused(text, facts):
    with raises_naming(UserError, *facts):
        xla_flags.read("--verify_against", text)


def snapshot(step=1, loss=1.0, **variables):
    return verify.Snapshot(step, loss, None, {name: np.asarray(x, np.float32) for name, x in variables.items()})


def test_a_difference_names_the_worst_variable_and_all_that_departed_in_order():
    ours = snapshot(a=[1.0, 2.0], b=[1.0], c=[4.0])
    result = verify.compare(ours, snapshot(a=[1.0, 2.1], b=[1.0], c=[5.0]), verify.Tolerance())
    assert not result.passed
    assert result.departed == ["a", "c"]
    assert result.worst == ("c", pytest.approx(0.25))
    assert verify.compare(ours, ours, verify.Tolerance()).passed
    assert not verify.compare(ours, snapshot(loss=1.001, a=[1.0, 2.0], b=[1.0], c=[4.0]), verify.Tolerance()).passed


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_number_that_is_finite_on_one_side_only_is_a_difference(bad):
    assert not verify.compare(snapshot(a=[1.0]), snapshot(a=[bad]), verify.Tolerance()).passed


def test_inspect_prints_and_writes_the_report(tmp_path):
    done = command("--mode=inspect", TINY, f"--job_log_dir={tmp_path}", "--mesh=data:4,mdl:2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if "mdl_vars/params/lm/softmax/logits_ffn/linear/w" in line)
    assert re.search(r"32.*257.*32.*258", row), row
    assert "declared" in row
    report = json.loads((tmp_path / "sharding_report.json").read_text())
    assert report["mesh"]["axes"] == [
        {"name": "replica", "size": 1},
        {"name": "data", "size": 4},
        {"name": "mdl", "size": 2},
    ]
    page = (tmp_path / "sharding_report.html").read_text()
    assert page.startswith("<!doctype html>")

    inputs = {(given["use"], given["name"]): given for given in report["inputs"]}
    assert [use for use, _ in inputs] == ["train", "eval", "decode"]
    prompts = inputs["decode", "heldout_prompts"]
    assert prompts["class"] == "inputs.text.PromptInput"
    (lengths,) = [field for field in prompts["fields"] if field["path"] == "prefix_lengths"]
    assert (lengths["dtype"], lengths["arrives"]) == ("int32", [["replica", "data", "mdl"]])
    assert lengths["in_step"] == [["replica", "data"]]
    training = next(given for given in report["inputs"] if given["use"] == "train")
    (ids,) = [field for field in training["fields"] if field["path"] == "ids"]
    assert ids["in_step_text"] == "P(('replica', 'data'), None)"
    lines = done.stdout.splitlines()
    row = next(line for line in lines if line.startswith(f"train: {training['name']} "))
    assert training["class"] in row
    assert any(re.match(r"decode: heldout_prompts +inputs.text.PromptInput +\w+ +\w+ +\(\d", line) for line in lines)
    assert '<details id="inputs"' in page
    assert "<td>decode: heldout_prompts</td>" in page


def test_an_input_whose_batches_are_not_known_says_why(tmp_path):
    job = make_job(tmp_path, fields=(f"decode_datasets[0].files='{tmp_path}/none/*.txt'",))
    layouts = {layout.use: layout for layout in report_parts.of_inputs(job)}
    assert layouts["decode"].problem.startswith("PromptInput 'heldout_prompts'")
    text = job.sharding_report(inputs=list(layouts.values())).text()
    assert "not known: PromptInput 'heldout_prompts'" in text
    assert layouts["eval"].shapes is not None


def test_rows_that_are_added_and_inputs_without_a_mapping(tmp_path):
    def unmapped(config):
        config.task.train.inputs_split_mapping = None

    job = make_job(tmp_path, fields=("eval_datasets[0].batch_size=3",), customize=unmapped)
    (layout,) = [layout for layout in report_parts.of_inputs(job) if layout.use == "eval"]
    fields = {field["path"]: field for field in input_data(layout, job.partitioner.mesh_shape())["fields"]}
    assert (fields["labels"]["shape"][0], fields["labels"]["padded_shape"][0]) == (3, 8)
    assert fields["labels"]["arrives"] == fields["labels"]["in_step"] == [("replica", "data", "mdl"), ()]


@pytest.mark.full
def test_a_mesh_with_an_unknown_axis_is_refused_with_those_that_exist(tmp_path):
    done = command("--mode=inspect", TINY, "--mesh=data:4,model:2", cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert_names(done.stderr, "--mesh", "axis 'model'", "axes are replica, data, mdl")
