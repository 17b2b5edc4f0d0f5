"""The end of a training run as a table, for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from spmd_trainer.training.ending import Results


def table(how: str, then: str, results: Results, evaluated: Mapping[str, str]) -> Table:
    """Returns a table of how a run ended. Commands and paths are not in it: they must not be wrapped.

    Args:
      how: how it ended, e.g. 'finished: step 600 of 600 in 5m31s'; empty if nothing was trained.
      then: how it can continue; empty if it is complete.
      results: what it ended with.
      evaluated: the metrics of the last evaluation by dataset, as text.
    """
    shown = Table(box=box.ROUNDED, show_header=False, border_style="dim")
    shown.add_column(style="dim", no_wrap=True)
    shown.add_column(overflow="fold")
    colour = "yellow" if then else "green"
    rows = [("end", how, f"bold {colour}"), ("next", then, colour)]
    rows.append(("loss", "" if results.loss is None else f"{results.loss:.4f}", "bold"))
    for dataset, metrics in evaluated.items():
        rows.append((f"{dataset} at step {results.evaluated}", metrics.replace("  ", "\n"), ""))
    for name, value, style in rows:
        if value:
            shown.add_row(Text(name), Text(value, style))
    return shown
