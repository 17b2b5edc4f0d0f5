"""What the live line says: the training run or the phases that go on, as many columns as fit into the terminal's width."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from spmd_trainer.metrics.live_status import LiveStatus, PhaseStatus, TrainingStatus
from spmd_trainer.sharding.messages import bytes_text, format_duration, format_seconds

_GAP = 2
# Widths of a bar; where there is no room for the smaller one, there is no bar.
_SHORTEST_BAR, _LONGEST_BAR = 6, 30
# Of a line's first row only: what is shown live must stay in one row. Names may hold anything.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
# Columns of a training run, the most important first. They are shown in the order in which `_training_columns` makes them.
_PRIORITIES = ("step", "loss", "eta", "rate", "seconds", "mfu", "memory", "due")


def line(status: LiveStatus, width: int) -> Table | None:
    """Returns the live line, a grid of one row, or None if nothing goes on.

    Args:
      status: what goes on.
      width: the terminal's columns. The last one stays empty: some terminals begin a new row when it is filled.
    """
    room = width - 2  # The cursor waits in the first column.
    phases = tuple(status.phases())
    if phases:
        return _phase_line(phases, room)
    training = status.training() if status.training else None
    return None if training is None else _training_line(training, room)


def _training_line(training: TrainingStatus, room: int) -> Table | None:
    if training.activity:
        columns = {"activity": _plain(training.activity), "step": _step(training)}
        return _row(columns, ("activity", "step"), room, training.step, training.num_steps)
    return _row(_training_columns(training), _PRIORITIES, room, training.step, training.num_steps)


def _training_columns(training: TrainingStatus) -> dict[str, Text]:
    """Returns the columns by name, in the order in which they are shown."""
    columns = {"step": _step(training)}
    if training.loss is not None:
        columns["loss"] = _labelled("loss", f"{training.loss:.4f}", "bold")
    if seconds := training.seconds_per_step:
        columns["seconds"] = _labelled("", f"{seconds * 1e3:.0f} ms/step")
        columns["rate"] = _labelled("", f"{training.items_per_step / seconds:,.0f} {training.unit}/s")
    if training.mfu is not None:
        columns["mfu"] = _labelled("MFU", f"{training.mfu:.1%}")
    if seconds:
        columns["eta"] = _labelled("ETA", format_seconds((training.num_steps - training.step) * seconds), "cyan")
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
    """The newest phase with its batches, and the others that go on beside it as far as there is room."""
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
        columns[f"other {number}"] = _labelled(
            "", _UNPRINTABLE.sub(" ", f"{other.what} {format_duration(other.seconds)}")
        )
    priorities = ("what", "seconds", *(name for name in columns if name not in ("what", "seconds")))
    return _row(columns, priorities, room, newest.batches, newest.total)


def _row(
    columns: dict[str, Text], priorities: Sequence[str], room: int, done: int | None, total: int | None
) -> Table | None:
    """Returns a grid of the columns that fit, by their priorities, with a bar in front if there is room for one.

    The first column is shortened if not even it fits.
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


def _step(training: TrainingStatus) -> Text:
    """Returns the step, as wide at the first step as at the last: the other columns must not move."""
    number = str(training.num_steps)
    return _labelled("step", f"{training.step:>{len(number)}}/{number}", "bold")


def _plain(text: str) -> Text:
    return Text(_UNPRINTABLE.sub(" ", text))


def _labelled(label: str, value: str, style: str = "") -> Text:
    return Text.assemble((f"{label} " if label else "", "dim"), (value, style))
