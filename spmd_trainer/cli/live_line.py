"""A live line at the bottom of a terminal: what the run does now. Whatever else is written to the terminal goes above it.

The line takes one row, and the cursor waits in that row's first column. So a resized terminal keeps the cursor at the line's
beginning, and a signal handler or a library in C++ that writes without asking spoils this row at most, until it is drawn again.
"""

from __future__ import annotations

import contextlib
import logging as std_logging
import os
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO, cast

from absl import logging

from spmd_trainer.cli import live_columns
from spmd_trainer.metrics.live_status import ERASE_ROW, LiveStatus, live

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

# Seconds between two looks at the status.
_INTERVAL = 0.25
_START_OF_ROW = "\r"
_ERASE_REST = "\x1b[J"
# Where the terminal does not say how wide it is.
_DEFAULT_WIDTH = 80


@contextlib.contextmanager
def shown(*, wanted: bool = True) -> Iterator[None]:
    """Context manager that shows the live line if stderr is a terminal that can.

    Not in notebooks, files and pipes, and not with TERM=dumb. `NO_COLOR` takes the colours away.

    Args:
      wanted: False shows nothing, e.g. on all processes of a job but one.
    """
    console = _console(sys.stderr) if wanted and live.display is None and sys.stderr.isatty() else None
    if console is None:
        yield
        return
    with LiveLine(sys.stderr, console, live).drawn():
        yield


def _console(stream: TextIO) -> Console | None:
    """Returns rich's console on a terminal, or None if nothing can be drawn on it."""
    from rich.console import Console  # takes a tenth of a second: not for --help and --list

    console = Console(file=stream)
    return console if console.is_interactive and not console.legacy_windows else None


class LiveLine:
    """Draws the status of a run, and lets log lines, `print` and libraries' messages pass above it.

    Everything that is written to `sys.stderr`, to `sys.stdout` if that is a terminal too, and by log handlers on them, is written
    as whole lines between two drawings.
    """

    def __init__(self, stream: TextIO, console: Console, status: LiveStatus):
        """Draws nothing yet.

        Args:
          stream: the terminal.
          console: rich's, on the same terminal: knows its colours and characters.
          status: what to show.
        """
        self._stream = stream
        self._console = console
        self._status = status
        # A signal handler or a destructor may write while this thread holds it.
        self._lock = threading.RLock()
        self._drawn = ""
        self._drawn_width = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="live-line", daemon=True)

    @contextlib.contextmanager
    def drawn(self) -> Iterator[None]:
        """Context manager that shows the line. At its end the row is empty, and everything is as it was before."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._streams_above())
            self._status.display = self
            stack.callback(self._end)
            self._thread.start()
            yield

    def print(self, content: RenderableType) -> None:
        """Prints something above the line; see `Display.print`."""
        from rich.text import Text

        # rich flushes the stream even when it only renders.
        with contextlib.suppress(OSError):
            with self._console.capture() as captured:
                is_text = isinstance(content, str | Text)
                self._console.width = self._width()
                self._console.print(content, soft_wrap=is_text, highlight=False, markup=False, emoji=False)
            self.write_above(self._stream, captured.get())

    def write_above(self, stream: TextIO, text: str) -> None:
        """Writes whole lines above the live line.

        A terminal that has gone away ends nothing: a run whose terminal closes saves its step, and log lines go to their file.

        Args:
          stream: the terminal, as `sys.stderr` or as `sys.stdout`.
          text: ends with a line's end.
        """
        with self._lock, contextlib.suppress(OSError):
            drawn = self._drawn
            self._draw("")
            stream.write(text)
            stream.flush()
            # Drawn for another width, it could take two rows.
            self._draw(drawn if self._width() == self._drawn_width else "")

    def _end(self) -> None:
        self._status.display = None
        self._ended.set()
        self._thread.join()
        with self._lock, contextlib.suppress(OSError):
            self._draw("")

    def _work(self) -> None:
        """Draws the line until the end. If the terminal has gone away, there is nothing left to do."""
        with contextlib.suppress(OSError):
            while not self._ended.is_set():
                text = self._rendered() if self._in_foreground() else ""
                with self._lock:
                    self._draw(text)
                self._ended.wait(_INTERVAL)

    def _draw(self, text: str) -> None:
        """Replaces what stands in the row; an empty text leaves the row empty."""
        if text:
            self._stream.write(f"{_START_OF_ROW}{text}{_ERASE_REST}{_START_OF_ROW}")
        elif self._drawn:
            self._stream.write(ERASE_ROW)
        self._drawn = text
        self._stream.flush()

    def _rendered(self) -> str:
        """Returns the line for the terminal's present width, with its colours."""
        self._drawn_width = self._console.width = width = self._width()
        line = live_columns.line(self._status, width)
        if line is None:
            return ""
        with self._console.capture() as captured:
            self._console.print(line, end="")
        return f" {captured.get().rstrip()}"

    def _width(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or _DEFAULT_WIDTH
        except OSError:
            return _DEFAULT_WIDTH

    def _in_foreground(self) -> bool:
        """Returns False while the shell has put the run into the background: the terminal's last row is the shell's then."""
        try:
            return os.tcgetpgrp(self._stream.fileno()) == os.getpgrp()
        except OSError:  # not this process's own terminal
            return True

    @contextlib.contextmanager
    def _streams_above(self) -> Iterator[None]:
        """Context manager in which what goes to the terminal is written above the line."""
        with contextlib.ExitStack() as stack:
            for name in ("stderr", "stdout"):
                stream: TextIO = getattr(sys, name)
                if not stream.isatty():
                    continue
                above = _Above(self, stream)
                stack.callback(above.let_go)
                setattr(sys, name, above)
                stack.callback(setattr, sys, name, stream)
                for handler in _handlers_on(stream):
                    handler.setStream(cast(TextIO, above))
                    stack.callback(handler.setStream, stream)
            yield


class _Above:
    """A stream whose lines go above the live line; everything else about it is the terminal's."""

    def __init__(self, line: LiveLine, stream: TextIO):
        self._line = line
        self._stream = stream
        self._rest = ""
        self._lock = threading.RLock()
        self._process = os.getpid()

    def write(self, text: str) -> int:
        """Writes the lines that have ended, and keeps the rest until its end comes."""
        if (
            os.getpid() != self._process
        ):  # a forked child has no live line, and may have inherited a lock that nobody opens
            return self._stream.write(text)
        with self._lock:
            lines, end, self._rest = (self._rest + text).rpartition("\n")
        if end:
            self._line.write_above(self._stream, lines + end)
        return len(text)

    def let_go(self) -> None:
        """Writes what has no end yet."""
        with contextlib.suppress(OSError):
            self._stream.write(self._rest)
            self._stream.flush()

    def writelines(self, lines: Iterator[str]) -> None:
        """Writes several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Whole lines are written at once: there is nothing to do."""

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def _handlers_on(stream: TextIO) -> list[std_logging.StreamHandler[TextIO]]:
    """Returns the log handlers that write to a stream."""
    known = [std_logging.getLogger(), *std_logging.getLogger().manager.loggerDict.values()]
    handlers = [handler for logger in known if isinstance(logger, std_logging.Logger) for handler in logger.handlers]
    # absl's handler passes records on to one that has the stream.
    handlers.append(logging.get_absl_handler().python_handler)
    unique = {id(handler): handler for handler in handlers if getattr(handler, "stream", None) is stream}
    return [handler for handler in unique.values() if isinstance(handler, std_logging.StreamHandler)]
