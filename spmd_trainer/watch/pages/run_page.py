"""The page of one or more runs, `run.html`: self-contained, with uPlot for the curves.

Its parts are run_page.html, page.css, run_page.css, page.js, run_curves.js, run_parts.js and run_page.js.
"""

from __future__ import annotations

from collections.abc import Sequence

from etils import epath

from spmd_trainer.sharding import page
from spmd_trainer.storage.files import write_atomically
from spmd_trainer.watch.pages import shared
from spmd_trainer.watch.pages.run_charts import Record
from spmd_trainer.watch.pages.run_data import PageData

# The page asks its own server alone for newer data, and shows pictures that stand in it.
_HEAD = (
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; img-src data:; connect-src 'self'\">\n"
    '<link rel="icon" href="data:,">\n'
)


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
    return page.document(
        ", ".join(run["name"] for run in data["runs"]),
        f"{shared('run_page.html')}<script>\n{shared('vendor/uPlot.iife.min.js')}</script>\n",
        styles=map(shared, ("vendor/uPlot.min.css", "page.css", "run_page.css")),
        data={**data, "follow": follow},
        scripts=map(shared, ("page.js", "run_curves.js", "run_parts.js", "run_page.js")),
        head=_HEAD,
    )
