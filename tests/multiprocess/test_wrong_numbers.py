"""Four real processes with wrong numbers: the device is named before its state is saved, and replay names the layer of a NaN."""

from __future__ import annotations

import re

import pytest
import wrong_runs
from job_helpers import FIELDS, Uneven, run, started, steps_on_disk

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("multiprocess"), pytest.mark.usefixtures("importable")]

STATUS_WRONG_DEVICE = 6
QUICK = FIELDS | {"eval_interval_steps": 0}
VICTIM = wrong_runs.DEVICE // 2  # two devices a process


def check_named(cache, directory, exp: str, flag: str, message: str, *, mesh: str | None = None) -> None:
    """Trains with 4 processes until the job ends; checks statuses, messages, and that nothing wrong was saved."""
    settings = Uneven(directory, 4, cache, QUICK, ("--exp_module=wrong_runs", flag), mesh, exp=f"wrong_runs.{exp}")
    with started(settings) as job:
        assert job.finish() == [STATUS_WRONG_DEVICE] * 4, job.log()
    for log in job.logs:
        assert re.search(message, log), log
    assert max(steps_on_disk(directory), default=0) < wrong_runs.STEP


def test_a_flipped_bit_in_one_copy(table, cache, tmp_path):
    variable = r"\S*softmax\S*bias\S*"
    message = (
        rf"step 6: devices that must hold.*\n  {variable}: the copy on device \d+ \(cpu, process {VICTIM}\) differs"
    )
    with table.naming("a bit flips in one copy", 4):
        check_named(cache, tmp_path / "run", "BitFlips", "--check_replicas_every=2", message)


def test_a_device_that_is_not_repeatable(table, cache, tmp_path):
    message = rf"step 2, taken twice(?s:.*)softmax\S*bias\S*: on device \d+ \(cpu, process {VICTIM}\)"
    with table.naming("a device is not repeatable", 4):
        check_named(cache, tmp_path / "run", "StepsDiffer", "--check_repeat_every=2", message)


def test_a_wrong_reduction_in_the_program_of_one_device(table, cache, tmp_path):
    message = rf"step 1: devices that must hold(?s:.*)copy on device \d+ \(cpu, process {VICTIM}\)"
    with table.naming("a wrong reduction on one device", 4):
        check_named(cache, tmp_path / "run", "WrongReduction", "--check_replicas_every=1", message, mesh="data:8")


def test_the_layer_that_makes_a_nan(table, cache, tmp_path):
    """Every repetition makes it: in the forward pass, the first one's is the first."""
    nan = ("--exp_module=nan_layers", "--fdl.set=ABOVE=-1.0", "--fdl.set=AT_STEP=6")
    with table.naming("NaN in a layer, replayed", 4):
        settings = Uneven(tmp_path / "run", 4, cache, QUICK, nan, exp="nan_layers.NanTiny")
        job = run(settings)
        assert "--mode=replay --step=6" in job.logs[0], job.log()
        job = run(
            Uneven(tmp_path / "run", 4, cache, QUICK, (*nan, "--mode=replay", "--step=6"), exp="nan_layers.NanTiny")
        )
        layer = r"lm/transformer/repeat\[0\]/sub/x_layers_0/ff_layer/ffn_layer1/activation"
        found = rf"the first NaN: forward pass, {layer}\n    div made it of finite values, at \S*nan_layers.py"
        assert re.search(found, job.output()), job.output() + job.log()
        assert not any("NaN" in job.output(index) for index in (1, 2, 3))
