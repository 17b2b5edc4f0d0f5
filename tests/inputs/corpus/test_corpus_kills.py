"""A process that is killed again and again sees the batches of one that never was."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import zlib

import killed_input
import pytest

SCRIPT = pathlib.Path(killed_input.__file__)


def run(kind, position, count, stop_after=None):
    """Returns {number: checksum} of the batches of one process, which is killed after so many lines."""
    here = [str(SCRIPT.parent), *sys.path]
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), kind, str(position), str(count)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(here), "JAX_PLATFORMS": "cpu"},
    )
    found = {}
    with process, process.stdout as lines:
        for line in lines:  # to the last one: a line may be written before the kill arrives
            if not line.endswith("\n"):
                break
            number, checksum = map(int, line.split())
            found[number] = checksum
            if len(found) == stop_after:
                process.send_signal(signal.SIGKILL)
    assert process.returncode == (0 if stop_after is None else -signal.SIGKILL)
    return found


@pytest.mark.full
@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["texts", "conversations"])
def test_a_killed_input_resumes_with_the_same_batches(tmp_path, kind, kills):
    rng = random.Random(kills)
    position, seen = tmp_path / "position", {}
    for _ in range(kills):
        found = run(kind, position, 10_000, stop_after=rng.randint(1, 60))
        assert len(found) > 0
        assert {**found, **seen} == {**seen, **found}  # a batch that is read again is the same
        seen |= found
    count = max(seen) + 20
    seen |= run(kind, position, count)
    source = killed_input.build(kind, tmp_path)
    expected = {}
    for number in range(count):
        batch = source.get_next()
        expected[number] = zlib.crc32(b"".join(batch[name].tobytes() for name in sorted(batch)))
    assert seen == expected
    assert sum(source.skipped.values()) > 0
