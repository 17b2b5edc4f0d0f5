r"""Nothing that others have named or written acts on a terminal: it comes out as `\x1b`, whatever says it."""

import errno
import io
import logging
import os
import sys

import pytest
from facts import raises_naming
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spmd_trainer.cli import flag_parsing, live_line, log_lines
from spmd_trainer.errors import UserError, terminal
from spmd_trainer.inputs import files
from spmd_trainer.inputs.chat_template import ChatTemplate
from spmd_trainer.training.live_status import live

# Clears a screen, sets its title, rings, goes back, an 8-bit CSI, turns what follows around, ends a line, part of a name.
HOSTILE = "\x1b[2J\x1b]0;title\x07\x08\r\x9b31m\u202e\u2066\u2028\udcff"
SHOWN = r"\x1b[2J\x1b]0;title\x07\x08\r\x9b31m\u202e\u2066\u2028\udcff"


def acts(text: str) -> set[str]:
    return set(text) & (set(HOSTILE) - set("[2J]0;titlem31"))


def test_what_acts_is_escaped_and_all_writing_stays():
    assert terminal.visible(HOSTILE) == SHOWN
    plain = "a\tb\nc \u65e5\u672c\u3000\u0639\u0631\u0628\u064a \U0001f468\u200d\U0001f469 \xe9 \\x1b"
    assert terminal.visible(plain) == plain
    assert terminal.visible("a\tb\nc", keep="") == r"a\tb\nc"


def test_a_stream_gets_what_its_encoding_has():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    terminal.write("caf\xe9 \x1b[1m\n", stream)
    terminal.write("\x1b[1m\n", stream, styled=True)
    assert stream.buffer.getvalue() == b"caf\\xe9 \\x1b[1m\n\x1b[1m\n"


def test_an_output_on_a_full_disk_is_an_error_and_a_reader_that_left_is_not(tmp_path):
    full = open("/dev/full", "w")  # noqa: SIM115  # closed below
    with raises_naming(UserError, os.strerror(errno.ENOSPC)):
        terminal.write("a table\n", full)
    full.write("more")
    full.close()  # as Python does at its end: what is left goes nowhere
    full = open("/dev/full", "w")  # noqa: SIM115
    with raises_naming(UserError, os.strerror(errno.ENOSPC)):
        terminal.write("more than the buffer holds\n" * 10_000, full)
    full.close()
    ours, theirs = os.pipe()
    os.close(ours)
    left = os.fdopen(theirs, "w")
    terminal.write("a table\n", left)
    with pytest.raises(BrokenPipeError):
        left.close()


def test_the_message_of_an_error(capsys):
    template = ChatTemplate("{{ raise_exception(messages[0]['content']) }}")
    with pytest.raises(UserError) as info:
        template.render([{"role": "user", "content": HOSTILE}])
    with pytest.raises(SystemExit):
        flag_parsing.leave(str(info.value))
    said = capsys.readouterr().err
    assert SHOWN in said
    assert not acts(said)


def test_the_name_of_a_file(tmp_path, capsys):
    (tmp_path / HOSTILE).write_bytes(b"")
    with pytest.raises(UserError) as info:
        files.find_files(str(tmp_path / "*"))
    with pytest.raises(SystemExit):
        flag_parsing.leave(str(info.value))
    said = capsys.readouterr().err
    assert SHOWN in said
    assert not acts(said)


def test_log_lines_with_their_tracebacks(tmp_path):
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        error = sys.exc_info()
    record = logging.LogRecord("absl", logging.WARNING, __file__, 1, "%s is left out", (HOSTILE,), error)
    said = log_lines._Format().format(record)
    assert said.count(SHOWN) == 2
    assert not acts(said)

    run_log = log_lines.RunLog()
    run_log.handle(record)
    run_log.open(tmp_path / "train.log")
    run_log.close()
    written = (tmp_path / "train.log").read_text()
    assert written.count(SHOWN) == 2
    assert not acts(written)


def test_what_a_display_prints(monkeypatch):
    table, text = Table("file"), Text(HOSTILE)
    table.add_row(HOSTILE)
    stream = io.StringIO()
    monkeypatch.setenv("TERM", "dumb")
    line = live_line.LiveLine(stream, Console(file=stream, width=200), live)
    monkeypatch.setattr(line, "_width", lambda: 200)
    for content in (HOSTILE, text, table):
        line.print(content)
    said = stream.getvalue()
    assert said.count(r"\x1b[2J\x1b]0;title") == 3
    assert not acts(said)
