"""The candidates of `--mode=plan`, and the flags that choose and describe them."""

import dataclasses
import shlex
import subprocess
import sys

import numpy as np
import pytest
from facts import assert_names, raises_naming
from plan_helpers import EXPERIMENT, make_job

from spmd_trainer.errors import UserError
from spmd_trainer.planner import plan_candidates
from spmd_trainer.planner.plan_candidates import Candidate
from spmd_trainer.settings import seconds
from spmd_trainer.training.run_config import PlanConfig, make_run_config


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return make_job(tmp_path_factory.mktemp("job"))


def test_all_ways_to_factor_the_devices():
    found = list(plan_candidates.meshes(("replica", "data", "mdl"), 64))
    assert len(found) == len(set(found)) == 28  # 2 ** 6 over three axes
    assert (("replica", 1), ("data", 16), ("mdl", 4)) in found
    assert len(list(plan_candidates.meshes(("data", "mdl"), 12))) == 6
    across = list(plan_candidates.meshes(("replica", "data", "mdl"), 8, num_slices=4))
    # Only an outermost axis of 4 or 8 crosses the slices.
    assert all(next(size for _, size in mesh if size > 1) % 4 == 0 for mesh in across)
    assert (("replica", 1), ("data", 4), ("mdl", 2)) in across
    assert (("replica", 2), ("data", 4), ("mdl", 1)) not in across


def test_flags_of_a_candidate_give_its_settings(job, tmp_path):
    candidate = Candidate((("replica", 1), ("data", 2), ("mdl", 4)), "save_dot_only", 2, 12)
    # As a shell reads them.
    assert shlex.split(candidate.flags(job.config.experiment)) == [
        "--mesh=replica:1,data:2,mdl:4",
        "--num_minibatches=2",
        "--fdl.set=task.model.lm_tpl.checkpoint_policy='save_dot_only'",
        "--fdl.set=train_datasets[0].batch_size.global_batch_size=12",
    ]
    changed = make_run_config(EXPERIMENT, tmp_path, overrides=candidate.overrides(job.config.experiment))
    lines = changed.experiment.lines()
    assert "task.model.lm_tpl.checkpoint_policy: 'save_dot_only'" in lines
    assert "train_datasets[0].batch_size.global_batch_size: 12" in lines


def test_the_dimensions_multiply(job):
    def count(*searched):
        return len(
            plan_candidates.enumerate_candidates(
                job.config.experiment,
                searched,
                mesh=job.partitioner.mesh_shape(),
                num_slices=1,
                rows=job.num_rows,
            )
        )

    assert count("mesh") == 10
    assert count("mesh", "minibatches") == 20  # 6 rows: 1 or 2
    assert count("mesh", "remat") == 10 * 17
    assert count("batch") == 4


@pytest.mark.parametrize(("text", "length"), [("90s", 90), ("20m", 1200), ("1.5h", 5400)])
def test_budgets(text, length):
    assert seconds("--budget", text) == length


@pytest.mark.parametrize("number", [1e-05, 90, 1e17, np.float32(2.5)])
def test_a_budget_in_seconds(number):
    config = PlanConfig(None, "run", budget=number)
    assert dataclasses.replace(config, mesh=None).budget == config.budget == number


@pytest.mark.parametrize("number", [0, -1.0, float("nan"), True, None, ["20m"]])
def test_a_budget_that_is_none(number):
    with raises_naming(UserError, f"--budget={number}", "20m"):
        PlanConfig(None, "run", budget=number)


@pytest.mark.parametrize("text", ["20", "m", "-1m", "20 minutes"])
def test_a_budget_that_cannot_be_read(text):
    with raises_naming(UserError, f"--budget={text}", "90s", "20m", "1h"):
        seconds("--budget", text)


@pytest.mark.parametrize("text", ["0s", "0.0h"])
def test_a_budget_of_no_time(text):
    with raises_naming(UserError, f"--budget={text}", "no time", "--budget=20m"):
        seconds("--budget", text)


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["--mode=plan"], ("--mode=plan needs --topology=CHIP:SHAPE", "v5e:16x16", "h100:32x8")),
        pytest.param(["--mode=inspect", "--budget=5m"], ("--budget goes with --mode=plan",), marks=pytest.mark.full),
        pytest.param(
            ["--mode=inspect", "--num_slices=2"], ("--num_slices goes with --topology",), marks=pytest.mark.full
        ),
        pytest.param(
            ["--mode=eval", "--num_minibatches=2"],
            ("--num_minibatches goes with", "--mode=train, sweep, inspect, plan", "verify and replay"),
            marks=pytest.mark.full,
        ),
        pytest.param(
            ["--mode=plan", "--topology=v5e:2x2", "--search=mehs"],
            ("--search", "no 'mehs'", "did you mean mesh"),
            marks=pytest.mark.full,
        ),
        pytest.param(
            ["--mode=plan", "--topology=v5e:2x2", "--budget=20"],
            ("--budget=20", "90s", "20m", "1h"),
            marks=pytest.mark.full,
        ),
        pytest.param(
            ["--mode=train", "--topology=v5e:2x2"],
            ("--topology goes with --mode=inspect and plan",),
            marks=pytest.mark.full,
        ),
    ],
)
@pytest.mark.full
def test_flags_that_do_not_go_together(tmp_path, arguments, facts):
    command = [
        sys.executable,
        "-m",
        "spmd_trainer.main",
        f"--exp={EXPERIMENT}",
        f"--job_log_dir={tmp_path}",
        *arguments,
    ]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 2
    assert_names(finished.stderr, *facts)


def test_the_number_of_minibatches_is_that_of_the_flag(tmp_path):
    assert make_job(tmp_path, num_minibatches=2).partitioner.num_minibatches == 2
    with pytest.raises(UserError, match="num_minibatches=4"):
        make_job(tmp_path, num_minibatches=4)  # 6 rows


def test_an_unknown_dimension_is_said_once_with_the_known_ones():
    with raises_naming(UserError, "--search=mesh,foo:", "no 'foo'", "mesh, remat, minibatches, batch") as error:
        make_run_config(EXPERIMENT, ".", mode="plan", search=["mesh", "foo"])
    assert str(error.value).count("remat") == 1


def test_an_unknown_dimension_gets_a_suggestion():
    with raises_naming(UserError, "--search", "'remta'", "mesh, remat, minibatches, batch", "mean remat"):
        make_run_config(EXPERIMENT, ".", mode="plan", search=["remta"])
