"""Reports what a warm start does with every variable of the model."""

from __future__ import annotations

import collections
import dataclasses

from spmd_trainer.sharding.messages import table_lines

LOADED, SKIPPED, LEFT = "loaded", "skipped", "left at init"
_OPT = "opt_states/"


@dataclasses.dataclass(frozen=True)
class LoadRow:
    """What a warm start does with one variable.

    Attributes:
      path: the variable's path, e.g. 'mdl_vars/params/lm/softmax/w'.
      status: `loaded`, `skipped` (by an ignore rule) or `left at init`.
      note: the source of a loaded variable, or why the variable is not loaded.
    """

    path: str
    status: str
    note: str


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """What a warm start does with every variable. As text: a table, then the warnings.

    Attributes:
      rows: one per variable, in the model's order.
      opt_states_loaded: True if any optimizer state is loaded. If not, the caller must compute optimizer states that copy
        variables (EMA) from the loaded variables.
      warnings: one per rule that has no effect because earlier rules match all of its variables.
    """

    rows: tuple[LoadRow, ...]
    opt_states_loaded: bool
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        counts = collections.Counter(row.status for row in self.rows)
        shown = [row for row in self.rows if row.note or not (row.path.startswith(_OPT) and row.status == LEFT)]
        unshown = len(self.rows) - len(shown)
        lines = [", ".join(f"{counts[status]} {status}" for status in (LOADED, SKIPPED, LEFT))]
        lines += table_lines([(f"  {row.path}", row.status, row.note) for row in shown])
        if unshown:
            lines.append(f"  and {unshown} optimizer states left at init")
        lines += [f"warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)
