"""A live status line at the bottom of a terminal. All other output to the terminal goes above it.

The line takes one row, and the cursor waits in that row's first column. So the cursor stays at the line's beginning when the
terminal is resized, and direct writes by a signal handler or a C++ library spoil only this row, until it is drawn again.
"""

from __future__ import annotations

import contextlib
import logging as std_logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TextIO, cast

from absl import logging
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from spmd_trainer.errors import terminal
from spmd_trainer.sharding.messages import bytes_text, format_duration, format_seconds
from spmd_trainer.training.live_status import ERASE_ROW, LiveStatus, PhaseStatus, TrainingStatus, live

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

# Seconds between two looks at the status.
_INTERVAL = 0.25
_START_OF_ROW = "\r"
_ERASE_REST = "\x1b[J"
# Width in columns, if the terminal doesn't report its width.
_DEFAULT_WIDTH = 80

_GAP = 2
# Widths of a progress bar. If there is no room for the shortest bar, no bar is shown.
_SHORTEST_BAR, _LONGEST_BAR = 6, 30
# A training run's columns, the most important first. They are shown in the order in which `_training_columns` makes them.
_PRIORITIES: Sequence[str] = ("step", "loss", "eta", "rate", "seconds", "mfu", "memory", "due")


@contextlib.contextmanager
def shown(*, wanted: bool = True) -> Iterator[None]:
    """Context manager that shows the live line if stderr is an interactive terminal.

    Shows nothing in notebooks, files and pipes, or with TERM=dumb. `NO_COLOR` turns the colors off.

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
    """Returns a `rich` console for a terminal stream, or None if nothing can be drawn on the terminal."""
    from rich.console import Console  # takes a tenth of a second: not for --help and --list

    console = Console(file=stream)
    return console if console.is_interactive and not console.legacy_windows else None


class LiveLine:
    """Draws the status of a run as one line, and writes log lines, `print` output and libraries' messages above it.

    While the line is shown, what is written to `sys.stderr` (and to `sys.stdout`, if that is a terminal too), directly or by a
    log handler, appears as whole lines above it.
    """

    def __init__(self, stream: TextIO, console: Console, status: LiveStatus):
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
        """Context manager that shows the live line. On exit, it clears the line's row and restores stderr and stdout."""
        with self._streams_above():
            self._status.display = self
            self._thread.start()
            try:
                yield
            finally:
                self._status.display = None
                self._ended.set()
                self._thread.join()
                with self._lock, contextlib.suppress(OSError):
                    self._draw("")

    def print(self, content: RenderableType) -> None:
        """Prints `content`, a text or another rich renderable, above the live line; see `Display.print`."""
        # rich flushes the stream even when it only renders.
        with contextlib.suppress(OSError):
            with self._console.capture() as captured:
                is_text = isinstance(content, str | Text)
                self._console.width = self._width()
                self._console.print(_Harmless(content), soft_wrap=is_text, highlight=False, markup=False, emoji=False)
            self.write_above(self._stream, captured.get())

    def write_above(self, stream: TextIO, text: str) -> None:
        """Writes `text`, which consists of whole lines, to `stream`, above the live line.

        Ignores the errors of a closed terminal, so that the run can save its step and write its log file.
        """
        with self._lock, contextlib.suppress(OSError):
            drawn = self._drawn
            self._draw("")
            stream.write(text)
            stream.flush()
            # A line that was drawn for another width could take two rows.
            self._draw(drawn if self._width() == self._drawn_width else "")

    def _work(self) -> None:
        with contextlib.suppress(OSError):
            while not self._ended.is_set():
                text = self._rendered() if self._in_foreground() else ""
                with self._lock:
                    self._draw(text)
                self._ended.wait(_INTERVAL)

    def _draw(self, text: str) -> None:
        """Replaces the content of the row; an empty text clears the row."""
        if text:
            self._stream.write(f"{_START_OF_ROW}{text}{_ERASE_REST}{_START_OF_ROW}")
        elif self._drawn:
            self._stream.write(ERASE_ROW)
        self._drawn = text
        self._stream.flush()

    def _rendered(self) -> str:
        """Returns the live line for the terminal's current width, including color codes; '' if there is no status."""
        self._drawn_width = self._console.width = width = self._width()
        row = line(self._status, width)
        if row is None:
            return ""
        with self._console.capture() as captured:
            self._console.print(row, end="")
        return f" {captured.get().rstrip()}"

    def _width(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or _DEFAULT_WIDTH
        except OSError:
            return _DEFAULT_WIDTH

    def _in_foreground(self) -> bool:
        """Returns False while the run is a background job of the shell, because the shell then uses the terminal's last row."""
        try:
            return os.tcgetpgrp(self._stream.fileno()) == os.getpgrp()
        except OSError:  # not this process's own terminal
            return True

    @contextlib.contextmanager
    def _streams_above(self) -> Iterator[None]:
        """Context manager that makes everything that is written to the terminal appear above the live line."""
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


class _Harmless:
    """A rich renderable that wraps another one, and escapes the control characters in its texts."""

    def __init__(self, content: RenderableType):
        # rich drops some control characters of a text that it makes itself.
        self._content = Text(terminal.visible(content)) if isinstance(content, str) else content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for text, style, control in console.render(self._content, options):
            yield Segment(text if control else terminal.visible(text), style, control)


class _Above:
    """Stands in for a terminal stream: writes lines above the live line. All other attributes are those of the stream."""

    def __init__(self, line: LiveLine, stream: TextIO):
        self._line = line
        self._stream = stream
        self._rest = ""
        self._lock = threading.RLock()
        self._process = os.getpid()

    def write(self, text: str) -> int:
        """Writes complete lines, and keeps an incomplete line until its newline is written."""
        # A forked child has no live line, and may have inherited a lock that nobody will release.
        if os.getpid() != self._process:
            return self._stream.write(text)
        with self._lock:
            lines, end, self._rest = (self._rest + text).rpartition("\n")
        if end:
            self._line.write_above(self._stream, lines + end)
        return len(text)

    def let_go(self) -> None:
        """Writes the incomplete line that was kept."""
        with contextlib.suppress(OSError):
            self._stream.write(self._rest)
            self._stream.flush()

    def writelines(self, lines: Iterator[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Does nothing: complete lines are written at once."""

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def _handlers_on(stream: TextIO) -> list[std_logging.StreamHandler[TextIO]]:
    known = [std_logging.getLogger(), *std_logging.getLogger().manager.loggerDict.values()]
    handlers = [handler for logger in known if isinstance(logger, std_logging.Logger) for handler in logger.handlers]
    # absl's handler passes records on to one that has the stream.
    handlers.append(logging.get_absl_handler().python_handler)
    unique = {id(handler): handler for handler in handlers if getattr(handler, "stream", None) is stream}
    return [handler for handler in unique.values() if isinstance(handler, std_logging.StreamHandler)]


def line(status: LiveStatus, width: int) -> Table | None:
    """Returns the live line, a grid of one row, or None if the run has no current activity.

    Args:
      status: the current activities of the process.
      width: the terminal's columns. The last column stays empty, because some terminals begin a new row when it is filled.
    """
    room = width - 2  # The cursor waits in the first column.
    phases = status.phases()
    if phases:
        return _phase_line(phases, room)
    training = status.training() if status.training else None
    if training is None:
        return None
    columns, priorities = _training_columns(training), _PRIORITIES
    if training.activity:
        columns, priorities = {"activity": _plain(training.activity), "step": columns["step"]}, ("activity", "step")
    return _row(columns, priorities, room, training.step, training.num_steps)


def _training_columns(training: TrainingStatus) -> dict[str, Text]:
    # The step is as wide at the first step as at the last: the other columns must not move.
    number = str(training.num_steps)
    columns = {"step": _labelled("step", f"{training.step:>{len(number)}}/{number}", "bold")}
    if training.loss is not None:
        columns["loss"] = _labelled("loss", f"{training.loss:.4f}", "bold")
    if seconds := training.seconds_per_step:
        columns["seconds"] = _labelled("", f"{seconds * 1e3:.0f} ms/step")
        columns["rate"] = _labelled("", f"{training.items_per_step / seconds:,.0f} {training.unit}/s")
    for name, label in (("mfu_6n", "MFU 6N"), ("mfu", "MFU")):  # one of them: the line is narrow
        if name in training.utilization:
            columns["mfu"] = _labelled(label, f"{training.utilization[name]:.1%}")
    if seconds:
        left = training.num_steps - training.step if training.steps_left is None else training.steps_left
        columns["eta"] = _labelled("ETA", format_seconds(left * seconds), "cyan")
    if training.memory is not None:
        limit = "" if training.memory.limit is None else f" of {bytes_text(training.memory.limit)}"
        columns["memory"] = _labelled("memory", f"{bytes_text(training.memory.in_use)}{limit}")
    if training.due:
        steps: dict[int, list[str]] = {}
        for what, step in training.due.items():
            steps.setdefault(step, []).append(what)
        columns["due"] = _labelled("next", ", ".join(f"{'+'.join(steps[step])} {step}" for step in sorted(steps)))
    return columns


def _phase_line(phases: Sequence[PhaseStatus], room: int) -> Table | None:
    """Returns the live line for the newest phase, with its number of batches and its time, and for older phases that fit."""
    newest = phases[-1]
    columns = {"what": _plain(newest.what)}
    if newest.batches is not None:
        of = "" if newest.total is None else f" of {newest.total}"
        columns["batches"] = _labelled("", f"{newest.batches}{of} batches")
    columns["seconds"] = _labelled("", format_duration(newest.seconds), "cyan")
    if newest.batches and newest.total:
        left = max(newest.total - newest.batches, 0) * newest.seconds / newest.batches
        columns["left"] = _labelled("", f"about {format_duration(left)} left")
    for number, other in enumerate(reversed(phases[:-1])):
        columns[f"other {number}"] = _plain(f"{other.what} {format_duration(other.seconds)}")
    priorities = ("what", "seconds", *(name for name in columns if name not in ("what", "seconds")))
    return _row(columns, priorities, room, newest.batches, newest.total)


def _row(
    columns: dict[str, Text], priorities: Sequence[str], room: int, done: int | None, total: int | None
) -> Table | None:
    """Returns a grid of the most important columns that fit into the width `room`, after a progress bar if that fits too.

    If even the most important column does not fit, it is shortened.
    """
    left, shown = room, set[str]()
    for name in priorities:
        if name not in columns:
            continue
        needed = columns[name].cell_len + _GAP * bool(shown)
        if not shown and needed > room:
            columns[name].truncate(room, overflow="ellipsis")
            needed = room
        if needed > left:
            break
        left -= needed
        shown.add(name)
    if not shown or room < 1:
        return None
    grid = Table.grid(padding=(0, _GAP, 0, 0), pad_edge=False)
    cells: list[Text | ProgressBar] = [text for name, text in columns.items() if name in shown]
    if done is not None and total and left - _GAP >= _SHORTEST_BAR:
        cells.insert(0, ProgressBar(total, min(done, total), width=min(left - _GAP, _LONGEST_BAR)))
    for _ in cells:
        grid.add_column(no_wrap=True)
    grid.add_row(*cells)
    return grid


def _plain(text: str) -> Text:
    """Returns a text for one row, with newlines and control characters escaped."""
    return Text(terminal.visible(text, keep=""))


def _labelled(label: str, value: str, style: str = "") -> Text:
    return Text.assemble((f"{label} " if label else "", "dim"), (value, style))
