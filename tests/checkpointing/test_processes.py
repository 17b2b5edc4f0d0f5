"""Two real processes share a checkpoint: each writes and reads its own shards, and both agree on the damage."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
from checkpoint_helpers import assert_restored, make_mesh, specs_for
from jax.sharding import PartitionSpec as P

from spmd_trainer.checkpointing import Checkpointer

HERE = Path(__file__).parent

PROGRAM = """
import sys, jax, numpy as np
directory, port, index, here = sys.argv[1:]
jax.distributed.initialize(f"localhost:{port}", 2, int(index))
sys.path[:0] = [here, here + "/.."]
from checkpoint_helpers import make_mesh, place, specs_for
from test_processes import logical_state, SPECS
from spmd_trainer.checkpointing import Checkpointer, iterate_checkpoints

mesh = make_mesh(1, 4, 2)
variables = specs_for(logical_state(0), SPECS, mesh)
with Checkpointer(directory) as checkpoints:
    for step in (1, 2, 3):
        state = place(logical_state(step), variables, mesh)
        checkpoints.save(step, state, variables, input_state={"n": step}, metadata={}, check_finite=True)
    checkpoints.wait_until_finished()
    if jax.process_index() == 0:
        from test_damage import data_file, flip_one_bit
        from pathlib import Path
        flip_one_bit(data_file(Path(directory) / "3"))
    jax.experimental.multihost_utils.sync_global_devices("damaged")
    restored = checkpoints.restore(variables, mesh)
    want = place(logical_state(2), variables, mesh)
    same = [
        np.array_equal(a.data, b.data)
        for x, y in zip(jax.tree.leaves(restored.state), jax.tree.leaves(want))
        for a, b in zip(x.addressable_shards, y.addressable_shards)
    ]
    assert restored.step == 2 and restored.input_state == {"n": 2} and all(same) and len(same) == 12, (restored, same)
    assert checkpoints.save(3, want, variables, input_state=None, metadata={})
followed = iterate_checkpoints(directory, stop_fn=lambda step: step == 3, poll_seconds=0.1)
assert list(followed) in ([2, 3], [3])
print("done")
"""

SPECS = {"w": P("data", "mdl"), "b": P("mdl"), "step": P()}


def logical_state(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {
        "w": rng.standard_normal((13, 5)).astype(np.float32),
        "b": rng.standard_normal(7).astype(np.float32),
        "step": np.uint32(step),
    }


def test_two_processes_save_and_one_restores(tmp_path):
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = str(s.getsockname()[1])
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    directory = tmp_path / "checkpoints"
    children = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(directory), port, str(index), str(HERE)],
            cwd=HERE.parents[1],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for index in range(2)
    ]
    try:
        for child in children:
            out, err = child.communicate(timeout=60)
            assert child.returncode == 0, err[-3000:]
            assert "done" in out
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert sorted(p.name for p in directory.iterdir()) == ["1", "2", "3", "refused-3"]
    assert {"ocdbt.process_0", "ocdbt.process_1"} <= {p.name for p in (directory / "3" / "state").iterdir()}
    mesh = make_mesh(2, 1, 1)
    variables = specs_for(logical_state(2), jax.tree.map(lambda spec: P(), SPECS), mesh)
    with Checkpointer(directory) as checkpoints:
        assert_restored(checkpoints.restore(variables, mesh, step=2).state, variables, logical_state(2), mesh)
        assert checkpoints.read_metadata(2)["mesh"]["processes"] == 2
        assert checkpoints.restore(variables, mesh).step == 3
