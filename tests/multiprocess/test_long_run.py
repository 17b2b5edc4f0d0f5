"""A long run of one process with saves, evaluations and decodes: its memory, threads and open files don't grow."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("multiprocess")]

STEPS = int(os.environ.get("FAULT_LONG_RUN_STEPS", "20000"))


def test_memory_threads_and_files_stay_where_they_are(table):
    command = [sys.executable, "-m", "benchmarks.long_run", f"--steps={STEPS}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    problems = [] if done.returncode == 0 else [done.stdout.strip().splitlines()[-1]]
    table.report(f"{STEPS:,} steps: memory, threads, files", problems, 1)
    assert not problems, done.stdout
