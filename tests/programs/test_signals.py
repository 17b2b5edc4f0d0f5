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


def test_signals_that_come_while_the_loop_asks_are_found_and_hang_nothing():
    with signals.save_requests(exit_after_ondemand_checkpoint=False) as request:
        previous = signal.signal(signal.SIGALRM, lambda number, frame: os.kill(os.getpid(), signal.SIGTERM))
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        try:
            taken = sum(request.take() for _ in range(300_000))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        assert taken
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.take()


def test_handlers_are_what_they_were_afterwards():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with signals.save_requests(exit_after_ondemand_checkpoint=True):
        assert signal.getsignal(signal.SIGTERM) not in before
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
