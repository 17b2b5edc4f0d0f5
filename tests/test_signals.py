"""What becomes of Ctrl-C and SIGTERM in one process; among several: tests/multiprocess."""

import os
import signal

import pytest

from spmd_trainer.programs import signals


@pytest.mark.parametrize("leaves", [True, False])
def test_a_sigterm_is_taken_once(leaves):
    with signals.save_requests(exit_after_ondemand_checkpoint=leaves) as request:
        assert not request.take()
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.take()
        assert request.leaves is leaves
        assert not request.take()


def test_a_signal_that_comes_while_the_loop_asks_is_found_at_the_next_step(monkeypatch):
    with signals.save_requests(exit_after_ondemand_checkpoint=False) as request:
        nothing_yet = request._asked.is_set

        def asked_just_before():
            answer = nothing_yet()
            os.kill(os.getpid(), signal.SIGTERM)
            return answer

        monkeypatch.setattr(request._asked, "is_set", asked_just_before)
        assert not request.take()
        monkeypatch.undo()
        assert request.take()


def test_handlers_are_what_they_were_afterwards():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with signals.save_requests(exit_after_ondemand_checkpoint=True):
        assert signal.getsignal(signal.SIGTERM) not in before
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
