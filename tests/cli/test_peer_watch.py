"""Messages about a process that is gone or silent say where it was last."""

from __future__ import annotations

import time

import pytest

from spmd_trainer.cli import peer_watch
from spmd_trainer.health.link import job

NAMES = {1: "process 1 (host, pid 12)"}


@pytest.fixture
def silence():
    """A process that has not answered for 7 s of 10."""
    silence = peer_watch._Silence(NAMES, 1.0, 10)
    silence._last[1] = time.monotonic() - 7.0
    return silence


def test_a_silent_process_is_named_with_its_last_beat(silence, monkeypatch, caplog):
    monkeypatch.setattr(job, "last_beat", lambda process: f"training step 1{process}, input, 6 s ago")
    assert list(silence.lost()) == []
    assert "process 1 (host, pid 12) has not answered for 7 s" in caplog.text
    assert "(its last beat: training step 11, input, 6 s ago). After 10 s" in caplog.text
    silence._last[1] -= 5.0
    ((index, what),) = silence.lost()
    assert index == 1
    assert what.endswith("its host is gone (its last beat: training step 11, input, 6 s ago)")


def test_without_a_run_nothing_is_said_of_beats(silence):
    silence._last[1] -= 5.0
    ((_, what),) = silence.lost()
    assert what.endswith("its host is gone")
