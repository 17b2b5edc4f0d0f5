"""The page of one or more runs, `run.html`: self-contained, with uPlot for the curves.

The page contains its data as JSON: each run's description, times, samples and warnings, and the curves of all runs.

The page's parts are run_page.html, page.css, run_page.css, page.js, run_curves.js, run_parts.js and run_page.js.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from etils import epath

from spmd_trainer.models import config_lines
from spmd_trainer.sharding import page
from spmd_trainer.storage.files import write_atomically
from spmd_trainer.watch.pages import run_charts, shared
from spmd_trainer.watch.pages.run_charts import Record
from spmd_trainer.watch.pages.run_reader import RunReader

_MOST_DIFFERENCES = 400


def write_page(directories: Sequence[epath.Path], file: epath.Path) -> None:
    """Writes the page of some runs.

    Raises:
      OSError: the file can't be written.
    """
    write_atomically(file, page_text(PageData(directories).read()).split("\n"))


def page_text(data: Record, *, follow: bool = False) -> str:
    """Returns the HTML of the page.

    Args:
      data: see `PageData.read`.
      follow: if True, the page requests newer data from its server, at the relative address 'data.json'.
    """
    return page.document(
        ", ".join(run["name"] for run in data["runs"]),
        shared("run_page.html"),
        styles=map(shared, ("vendor/uPlot.min.css", "page.css", "run_page.css")),
        data={**data, "follow": follow},
        scripts=map(shared, ("page.js", "run_curves.js", "run_parts.js", "run_page.js")),
        libraries=(shared("vendor/uPlot.iife.min.js"),),
        asks_server=follow,
    )


class PageData:
    """The data of a page of one or more runs. `read` can be called repeatedly while the runs write."""

    def __init__(self, directories: Sequence[epath.Path]):
        self._runs = [RunReader(path) for path in directories]
        self._names = names_of(directories)

    def read(self) -> Record:
        """Returns the data for the page's script. Files that can't be read become notes in the data."""
        runs = [run.read(name) for run, name in zip(self._runs, self._names, strict=True)]
        scalars = [run.scalars for run in self._runs]
        curves = run_charts.curves_of(scalars)
        others = [curve for curve in curves if not curve.is_main]
        left_out = others[run_charts.MOST_OTHERS :]
        settings = [run.settings for run in self._runs]
        return {
            "written": round(time.time()),
            "runs": runs,
            "charts": [run_charts.chart(curve, scalars) for curve in curves if curve not in left_out],
            "left_out": len(left_out),
            "settings": settings[0] if len(settings) == 1 else None,
            "differences": _differences(settings) if len(settings) > 1 else None,
        }


def names_of(paths: Sequence[epath.Path]) -> list[str]:
    """Returns a unique name for each path: its last components, as few as possible, but equally many for all paths."""
    parts = [os.fspath(path).rstrip("/").split("/") for path in paths]
    for length in range(1, max(len(one) for one in parts)):
        names = ["/".join(one[-length:]) for one in parts]
        if len(set(names)) == len(names):
            return names
    return ["/".join(one) for one in parts]


def _differences(settings: Sequence[Mapping[str, str]]) -> Record:
    """Returns the settings that differ between runs, with the value of each run. Runs without settings are not compared.

    If some runs lack a whole component of the experiment, e.g. a dataset, only two things are listed: the component's class, and
    those of its settings that differ among the runs that have the component.
    """
    known = [one for one in settings if one]
    paths = sorted({path for one in known for path in one})
    rows = [
        {
            "path": path,
            "values": [config_lines.around_difference(one.get(path), known[0].get(path)) for one in settings],
        }
        for path in paths
        if len({one.get(path) for one in known}) > 1
        and not config_lines.is_flag_of_some(path, known)
        and not _is_of_missing_part(path, known)
    ]
    return {"rows": rows[:_MOST_DIFFERENCES], "left_out": max(0, len(rows) - _MOST_DIFFERENCES)}


def _is_of_missing_part(path: str, known: Sequence[Mapping[str, str]]) -> bool:
    """Returns True if the runs that lack `path` lack a whole component that contains it, and the others have equal values."""
    names = path.split(".")
    parts = [".".join(names[:length]) for length in range(1, len(names))]
    agree = len({one[path] for one in known if path in one}) == 1
    return agree and any(all((part in one) == (path in one) for one in known) for part in parts)
