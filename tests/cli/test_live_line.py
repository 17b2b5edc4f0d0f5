"""The live line on a real pseudo-terminal: what else is written stays whole above it, and at the end nothing of it is left."""

import dataclasses
import io
import logging
import os
import re
import sys

import pytest
from terminal_helpers import Terminal

from spmd_trainer.cli import live_line
from spmd_trainer.training import signals
from spmd_trainer.training.live_status import ERASE_ROW, TrainingStatus, live

TRAINING = TrainingStatus(12, 600, loss=2.5, seconds_per_step=0.25, items_per_step=1000, unit="tokens")


@pytest.fixture
def in_terminal(monkeypatch):
    """Makes stderr and stdout a terminal of 60 columns, where a run trains.

    Called in the test: pytest sets the streams between fixture and test.
    """
    streams = []

    def take_over() -> Terminal:
        terminal = Terminal(60)
        streams.extend(os.fdopen(os.dup(terminal.inside), "w") for _ in range(2))
        for name, stream in zip(("stderr", "stdout"), streams, strict=True):
            monkeypatch.setattr(sys, name, stream)
        return terminal

    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_INTERACTIVE", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(live, "training", lambda: TRAINING)
    yield take_over
    monkeypatch.undo()
    for stream in streams:
        stream.close()


def lines_of(terminal):
    for stream in (sys.stderr, sys.stdout):
        stream.close()
    return terminal.lines()


def test_whatever_is_written_stays_whole_above_the_line(in_terminal):
    terminal = in_terminal()
    logger, handler = logging.getLogger("a library with a handler of its own"), logging.StreamHandler()
    logger.addHandler(handler)
    long = "a command that must be copied " * 5 + "end"
    with live_line.shown():
        terminal.wait_for("loss")
        print("printed")  # noqa: T201
        sys.stdout.write("half a line, ")
        logger.warning("a warning between")
        end = terminal.wait_for("a warning between")
        terminal.wait_for("loss", after=end)
        sys.stdout.write("and the other half\nno end")
        sys.stdout.writelines(["\n", long, "\n"])
    logger.warning("after it")
    logger.removeHandler(handler)
    assert lines_of(terminal) == [
        "printed",
        "a warning between",
        "half a line, and the other half",
        "no end",
        long,
        "after it",
    ]


def test_what_has_no_end_is_written_when_the_line_goes(in_terminal):
    terminal = in_terminal()
    with live_line.shown():
        terminal.wait_for("loss")
        sys.stdout.write("no end")
    assert lines_of(terminal) == ["no end"]


def test_everything_is_as_before_after_an_error(in_terminal):
    terminal = in_terminal()
    before = sys.stderr, sys.stdout

    def fail():
        with live_line.shown():
            assert sys.stderr is not before[0]
            terminal.wait_for("loss")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert (sys.stderr, sys.stdout, live.display) == (*before, None)
    assert lines_of(terminal) == []


@pytest.mark.parametrize("columns", [100, 30])
def test_a_resized_terminal_keeps_no_leftovers(in_terminal, columns):
    terminal = in_terminal()
    with live_line.shown():
        terminal.wait_for("loss")
        sys.stderr.write("before\n")
        terminal.wait_for("before.*loss")
        terminal.resize(columns)
        sys.stderr.write("after\n")
        end = terminal.wait_for("after")
        terminal.wait_for("12/600", after=end)
    assert lines_of(terminal) == ["before", "after"]


def test_a_signal_is_answered_in_a_row_of_its_own(in_terminal, monkeypatch):
    terminal = in_terminal()
    monkeypatch.setattr(signals.os, "write", lambda _, data: os.writev(terminal.inside, [data]))
    with live_line.shown():
        terminal.wait_for("loss")
        signals._say("SIGINT: finishing this step")
        end = terminal.wait_for("finishing this step")
        terminal.wait_for("loss", after=end)
    assert lines_of(terminal) == ["SIGINT: finishing this step"]
    assert ERASE_ROW in terminal.output


def test_a_forked_child_writes_without_the_line(in_terminal):
    terminal = in_terminal()
    with live_line.shown():
        terminal.wait_for("loss")
        stream = sys.stderr
        stream._process += 1  # as if this were a child
        stream.write("from a child, half a line")
        stream.flush()
        terminal.wait_for("half a line")


def test_it_moves_on_and_ends_with_the_run(in_terminal, monkeypatch):
    terminal = in_terminal()
    with live_line.shown():
        terminal.wait_for(r"12/600.*loss .*2\.5000.*4,000 tokens/s.*ETA.*2m27s")
        monkeypatch.setattr(live, "training", lambda: dataclasses.replace(TRAINING, step=13, loss=2.25))
        terminal.wait_for(r"13/600.*loss .*2\.2500")
        monkeypatch.setattr(live, "training", None)
        terminal.wait_for(re.escape(ERASE_ROW))
    assert lines_of(terminal) == []


@pytest.mark.parametrize(("name", "value"), [("TERM", "dumb"), ("TTY_INTERACTIVE", "0")])
def test_some_terminals_get_plain_lines(in_terminal, monkeypatch, name, value):
    in_terminal()
    monkeypatch.setenv(name, value)
    before = sys.stderr
    with live_line.shown():
        assert sys.stderr is before
        assert live.display is None


def test_a_file_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with live_line.shown():
        assert live.display is None
        sys.stderr.write("a line\n")
    assert sys.stderr.getvalue() == "a line\n"


def test_other_processes_of_a_job_show_nothing(in_terminal):
    in_terminal()
    with live_line.shown(wanted=False):
        assert live.display is None


def test_without_colours_nothing_has_a_colour(in_terminal, monkeypatch):
    terminal = in_terminal()
    monkeypatch.setenv("NO_COLOR", "1")
    with live_line.shown():
        terminal.wait_for("loss.*ETA")
    lines_of(terminal)
    codes = set(";".join(re.findall(r"\x1b\[([0-9;]*)m", terminal.output)).split(";"))
    assert codes <= {"", "0", "1", "2"}, "bold and dim at most"
