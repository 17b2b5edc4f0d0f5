"""What becomes of Ctrl-C, SIGTERM and SIGHUP in one process; among several: tests/multiprocess."""

import os
import signal

import pytest
from facts import assert_names

from spmd_trainer.training import signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("leaves", [True, False])
def test_a_signal_is_taken_once(leaves, number):
    with signals.save_requests(exit_after_ondemand_checkpoint=leaves) as request:
        assert not request.take()
        os.kill(os.getpid(), number)
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


def test_work_between_two_batches_is_left_where_the_run_is_told_to_leave(capfd):
    with signals.save_requests(exit_after_ondemand_checkpoint=True) as request:
        request.leave_if_asked()
        request.training = False
        os.kill(os.getpid(), signal.SIGTERM)
        assert_names(capfd.readouterr().err, "SIGTERM", "the final evaluation", "exiting")
        for _ in range(2):
            with pytest.raises(signals.Interrupted):
                request.leave_if_asked()
    with signals.save_requests(exit_after_ondemand_checkpoint=True) as request:
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.take()
        with pytest.raises(signals.Interrupted):
            request.leave_if_asked()


def test_a_signal_that_asks_for_a_checkpoint_alone_interrupts_nothing(capfd):
    with signals.save_requests(exit_after_ondemand_checkpoint=False) as request:
        request.training = False
        os.kill(os.getpid(), signal.SIGTERM)
        request.leave_if_asked()
    assert_names(capfd.readouterr().err, "SIGTERM", "already saved", "the run continues")


def test_handlers_are_what_they_were_afterwards():
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    with signals.save_requests(exit_after_ondemand_checkpoint=True):
        assert signal.getsignal(signal.SIGTERM) not in before
        os.kill(os.getpid(), signal.SIGHUP)
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_terminal_that_closes_may_send_sighup_twice_and_take_no_text(monkeypatch):
    def gone(*_):
        raise OSError(5, "Input/output error")

    with signals.save_requests(exit_after_ondemand_checkpoint=True) as request:
        monkeypatch.setattr(signals.os, "write", gone)
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
        monkeypatch.undo()
        assert request.take()
        assert request.leaving


def test_sighup_stays_ignored_under_nohup():
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.save_requests(exit_after_ondemand_checkpoint=True) as request:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not request.take()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)
