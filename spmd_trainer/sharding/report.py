"""The sharding report: where every variable lies, what it costs each device, and why; as text, JSON, and one HTML
page."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from spmd_trainer.sharding.messages import bytes_text, count_text, mesh_text, nearest_text, spec_text
from spmd_trainer.sharding.specs import AnyMesh, entry_axes, mesh_shape_of
from spmd_trainer.sharding.variables import VariableSpec

FORMATS = ("text", "json", "html")
_DATA_MARK = "__REPORT_DATA__"


@dataclasses.dataclass(frozen=True)
class ShardingTotals:
    """The report's sums.

    Attributes:
      num_variables: how many variables there are.
      num_elements: elements of one whole copy, without padding.
      num_split: variables of which a device holds a part.
      num_replicated: variables of which every device holds all.
      num_padded: variables with padding.
      logical_bytes: bytes of one whole copy, without padding.
      padding_bytes: bytes that padding adds to that copy.
      bytes_per_device: bytes that one device holds, padding included.
      replicated_bytes_per_device: the part of these in replicated variables.
    """

    num_variables: int
    num_elements: int
    num_split: int
    num_replicated: int
    num_padded: int
    logical_bytes: int
    padding_bytes: int
    bytes_per_device: int
    replicated_bytes_per_device: int


def sharding_totals(variables: Any, mesh: AnyMesh) -> ShardingTotals:
    """Adds up a tree or list of VariableSpecs.

    Raises:
      ValueError: a leaf is no VariableSpec.
    """
    records, sizes = _records(variables), mesh_shape_of(mesh)
    whole = [v for v in records if v.is_replicated]
    return ShardingTotals(
        num_variables=len(records),
        num_elements=sum(math.prod(v.logical_shape) for v in records),
        num_split=len(records) - len(whole),
        num_replicated=len(whole),
        num_padded=sum(v.is_padded for v in records),
        logical_bytes=sum(v.logical_bytes() for v in records),
        padding_bytes=sum(v.padding_bytes() for v in records),
        bytes_per_device=sum(v.bytes_per_device(sizes) for v in records),
        replicated_bytes_per_device=sum(v.bytes_per_device(sizes) for v in whole),
    )


def sharding_report(variables: Any, mesh: AnyMesh, *, format: str = "text") -> str:
    """Says for each variable: path, logical and padded shape, spec, bytes per device, padding waste, and why.

    Args:
      variables: a tree or list of VariableSpecs.
      mesh: the mesh they were made for; an AbstractMesh where there are no devices.
      format: 'text', a table; 'json', the same figures for programs; 'html', one page that needs nothing beside itself,
        with the mesh and each variable's split drawn.

    Returns:
      The report.

    Raises:
      ValueError: an unknown format, or a leaf that is no VariableSpec.
    """
    if format not in FORMATS:
        raise ValueError(
            f"There is no report format {format!r}.{nearest_text(format, FORMATS)} Formats: {list(FORMATS)}."
        )
    if format == "text":
        return _text(variables, mesh)
    data = _data(variables, mesh)
    if format == "json":
        return json.dumps(data, indent=1)
    template = importlib.resources.files(__package__).joinpath("report.html").read_text(encoding="utf-8")
    # Nothing in the data may end the script element that carries it.
    packed = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return template.replace(_DATA_MARK, packed)


def _data(variables: Any, mesh: AnyMesh) -> dict[str, Any]:
    sizes = mesh_shape_of(mesh)
    return {
        "mesh": {
            "axes": [{"name": name, "size": size} for name, size in sizes.items()],
            "device_ids": [int(d.id) for d in mesh.devices.flat] if isinstance(mesh, Mesh) else None,
        },
        "totals": dataclasses.asdict(sharding_totals(variables, mesh)),
        "variables": [
            {
                "path": v.path,
                "dtype": str(v.dtype),
                "logical_shape": v.logical_shape,
                "padded_shape": v.padded_shape,
                "spec": [entry_axes(entry) for entry in v.spec],
                "spec_text": spec_text(v.spec),
                "bytes_per_device": v.bytes_per_device(sizes),
                "padding_bytes": v.padding_bytes(),
                "logical_bytes": v.logical_bytes(),
                "reason": v.reason,
            }
            for v in _records(variables)
        ],
    }


def _text(variables: Any, mesh: AnyMesh) -> str:
    sizes = mesh_shape_of(mesh)
    totals = sharding_totals(variables, mesh)
    header = ("variable", "dtype", "shape", "padded", "spec", "per device", "padding", "why")
    rows = [
        (
            v.path,
            str(v.dtype),
            _shape_text(v.logical_shape),
            _shape_text(v.padded_shape) if v.is_padded else "",
            spec_text(v.spec),
            bytes_text(v.bytes_per_device(sizes)),
            _waste_text(v.padding_bytes(), v.logical_bytes()),
            v.reason,
        )
        for v in _records(variables)
    ]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [
        f"Mesh {mesh_text(sizes)}: {count_text(math.prod(sizes.values()), 'device')}",
        "",
        _line(header, widths),
        _line(["-" * width for width in widths], widths),
        *(_line(row, widths) for row in rows),
        "",
        f"{count_text(totals.num_variables, 'variable')} ({totals.num_split} split, {totals.num_replicated} "
        f"replicated, {totals.num_padded} padded), {totals.num_elements:,} elements, "
        f"{bytes_text(totals.logical_bytes)} a copy",
        f"Each device holds {bytes_text(totals.bytes_per_device)}, of which "
        f"{bytes_text(totals.replicated_bytes_per_device)} replicated",
        f"Padding adds {_waste_text(totals.padding_bytes, totals.logical_bytes) or 'nothing'}",
    ]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    right = {5, 6}  # the columns of numbers
    return "  ".join(
        cell.rjust(width) if i in right else cell.ljust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ).rstrip()


def _shape_text(shape: Sequence[int]) -> str:
    return str(tuple(shape))


def _waste_text(padding: int, logical: int) -> str:
    if not padding:
        return ""
    return f"{bytes_text(padding)} ({padding / logical:.2%})"


def _records(variables: Any) -> list[VariableSpec]:
    records = jax.tree.leaves(variables)
    for record in records:
        if not isinstance(record, VariableSpec):
            raise ValueError(
                f"A report is made of VariableSpecs, and this is a {type(record).__name__}: {record!r:.100}. Make them "
                "with plan_sharding or make_variable_spec."
            )
    return records
