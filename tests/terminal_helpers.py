"""A terminal for tests: a pseudo-terminal, what a program wrote to it, and what a person sees of that at the end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Iterator, Sequence

_CODES = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|(.)", re.DOTALL)


class Screen:
    """What is left of a program's output, scrollback included: carriage returns, erasing and colours have taken effect.

    A line that is longer than the terminal is wide is one line here, in several rows, and stays it when the width changes:
    as in terminals that flow their text anew.
    """

    def __init__(self, columns: int):
        self.columns = columns
        self._lines = [""]
        self._column = 0

    def feed(self, text: str) -> Screen:
        """Takes the program's output."""
        for parameters, code, character in _CODES.findall(text):
            line = self._lines[-1]
            if code == "J":
                assert not parameters, "only to the end of the screen"
                self._lines[-1] = line[: self._column]
            elif code:
                assert code == "m", f"the terminal of this test does not know ESC[{parameters}{code}"
            elif character == "\r":
                # After a row's last character the cursor is still in that row.
                self._column = max(self._column - 1, 0) // self.columns * self.columns
            elif character == "\n":
                self._lines.append("")
                self._column = 0
            else:
                self._lines[-1] = line[: self._column].ljust(self._column) + character + line[self._column + 1 :]
                self._column += 1
        return self

    @property
    def lines(self) -> list[str]:
        """The lines, without the row that the cursor waits in if that is empty."""
        return self._lines if self._lines[-1] else self._lines[:-1]


class Terminal:
    """A pseudo-terminal of a certain width.

    Attributes:
      inside: file descriptor of the program's side.
      output: what was written so far.
    """

    def __init__(self, columns: int):
        self.outside, self.inside = pty.openpty()
        self.columns = columns
        self.output = ""
        self.resize(columns)
        self._screen = Screen(columns)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def resize(self, columns: int) -> None:
        """Changes the width, for the program and for what a person sees from now on."""
        fcntl.ioctl(self.inside, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        if columns != self.columns:
            self._screen.columns = self.columns = columns

    def wait_for(self, pattern: str, *, after: int = 0, seconds: float = 20.0) -> int:
        """Waits until the program has written something, and returns where in `output` that ends."""
        deadline = time.monotonic() + seconds
        while (found := re.compile(pattern, re.DOTALL).search(self.output, after)) is None:
            assert time.monotonic() < deadline, f"{pattern!r} is not in {self.output[-2000:]!r}"
            time.sleep(0.02)
        return found.end()

    def lines(self) -> list[str]:
        """Closes the program's side and returns what a person sees at the end."""
        os.close(self.inside)
        self._thread.join(20)
        os.close(self.outside)
        return self._screen.lines

    def _read(self) -> None:
        pending = b""
        with contextlib.suppress(OSError):  # nobody has the other side open any more
            while data := os.read(self.outside, 65536):
                text = (pending + data).decode(errors="ignore")
                whole = len(text.encode())
                pending = (pending + data)[whole:]
                # A code may be cut in two.
                head, escape, tail = text.rpartition("\x1b")
                if escape and not re.search("[A-Za-z]", tail):
                    text, pending = head, (escape + tail).encode() + pending
                self._screen.feed(text)
                self.output += text


@contextlib.contextmanager
def in_terminal(
    command: Sequence[str | os.PathLike[str]], columns: int, **environment: str
) -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    """Context manager that runs a command in a terminal, and kills it if the test ends before it does."""
    terminal = Terminal(columns)
    names = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_INTERACTIVE", "TTY_COMPATIBLE")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=terminal.inside,
        stderr=terminal.inside,
        env={**kept, "TERM": "xterm-256color", **environment},
        start_new_session=True,
    )
    try:
        yield terminal, process
    finally:
        process.kill()
        process.wait()
