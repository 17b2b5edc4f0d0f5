"""Resharding among two real processes, which can only use each other's devices by collectives (contract 3.7)."""

import os
import pathlib
import subprocess
import sys

import pytest
from test_two_processes import free_port

WORKER = pathlib.Path(__file__).with_name("resharding_worker.py")
ROOT = WORKER.parents[2]


@pytest.mark.full
def test_arrays_move_among_the_devices_of_two_processes():
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(WORKER), str(free_port())]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen([*command, str(i), "2"], env=env, **pipes) for i in range(2)]
    try:
        outputs = [process.communicate(timeout=90)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for i, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0, output
        assert f"process {i} is done" in output
