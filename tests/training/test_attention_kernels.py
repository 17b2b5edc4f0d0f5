"""The attention kernels of a job are named where a user looks: the log of a run, the sharding report and the plan."""

import json

import pytest
import trained_helpers
from absl import logging
from facts import raises_naming

from spmd_trainer.errors import UserError
from spmd_trainer.kernels import kernels
from spmd_trainer.planner import plan
from spmd_trainer.training import report_parts, run_directory, train
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import make_run_config

FUSED = ("lm.cloud.LmCloudSpmdAdamTiny", "USE_FUSED_ATTENTION=True")


def job_of(exp, *overrides, directory="."):
    return Job.build(make_run_config(exp, directory, overrides=overrides, mode="inspect", plan=True))


@pytest.mark.full
def test_the_plan_and_the_report_name_the_kernel():
    job = job_of(*FUSED)
    lines = report_parts.of_forward_pass(job)
    # Rows are short.
    assert lines == ["attention kernel: reference"]
    report = job.sharding_report(lines)
    assert "attention kernel: reference" in report.text().splitlines()
    assert json.loads(report.json())["about"]["attention kernel"] == "reference"
    assert plan.plan(job).attention == lines


@pytest.mark.full
def test_a_model_without_attention_kernels_has_no_lines():
    assert report_parts.of_forward_pass(job_of("lm.stdlib.StdlibBytesTiny")) == []


def test_a_kernel_that_takes_the_place_of_the_devices_own_is_a_warning(caplog):
    against = {"cudnn": ["head width 320 is over 256"]}
    recorded = {"layer": kernels.Choice("chunked", against), "moe": kernels.Choice("hopper", of="experts")}
    with caplog.at_level("INFO", logger="absl"):
        report_parts.log_choices(kernels.choice_lines(recorded))
    assert [(record.levelname, record.message.split(":")[0]) for record in caplog.records] == [
        ("WARNING", "attention kernel"),
        ("INFO", "experts kernel"),
    ]
    assert "head width 320" in caplog.messages[0]


def test_a_kernel_that_cannot_be_used_is_refused_with_the_reason():
    with raises_naming(UserError, "'cudnn'", "can't be used", "NVIDIA GPUs", "a cpu"):
        report_parts.of_forward_pass(job_of(*FUSED, "ATTENTION_KERNEL='cudnn'"))


@pytest.fixture
def verbose():
    """Lets absl log what users see. A level that caplog sets is reset by praxis."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.INFO)
    yield
    logging.set_verbosity(before)


@pytest.mark.full
@pytest.mark.usefixtures("verbose")
def test_a_run_logs_its_kernels_and_adds_them_to_its_report(tmp_path, caplog, monkeypatch):
    exp, override = FUSED
    written, write = [], run_directory.write_report
    monkeypatch.setattr(run_directory, "write_report", lambda *args: (written.append(args), write(*args)))
    train.train(trained_helpers.make_job(tmp_path / "run", exp=exp, fields=(override, "task.train.num_train_steps=1")))
    assert "attention kernel: reference" in caplog.messages
    assert len(written) == 1
    report = json.loads((tmp_path / "run" / "sharding_report.json").read_text())
    assert report["about"]["attention kernel"] == "reference"
    assert "attention kernel: reference" in (tmp_path / "run" / "sharding_report.txt").read_text()
