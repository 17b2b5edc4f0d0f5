"""Placement with two real processes on loopback (contract 3.6)."""

import os
import pathlib
import socket
import subprocess
import sys

WORKER = pathlib.Path(__file__).with_name("two_process_worker.py")
ROOT = WORKER.parents[2]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def test_local_slices_and_state_with_two_processes():
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(port), str(i), "2"],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for i, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0, output
        assert f"process {i} is done" in output
