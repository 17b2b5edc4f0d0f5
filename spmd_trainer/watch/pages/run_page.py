"""The page of one or more runs, `run.html`: self-contained, with uPlot for the curves.

Its parts are run_page.html, run_page.css, page.js, run_curves.js, run_parts.js and run_page.js.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from etils import epath

from spmd_trainer.storage.files import write_atomically
from spmd_trainer.watch.pages import page
from spmd_trainer.watch.pages.run_charts import Record
from spmd_trainer.watch.pages.run_data import PageData

_SCRIPTS = ("page.js", "run_curves.js", "run_parts.js", "run_page.js")


def write_page(directories: Sequence[epath.Path], file: epath.Path) -> None:
    """Writes the page of some runs.

    Args:
      directories: the runs' directories.
      file: the page.

    Raises:
      OSError: it can't be written.
    """
    write_atomically(file, page_text(PageData(directories).read()).split("\n"))


def page_text(data: Record, *, follow: bool = False) -> str:
    """Returns the page.

    Args:
      data: see `PageData.read`.
      follow: whether the page asks for newer data, at 'data.json' beside it.
    """
    title = ", ".join(run["name"] for run in data["runs"])
    parts = {
        "TITLE": html.escape(title),
        "CSS": page.shared("vendor/uPlot.min.css") + page.shared("page.css") + page.shared("run_page.css"),
        "DATA": page.script_json({**data, "follow": follow}),
        "UPLOT": page.shared("vendor/uPlot.iife.min.js"),
        "SCRIPT": "".join(page.shared(name) for name in _SCRIPTS),
    }
    return page.fill(page.shared("run_page.html"), parts)
