"""A command whose terminal closes ends with its own status, not with Python's 120 for output that it could not write."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_IGN)
from spmd_trainer.errors import terminal
sys.stdout.buffer.write(b"a line that has no end yet")
sys.stdin.readline()  # the end of it: the terminal is gone
if sys.argv[1] == "let go":
    terminal.flush()
"""


BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


@pytest.mark.parametrize(("argument", "status"), [("let go", 0), ("nothing", 120)])
def test_the_exit_status(argument, status):
    terminal, inside = os.openpty()
    reader, writer = os.pipe()
    command = [sys.executable, "-c", PROGRAM, argument]
    with subprocess.Popen(command, stdin=reader, stdout=inside, stderr=subprocess.PIPE, env=BUFFERED) as process:
        os.close(inside)
        os.close(reader)
        os.close(terminal)
        os.close(writer)
        _, text = process.communicate(timeout=60)
        assert process.returncode == status, text
