"""Real processes, one of which becomes slow: it is named with the part that is slow. Even ones are not, on a loaded machine."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import slow_runs
from job_helpers import TINY, RunningJob, Uneven, started

from spmd_trainer.watch.step_parts import WINDOW

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("multiprocess"), pytest.mark.usefixtures("importable")]

SLOW_LINE = r"process (\d+) \(host \S+\) is slow: (\w+) takes \S+ ms of a step, others .*, over steps (\d+) to (\d+)"
FIELDS = {"eval_interval_steps": 0, "save_interval_steps": 100_000, "summary_interval_steps": 50}
# A step of 4 processes on 2 loaded cores may take a second.
LONGEST_SECONDS = 1800
MODULE = ("--exp_module=slow_runs",)


def trained(directory, cache: str, exp: str, steps: int, slow_one: int | None = None) -> RunningJob:
    """Trains with 4 processes."""
    env = {} if slow_one is None else {slow_runs.PROCESS: str(slow_one)}
    settings = Uneven(directory, 4, cache, FIELDS | {"num_train_steps": steps}, MODULE, exp=exp, env=env)
    with started(settings) as job:
        assert job.finish(LONGEST_SECONDS) == [0] * 4, job.log()
    return job


def named(job: RunningJob) -> list[tuple[str, ...]]:
    """Returns (process, part, first step, last step) of each line that names a slow process."""
    return re.findall(SLOW_LINE, "".join(job.logs))


@pytest.mark.parametrize(
    ("exp", "part"),
    [("slow_runs.CallbackSpins", "dispatch"), ("slow_runs.InputIsSlow", "input")],
    ids=["busy", "input"],
)
def test_a_slow_process_is_named_with_its_part(table, tmp_path, cache, exp, part):
    steps = slow_runs.EVEN_STEPS + 3 * WINDOW
    with table.naming(f"one process is slow: {part}", 4):
        job = trained(tmp_path / "run", cache, exp, steps, slow_one=2)
        found = named(job)
        assert [(process, which) for process, which, *_ in found] == [("2", part)], job.log()
        # Within 20 steps after the first window that is full of slow steps.
        assert int(found[0][3]) <= slow_runs.EVEN_STEPS + 2 * WINDOW


def test_a_thousand_even_steps_on_a_loaded_machine_raise_no_alarm(table, tmp_path, cache):
    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        job = trained(tmp_path / "run", cache, TINY, 1000)
    finally:
        for process in load:
            process.kill()
            process.wait()
    alarms = named(job)
    table.report("1,000 even steps under load: no alarm", [f"an alarm: {alarm}" for alarm in alarms], 4)
    assert not alarms, job.log()
