"""Parsing durations as Pax's experiments write them."""

import datetime

import pytest
from facts import raises_naming

from spmd_trainer.checkpointing import Checkpointer
from spmd_trainer.checkpointing.retired_steps import parse_duration
from spmd_trainer.errors import UserError


@pytest.mark.parametrize(
    ("duration", "seconds"),
    [
        (45, 45),
        ("45", 45),
        (0.5, 0.5),
        ("45s", 45),
        ("90m", 5400),
        ("1h30m", 5400),
        ("2d", 172800),
        (datetime.timedelta(hours=2), 7200),
    ],
)
def test_durations(duration, seconds):
    assert parse_duration(duration) == datetime.timedelta(seconds=seconds)


@pytest.mark.parametrize("duration", ["", None])
def test_no_duration(duration):
    assert parse_duration(duration) is None


@pytest.mark.parametrize(
    "duration", ["12 hours", "h", "1h 30m", "1x", "-3s", "1e3", True, float("nan"), float("inf"), [1], "9" * 400]
)
def test_what_is_no_duration_is_refused(duration):
    message = r"save_keep_interval_duration: .* is not a duration; write e.g. '12h', '90m', .*45 \(seconds\)"
    with pytest.raises(UserError, match=message):
        parse_duration(duration)


@pytest.mark.parametrize("duration", [0, "0", "0s", -45, datetime.timedelta(0)])
def test_a_duration_is_longer_than_nothing(duration):
    with raises_naming(UserError, f"save_keep_interval_duration: {duration!r}", "0 seconds", "'' or None"):
        parse_duration(duration)


@pytest.mark.parametrize("duration", [45, "45", "", None])
def test_a_checkpointer_takes_them(tmp_path, duration):
    with Checkpointer(tmp_path, save_max_to_keep=1, save_keep_interval_duration=duration) as checkpoints:
        assert checkpoints.should_save(1)
