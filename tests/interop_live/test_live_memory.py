"""Reading a made-up folder of 2 GiB: peak memory, and speed beside that of reading its bytes."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow  # runs by `make interop`
MEASURE = pathlib.Path(__file__).parent / "measure_import.py"


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory):
    directory = tmp_path_factory.mktemp("large") / "folder"
    subprocess.run([sys.executable, str(MEASURE), "make", str(directory)], check=True)
    return directory


@pytest.mark.parametrize("devices", [1, 8])
def test_peak_memory(devices, large_folder, capsys):
    # A process of its own: the peak is that of its whole life.
    finished = subprocess.run(
        [sys.executable, str(MEASURE), "import", str(large_folder), str(devices)],
        check=True,
        capture_output=True,
        text=True,
    )
    peak, state, largest, speed, raw_speed = map(float, finished.stdout.split()[-5:])
    with capsys.disabled():
        sys.stdout.write(
            f"\n{devices} devices: peak {peak:.0f} MiB for a state of {state:.0f} MiB and a largest tensor of {largest:.0f} MiB; "
            f"{speed:.2f} GiB/s, {speed / raw_speed:.2f} of reading the bytes into memory\n"
        )
    assert peak <= 1.1 * (state + largest)
