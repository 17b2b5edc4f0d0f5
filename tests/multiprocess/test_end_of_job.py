"""Signals to one of two real processes: both save the same step and end, or end the final evaluation."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import termios

import pytest
from job_helpers import (
    FIELDS,
    STATUS_INTERRUPTED,
    STATUS_LOST_PROCESS,
    STATUS_USER_ERROR,
    STEPS,
    TIMEOUT_SECONDS,
    Settings,
    losses,
    run,
    started,
    steps_on_disk,
)

pytestmark = pytest.mark.xdist_group("multiprocess")
# An evaluation much longer than the test: each process evaluates one window per step.
LONG_EVALUATION = ("--fdl.set=eval_datasets[0].max_windows=100000", "--fdl.set=eval_datasets[0].batch_size=1")


@pytest.mark.full
def test_a_sigterm_to_one_process_interrupts_the_final_evaluation_of_both(cache, tmp_path):
    directory = tmp_path / "run"
    fields = FIELDS | {"eval_interval_steps": 1000}
    with started(Settings(directory, 2, cache, fields, LONG_EVALUATION)) as job:
        job.wait_for_line(f"evaluating heldout at step {STEPS}")
        job.send(signal.SIGTERM, 1)
        assert job.finish() == [0, 0], job.log()
    ended = rf"finished: step {STEPS} of {STEPS} .*final evaluation .*interrupted.*same command"
    assert re.search(ended, job.logs[0]), job.log()
    assert re.search(r"process 1: .*signal.* 2 processes .*last step", job.logs[1]), job.log()
    assert steps_on_disk(directory)[-1] == STEPS
    assert not (directory / "summaries" / "eval_heldout").exists()


WITHOUT_END = FIELDS | {"num_train_steps": 100_000, "save_interval_steps": 1000, "eval_interval_steps": 0}


@pytest.mark.full
def test_a_sighup_to_one_process_saves_and_ends_both(cache, tmp_path):
    directory = tmp_path / "run"
    with started(Settings(directory, 2, cache, WITHOUT_END)) as job:
        job.wait_for_line("training from step")
        # A terminal that closes sends several.
        job.send(signal.SIGHUP, 1)
        job.send(signal.SIGHUP, 1)
        assert job.finish() == [0, 0], job.log()
    first, saved = steps_on_disk(directory)
    assert first == 0
    assert f"stopped at step {saved} of" in job.logs[0]
    assert re.search(r"process 1: .*signal.* 2 processes save .*step", job.logs[1]), job.log()


@pytest.mark.slow
@pytest.mark.parametrize("interrupted", [0, 1])
def test_a_second_ctrl_c_ends_a_training_process_without_a_traceback(cache, tmp_path, interrupted):
    with started(Settings(tmp_path / "run", 2, cache, WITHOUT_END)) as job:
        job.wait_for_line("training from step")
        job.send(signal.SIGSTOP, 1 - interrupted)  # so that the first Ctrl-C can't end the job in order
        job.send(signal.SIGINT, interrupted)
        job.wait_for_line("SIGINT: finishing this step", interrupted)
        job.send(signal.SIGINT, interrupted)
        job.send(signal.SIGCONT, 1 - interrupted)
        statuses = job.finish()
    assert (statuses[interrupted], statuses[1 - interrupted]) == (STATUS_INTERRUPTED, STATUS_LOST_PROCESS), job.log()
    assert re.search(rf"because process {interrupted} \(.*\) of 2 was interrupted: Ctrl-C", job.log()), job.log()
    assert "Traceback" not in job.logs[interrupted]


@pytest.mark.full
def test_both_save_when_process_0_cannot_write_summaries(cache, tmp_path):
    directory = tmp_path / "run"
    run(Settings(directory, 2, cache, WITHOUT_END | {"num_train_steps": 2}))
    shutil.rmtree(directory / "summaries/train")
    (directory / "summaries/train").write_text("a file where the summaries' directory should be")
    with started(Settings(directory, 2, cache, WITHOUT_END)) as job:
        assert job.finish() == [STATUS_USER_ERROR, 0], job.log()
    assert steps_on_disk(directory)[-1] > 2
    assert "writing summaries failed" in job.logs[0]
    assert "Traceback" not in job.log()


@pytest.mark.full
def test_a_run_whose_terminal_closes_saves_and_ends(cache, tmp_path):
    directory = tmp_path / "run"
    (command,) = Settings(directory, 1, cache, WITHOUT_END).commands()
    terminal, inside = os.openpty()
    run_ = subprocess.Popen(
        command,
        stdin=inside,
        stdout=inside,
        stderr=inside,
        env=os.environ | {"JAX_COMPILATION_CACHE_DIR": cache},
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    try:
        os.close(inside)
        text = b""
        while b"training from step" not in text:
            text += os.read(terminal, 1000)
        os.close(terminal)
        assert run_.wait(TIMEOUT_SECONDS) == 0
    finally:
        run_.kill()
        run_.wait()
    first, saved = steps_on_disk(directory)
    assert first == 0
    assert f"stopped at step {saved} of" in (directory / "logs" / "train.log").read_text()


@pytest.mark.full
def test_a_stopped_process_loses_nothing(one_process, cache, tmp_path):
    directory = tmp_path / "run"
    fields = FIELDS | {"eval_interval_steps": 0, "save_interval_steps": 2}
    with started(Settings(directory, 2, cache, fields | {"num_train_steps": 100_000})) as job:
        job.wait_for_line(r"saved step \d+")
        job.send(signal.SIGSTOP, 1)
        job.processes[0].wait()
        job.send(signal.SIGCONT, 1)
        statuses = job.finish()
    assert statuses[0] == STATUS_LOST_PROCESS, job.log()
    assert statuses[1] == STATUS_LOST_PROCESS, job.log()
    assert re.search(r"process 0 exits .*process 1 \(.*\) .*not answered .*1\d s", job.logs[0]), job.log()
    newest = steps_on_disk(directory)[-1]
    again = run(Settings(directory, 2, cache, fields | {"num_train_steps": max(newest, STEPS) + 2}))
    assert f"restored step {newest} from" in again.logs[0], again.log()
    early = {step: loss for step, loss in losses(directory).items() if step <= STEPS}
    assert early == pytest.approx(losses(one_process.settings.directory), rel=1e-5)
