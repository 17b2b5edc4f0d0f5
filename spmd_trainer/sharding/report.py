"""The sharding report: each variable's and input's shapes, spec, bytes per device and reason, as text, JSON or HTML."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence

import jax

from spmd_trainer.sharding import report_html
from spmd_trainer.sharding.messages import bytes_text, count_text, did_you_mean, mesh_text, table_lines
from spmd_trainer.sharding.report_data import (
    HEADER,
    InputLayout,
    ReportData,
    input_rows,
    report_data,
    report_records,
    waste_text,
)
from spmd_trainer.sharding.specs import AnyMesh, PyTree, mesh_shape_of

FORMATS = ("text", "json", "html")


class ShardingReport:
    """A sharding report. `print` shows its text; a notebook shows a table and the HTML page.

    Attributes:
      variables: the VariableSpecs, in the order of the report.
      mesh: the mesh of the VariableSpecs.
      about: names and values for the report's header, such as the experiment's name.
      inputs: shapes and shardings of the job's inputs.
    """

    def __init__(
        self,
        variables: PyTree,
        mesh: AnyMesh,
        *,
        about: Mapping[str, object] | None = None,
        inputs: Sequence[InputLayout] = (),
    ):
        """Makes a report.

        Args:
          variables: a tree or list of VariableSpecs.
          mesh: the mesh of the VariableSpecs; an AbstractMesh if there are no devices.
          about: names and values for the report's header, in this order, e.g. {'experiment': 'lm.stdlib.StdlibBytes', 'date':
            '2026-01-31 12:00', 'spmd-trainer': '0.1.0'}. 'experiment' is the page's title. 'jax', JAX's version, is added if
            missing.
          inputs: shapes and shardings of the job's inputs, in the order of the report.

        Raises:
          ValueError: a leaf is not a VariableSpec.
        """
        self.variables = report_records(variables)
        self.mesh = mesh
        self.about = {str(name): str(value) for name, value in (about or {}).items()}
        self.about.setdefault("jax", jax.__version__)
        self.inputs = tuple(inputs)

    @functools.cached_property
    def _data(self) -> ReportData:
        return report_data(self.variables, self.mesh, self.about, self.inputs)

    def text(self) -> str:
        """Returns the report as text: header, table of variables, table of inputs (if any), and totals."""
        return _text(self._data)

    def json(self) -> str:
        """Returns the report as JSON with the keys of `ReportData`: about, mesh, totals, totals_by_kind, variables, inputs.

        Sizes are in bytes.
        """
        return json.dumps(self._data, indent=1)

    def html(self) -> str:
        """Returns the report as a self-contained HTML page, with pictures of the mesh and of each variable's shards."""
        return report_html.report_page(self._data)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        totals = self._data["totals"]
        name = f"{self.about['experiment']}: " if "experiment" in self.about else ""
        return (
            f"<ShardingReport {name}{count_text(totals['num_variables'], 'variable')} ({totals['num_split']} split) on "
            f"mesh {mesh_text(mesh_shape_of(self.mesh))}, {bytes_text(totals['bytes_per_device'])} per device>"
        )

    def _repr_html_(self) -> str:
        return report_html.notebook(self._data)


def sharding_report(
    variables: PyTree, mesh: AnyMesh, *, format: str = "text", about: Mapping[str, object] | None = None
) -> str:
    """Returns a report with path, shapes, spec, bytes per device, padding and reason of each variable.

    Args:
      variables: a tree or list of VariableSpecs.
      mesh: the mesh of the VariableSpecs; an AbstractMesh if there are no devices.
      format: 'text' for a table, 'json' for the same data as JSON, 'html' for a self-contained page with pictures.
      about: names and values for the report's header, see ShardingReport.

    Raises:
      ValueError: the format is unknown, or a leaf is not a VariableSpec.
    """
    if format not in FORMATS:
        raise ValueError(
            f"There is no report format {format!r}{did_you_mean(format, FORMATS, otherwise='.')} Formats: {list(FORMATS)}."
        )
    report = ShardingReport(variables, mesh, about=about)
    return {"text": report.text, "json": report.json, "html": report.html}[format]()


def _text(data: ReportData) -> str:
    sizes = {axis["name"]: axis["size"] for axis in data["mesh"]["axes"]}
    totals = data["totals"]
    header = ("variable", "dtype", "shape", "padded", "spec", "per device", "padding", "why")
    rows = [
        (
            v["path"],
            v["dtype"],
            str(v["logical_shape"]),
            str(v["padded_shape"]) if v["padded_shape"] != v["logical_shape"] else "",
            v["spec_text"],
            bytes_text(v["bytes_per_device"]),
            waste_text(v["padding_bytes"], v["logical_bytes"]),
            v["reason"],
        )
        for v in data["variables"]
    ]
    lines = [
        *(f"{name}: {value}" for name, value in data["about"].items()),
        f"Mesh {mesh_text(sizes)}: {count_text(math.prod(sizes.values()), 'device')}",
        "",
        *table_lines([header, *rows], right={5, 6}, ruled=True),
        "",
        *([*table_lines([HEADER, *input_rows(data["inputs"])], ruled=True), ""] if data["inputs"] else []),
        *_totals_lines(data),
        "",
        f"{count_text(totals['num_variables'], 'variable')} ({totals['num_split']} split, {totals['num_replicated']} "
        f"replicated, {totals['num_padded']} padded), {totals['num_elements']:,} elements, "
        f"{bytes_text(totals['logical_bytes'])} per copy",
        f"Each device holds {bytes_text(totals['bytes_per_device'])}, "
        f"{bytes_text(totals['replicated_bytes_per_device'])} of it in replicated variables",
        f"Padding adds {waste_text(totals['padding_bytes'], totals['logical_bytes']) or 'nothing'}",
    ]
    return "\n".join(lines) + "\n"


def _totals_lines(data: ReportData) -> list[str]:
    by_kind = {kind.replace("_", " "): totals for kind, totals in data["totals_by_kind"].items()}
    rows = [
        (
            name,
            f"{totals['num_variables']:,}",
            f"{totals['num_elements']:,}",
            bytes_text(totals["logical_bytes"]),
            bytes_text(totals["bytes_per_device"]),
            waste_text(totals["padding_bytes"], totals["logical_bytes"]),
        )
        for name, totals in {**by_kind, "sum": data["totals"]}.items()
    ]
    header = ("totals", "variables", "elements", "one copy", "per device", "padding")
    return table_lines([header, *rows], right={1, 2, 3, 4, 5}, ruled=True)
