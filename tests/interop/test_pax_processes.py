"""Two real processes restore a Pax checkpoint together, and refuse one together."""

import shutil
from pathlib import Path

import pytest
from process_helpers import run_processes

pytestmark = pytest.mark.full

NAME = "UnevenRepeatedAdam"
PROGRAM = """
import numpy as np
sys.path.insert(0, arguments[0])
import spmd_trainer
from pax_models import job_on, restored
from spmd_trainer.sharding.variables import named_leaves

expected = dict(np.load(arguments[2]))
job = job_on("UnevenRepeatedAdam", (1, 4, 2))
try:
    found = restored(arguments[1], job)
except spmd_trainer.errors.UserError as error:
    print("REFUSED", error)
    sys.exit()
for (path, array), spec in zip(named_leaves(found.state), jax.tree.leaves(job.partitioner.metadata.variables)):
    value = np.zeros(spec.padded_shape, spec.dtype)
    value[tuple(slice(0, size) for size in spec.logical_shape)] = expected[f"state/{path}"]
    assert len(array.addressable_shards) == 4
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), value[shard.index])
print("RESTORED", found.step)
"""


def run(directory, expected):
    ended = run_processes(PROGRAM, Path(__file__).parent, directory, expected, devices=4)
    assert [process.returncode for process in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    return [process.stdout.strip().splitlines()[-1] for process in ended]


def test_each_process_reads_its_own_shards(pax_data):
    expected = pax_data.folder(NAME) / "expected.npz"
    assert run(pax_data.checkpoints(NAME), expected) == ["RESTORED 20"] * 2


def test_all_processes_refuse(pax_data, tmp_path):
    shutil.copytree(pax_data.checkpoints(NAME), tmp_path / "checkpoints")
    shutil.rmtree(tmp_path / "checkpoints" / "checkpoint_00000020" / "metadata")
    for line in run(tmp_path / "checkpoints", pax_data.folder(NAME) / "expected.npz"):
        assert line.startswith("REFUSED")
        assert "no 'metadata'" in line
