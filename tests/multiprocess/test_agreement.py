"""Processes that see different things: inputs that end, settings that differ. They agree, or all of them say why not."""

from __future__ import annotations

import dataclasses
import re
import signal

import pytest
from job_helpers import FIELDS, STATUS_USER_ERROR, Uneven, losses, run, started, steps_on_disk

pytestmark = [pytest.mark.xdist_group("multiprocess"), pytest.mark.usefixtures("importable")]


@pytest.mark.full
def test_where_one_process_input_ends_all_end_there_and_save(cache, tmp_path):
    directory = tmp_path / "run"
    fields = FIELDS | {"eval_interval_steps": 0}
    with started(Uneven(directory, 2, cache, fields, exp="uneven_inputs.EndsEarlyOnProcess1")) as job:
        assert job.finish() == [0, 0], job.log()
    assert re.search(r"'stream' .*ended on process 1 after 5 batches", job.logs[0]), job.log()
    assert re.search(r"finished: step 5 of 12 .*input has ended", job.logs[0]), job.log()
    assert steps_on_disk(directory)[-1] == 5


@pytest.mark.full
def test_a_slow_process_is_waited_for(cache, tmp_path):
    directory = tmp_path / "run"
    fields = FIELDS | {"eval_interval_steps": 0, "num_train_steps": 4}
    with started(Uneven(directory, 2, cache, fields, exp="uneven_inputs.SlowOnProcess1")) as job:
        assert job.finish() == [0, 0], job.log()
    assert steps_on_disk(directory)[-1] == 4


@pytest.mark.full
def test_an_evaluation_that_ends_at_different_batches_is_refused_by_all(cache, tmp_path):
    fields = FIELDS | {"eval_interval_steps": 2, "num_train_steps": 4}
    with started(Uneven(tmp_path / "run", 2, cache, fields, exp="uneven_inputs.UnevenEvaluation")) as job:
        assert job.finish() == [STATUS_USER_ERROR] * 2, job.log()
    message = "the evaluation input 'uneven' has ended on process 1 after 1 batches, and not on the others. Give every process"
    assert all(message in log for log in job.logs), job.log()


@pytest.mark.parametrize(
    ("flags", "difference"),
    [
        (("--fdl.set=task.train.random_seed=7",), r"task\.train\.random_seed is 7 there and 1234 on process 0"),
        pytest.param(
            ("--fdl.set=task.train.num_train_steps=3",),
            r"task\.train\.num_train_steps is 3 there and 12 on process 0",
            marks=pytest.mark.full,
        ),
        pytest.param(
            ("--num_minibatches=2",), r"--num_minibatches is 2 there and None on process 0", marks=pytest.mark.full
        ),
        pytest.param(
            ("--noenable_checkpoint_saving",),
            r"--enable_checkpoint_saving is False there and True on process 0",
            marks=pytest.mark.full,
        ),
    ],
)
def test_processes_with_different_settings_do_not_start(cache, tmp_path, flags, difference):
    directory = tmp_path / "run"
    with started(Uneven(directory, 2, cache, FIELDS, own={1: flags})) as job:
        assert job.finish() == [STATUS_USER_ERROR] * 2, job.log()
    for log in job.logs:
        assert re.search(f"process 1 .*other settings .*process 0: {difference}", log), job.log()
        assert "Traceback" not in log
    assert not directory.exists()


@pytest.mark.full
def test_an_elastic_run_of_two_processes_is_refused(cache, tmp_path):
    with started(Uneven(tmp_path / "run", 2, cache, FIELDS, exp="uneven_inputs.Elastic")) as job:
        assert job.finish() == [STATUS_USER_ERROR] * 2, job.log()
    for log in job.logs:
        assert re.search(r"elastic=True .*one process, .* 2\b", log), job.log()
        assert "compiling" not in log


@pytest.mark.full
def test_each_process_resumes_its_stream_at_its_own_position(cache, tmp_path):
    directory, fields = tmp_path / "run", FIELDS | {"num_train_steps": 24, "eval_interval_steps": 0}
    settings = Uneven(directory, 2, cache, fields, exp="uneven_inputs.OwnPositions")
    whole = run(dataclasses.replace(settings, directory=tmp_path / "whole"))
    with started(settings) as job:
        job.wait_for_line("saved step 4 ")
        job.send(signal.SIGKILL, 1)
        job.finish()
    saved = steps_on_disk(directory)[-1]
    again = run(settings)
    assert f"restored step {saved} from" in again.logs[0], again.log()
    assert losses(directory) == losses(whole.settings.directory)


@pytest.mark.full
def test_streams_of_two_processes_are_not_resumed_by_one(cache, tmp_path):
    fields = FIELDS | {"num_train_steps": 4, "eval_interval_steps": 0}
    settings = Uneven(tmp_path / "run", 2, cache, fields, exp="uneven_inputs.OwnPositions")
    run(settings)
    alone = dataclasses.replace(settings, processes=1, fields=fields | {"num_train_steps": 8})
    with started(alone) as job:
        assert job.finish() == [STATUS_USER_ERROR], job.log()
    assert re.search("input.*2 processes", job.logs[0]), job.log()
