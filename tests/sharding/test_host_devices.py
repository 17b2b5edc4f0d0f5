"""Many programs in a row on host devices end: XLA, left alone, deadlocks and then aborts the process."""

import os
import subprocess
import sys

import pytest

# Without a wait between the programs, the checksums end in XLA's abort each time it was tried.
_SET_UP = """
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from spmd_trainer.checkpointing.checksums import checksums
from spmd_trainer.sharding import reshard
mesh = jax.make_mesh((4, 2), ("data", "mdl"))
specs = [P(("data", "mdl")), P("mdl"), P(None, "data")]
values = np.ones((64, 64), np.float32)
arrays = {str(i): jax.device_put(values, NamedSharding(mesh, specs[i % 3])) for i in range(40)}
there = {name: NamedSharding(mesh, specs[(int(name) + 1) % 3]) for name in arrays}
"""
PROGRAMS = {
    "checksums": "for _ in range(40): checksums(arrays)",
    "resharding": """
for _ in range(10):
    moved = reshard(arrays, there)
    assert all(np.array_equal(x, values) for x in moved.values())
""",
}


@pytest.mark.parametrize("program", ["checksums", pytest.param("resharding", marks=pytest.mark.full)])
@pytest.mark.full
def test_many_programs_in_a_row_end(program):
    timeouts = "--xla_cpu_collective_call_terminate_timeout_seconds=20"
    env = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count=8 {timeouts}"}
    ran = subprocess.run(
        [sys.executable, "-c", _SET_UP + PROGRAMS[program]], env=env, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
