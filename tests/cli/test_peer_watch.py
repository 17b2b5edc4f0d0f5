"""Messages about a process that is gone or silent say where it was last."""

from __future__ import annotations

import time

import pytest
from facts import assert_names

from spmd_trainer.cli import peer_watch
from spmd_trainer.watch.link import job

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
    assert_names(caplog.text, "process 1 (host, pid 12)", "7 s", "training step 11, input, 6 s ago", "10 s")
    silence._last[1] -= 5.0
    ((index, what),) = silence.lost()
    assert index == 1
    assert_names(what, "host is gone", "training step 11, input, 6 s ago")


def test_without_a_run_nothing_is_said_of_beats(silence):
    silence._last[1] -= 5.0
    ((_, what),) = silence.lost()
    assert_names(what, "host is gone")
    assert "beat" not in what
