"""Pax checkpoints in buckets are read like those on disk, and a save that was cut off is told from a finished one."""

import tarfile
from pathlib import Path

import numpy as np
import pytest
from facts import raises_naming

from spmd_trainer import pax
from spmd_trainer.sharding.variables import named_leaves

INTEROP = Path(__file__).parents[1] / "interop"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The run directory of an archive in `interop/data/README.md`."""
    folder = tmp_path_factory.mktemp("pax")
    with tarfile.open(INTEROP / "data" / "UnevenRepeatedAdam.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "UnevenRepeatedAdam"


def upload(source, target):
    for path in source.rglob("*"):
        if path.is_file():
            (target / path.relative_to(source).as_posix()).write_bytes(path.read_bytes())


@pytest.mark.parametrize("kind", ["ocdbt_1.2", "flax_1.1", "zarr_0.0"])
def test_every_kind_is_read_from_a_bucket(remote, run, kind):
    directory = remote / "checkpoints"
    upload(run / kind, directory)
    if str(remote).startswith("gs://"):
        # Pax asks for the file on gs:// too.
        with raises_naming(pax.PaxDamagedError, "commit_success.txt", "cut off"):
            pax.read_checkpoint(directory, 20)
        (next(directory.iterdir()) / "commit_success.txt").write_text("")
    expected = dict(np.load(run / "expected.npz"))
    leaves = named_leaves(pax.read_checkpoint(remote))
    assert len(leaves) == 54
    for path, leaf in leaves:
        np.testing.assert_array_equal(np.asarray(leaf), expected[f"state/{path}"])
