"""The sharding report as plain data: totals, and an entry for each variable and each input."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypedDict

import jax
from jax.sharding import Mesh, PartitionSpec

from spmd_trainer.sharding.messages import bytes_text, spec_text
from spmd_trainer.sharding.specs import AnyMesh, PyTree, dimension_paddings, entry_axes, mesh_shape_of
from spmd_trainer.sharding.variables import VariableSpec, named_leaves

KINDS = ("parameters", "optimizer_state", "other")
# First keys of the paths in a train state: this trainer's, Flax's TrainState's and NNX's Optimizer's.
_KIND_OF_FIRST_KEY = {
    "opt_states": "optimizer_state",
    "opt_state": "optimizer_state",
    "step": "other",
    "extra_state": "other",
}


@dataclasses.dataclass(frozen=True)
class ShardingTotals:
    """The totals over all variables of a sharding report.

    Attributes:
      num_variables: number of variables.
      num_elements: elements of one whole copy of all variables, without padding.
      num_split: number of variables that are sharded over devices.
      num_replicated: number of replicated variables.
      num_padded: number of variables with padding.
      logical_bytes: bytes of one whole copy, without padding.
      padding_bytes: bytes that padding adds to one whole copy.
      bytes_per_device: bytes on one device, padding included.
      replicated_bytes_per_device: bytes of replicated variables on one device.
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


class MeshAxis(TypedDict):
    """Name and size of one mesh axis."""

    name: str
    size: int


class MeshData(TypedDict):
    """The mesh of a sharding report: its axes, and its device ids in row-major order (None for a mesh without devices)."""

    axes: list[MeshAxis]
    device_ids: list[int] | None


class VariableData(TypedDict):
    """A variable's entry in a sharding report. `spec` lists the mesh axes of each dimension; [] for a replicated variable."""

    path: str
    kind: str
    dtype: str
    logical_shape: tuple[int, ...]
    padded_shape: tuple[int, ...]
    spec: list[tuple[str, ...]]
    spec_text: str
    bytes_per_device: int
    padding_bytes: int
    logical_bytes: int
    reason: str


class ReportData(TypedDict):
    """A whole sharding report. `totals` and each value of `totals_by_kind` have the fields of ShardingTotals."""

    about: dict[str, str]
    mesh: MeshData
    totals: dict[str, int]
    totals_by_kind: dict[str, dict[str, int]]
    variables: list[VariableData]
    inputs: list[InputData]


def variable_kind(path: str) -> str:
    """Returns 'parameters', 'optimizer_state' or 'other' for a variable's path, by the path's first key.

    `opt_states/...` (and Flax's `opt_state/...`) is optimizer state; `step` and `extra_state/...` are other state. All
    other paths are parameters: the variables of the model, trainable (`mdl_vars/params/...`) and non-trainable
    (`mdl_vars/non_trainable/...`).
    """
    return _KIND_OF_FIRST_KEY.get(path.split("/", 1)[0], "parameters")


def sharding_totals(variables: PyTree, mesh: AnyMesh) -> ShardingTotals:
    """Returns the totals (variables, elements, bytes) over a tree or list of VariableSpecs.

    Raises:
      ValueError: a leaf is not a VariableSpec.
    """
    records, sizes = report_records(variables), mesh_shape_of(mesh)
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


def report_records(variables: PyTree) -> list[VariableSpec]:
    """Returns the leaves of a tree of VariableSpecs, in the tree's order.

    Raises:
      ValueError: a leaf is not a VariableSpec.
    """
    records = jax.tree.leaves(variables)
    for record in records:
        if not isinstance(record, VariableSpec):
            raise ValueError(
                f"A sharding report needs VariableSpecs, not a {type(record).__name__}: {record!r:.100}. Make them with "
                "plan_sharding or make_variable_spec."
            )
    return records


def report_data(
    variables: Sequence[VariableSpec], mesh: AnyMesh, about: Mapping[str, str], inputs: Sequence[InputLayout] = ()
) -> ReportData:
    """Returns the data of a sharding report, from which its text, JSON and HTML forms are made."""
    sizes = mesh_shape_of(mesh)
    by_kind: dict[str, list[VariableSpec]] = {kind: [] for kind in KINDS}
    for v in variables:
        by_kind[variable_kind(v.path)].append(v)
    return {
        "about": dict(about),
        "mesh": {
            "axes": [{"name": name, "size": size} for name, size in sizes.items()],
            "device_ids": [int(d.id) for d in mesh.devices.flat] if isinstance(mesh, Mesh) else None,
        },
        "totals": dataclasses.asdict(sharding_totals(variables, mesh)),
        "totals_by_kind": {kind: dataclasses.asdict(sharding_totals(vs, mesh)) for kind, vs in by_kind.items()},
        "variables": [
            {
                "path": v.path,
                "kind": variable_kind(v.path),
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
            for v in variables
        ],
        "inputs": [input_data(layout, sizes) for layout in inputs],
    }


def opening_variable(variables: Sequence[VariableData]) -> int | None:
    """Returns the index of the variable that the HTML report shows first; None without variables.

    It is the largest sharded variable (by bytes of one copy), or the largest variable if none is sharded; on a tie, the first.
    A variable whose spec has only axes of size 1 is not treated as sharded.
    """

    def rank(index: int) -> tuple[bool, int]:
        v = variables[index]
        return v["bytes_per_device"] < v["logical_bytes"] + v["padding_bytes"], v["logical_bytes"]

    return max(range(len(variables)), key=rank, default=None)


def percent_text(part: int, whole: int) -> str:
    """Returns `part / whole` as a percentage: `2.97%`, `1500%`, or `<0.01%` if it would round to `0.00%`."""
    share = part / whole if whole else 0.0
    if 0 < share < 0.00005:
        return "<0.01%"
    return f"{share:.0%}" if share >= 1 else f"{share:.2%}"


def waste_text(padding_bytes: int, logical_bytes: int) -> str:
    """Returns the bytes of padding and their share of the logical bytes as text: `768 B (2.97%)`; '' without padding."""
    return f"{bytes_text(padding_bytes)} ({percent_text(padding_bytes, logical_bytes)})" if padding_bytes else ""


HEADER = ("input", "class", "field", "dtype", "global batch", "padded", "arrives", "in the step")


@dataclasses.dataclass(frozen=True)
class InputLayout:
    """Shapes and shardings of one input of a job.

    Attributes:
      use: the input's purpose: 'train', 'eval' or 'decode'.
      name: the input's name.
      class_name: the class or function that reads the input.
      shapes: ShapeDtypeStructs of the global batch, without padding; None if they are unknown.
      padded_shapes: ShapeDtypeStructs of the padded batch on the devices, same structure.
      arrives: PartitionSpecs of the batch as `Layout.put` puts it on the devices, same structure.
      in_step: PartitionSpecs of the batch inside the training, evaluation or decode step, same structure.
      problem: the reason why the shapes are unknown; '' if they are known.
    """

    use: str
    name: str
    class_name: str
    shapes: PyTree = None
    padded_shapes: PyTree = None
    arrives: PyTree = None
    in_step: PyTree = None
    problem: str = ""


class InputFieldData(TypedDict):
    """A field of an input's batch in a sharding report.

    `arrives` and `in_step` list the mesh axes of each dimension: when the batch arrives on the devices, and inside the training
    (or other) step. `shape_in_step` is the field's shape inside the step, with the padding for the axes of `in_step`.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    padded_shape: tuple[int, ...]
    arrives: list[tuple[str, ...]]
    arrives_text: str
    shape_in_step: tuple[int, ...]
    in_step: list[tuple[str, ...]]
    in_step_text: str


InputData = TypedDict(
    "InputData", {"use": str, "name": str, "class": str, "fields": list[InputFieldData], "problem": str}
)


def input_data(layout: InputLayout, sizes: Mapping[str, int]) -> InputData:
    """Returns one input's data for all forms of the sharding report. `sizes` is {axis: size} of the mesh."""
    return {
        "use": layout.use,
        "name": layout.name,
        "class": layout.class_name,
        "fields": list(_fields(layout, sizes)),
        "problem": layout.problem,
    }


def _fields(layout: InputLayout, sizes: Mapping[str, int]) -> Iterator[InputFieldData]:
    def is_spec(x: object) -> bool:
        return isinstance(x, PartitionSpec)

    padded = jax.tree.leaves(layout.padded_shapes)
    arrives, in_step = (jax.tree.leaves(specs, is_leaf=is_spec) for specs in (layout.arrives, layout.in_step))
    for (path, x), whole, first, then in zip(named_leaves(layout.shapes), padded, arrives, in_step, strict=True):
        added = dimension_paddings(then, x.shape, sizes)
        in_step_shape = tuple(size + more for size, more in zip(x.shape, added, strict=True))
        yield {
            "path": path,
            "dtype": str(x.dtype),
            "shape": tuple(x.shape),
            "padded_shape": tuple(whole.shape),
            "arrives": [entry_axes(entry) for entry in first],
            "arrives_text": spec_text(first),
            "shape_in_step": in_step_shape,
            "in_step": [entry_axes(entry) for entry in then],
            "in_step_text": f"{spec_text(then)}{f' as {in_step_shape}' if any(added) else ''}",
        }


def input_rows(inputs: Sequence[InputData]) -> list[tuple[str, ...]]:
    """Returns table rows with the columns of `HEADER`, one per field. Only an input's first row has its name and class."""
    rows: list[tuple[str, ...]] = []
    for given in inputs:
        head = (f"{given['use']}: {given['name']}", given["class"])
        if not given["fields"]:
            rows.append((*head, f"not known: {given['problem']}", "", "", "", "", ""))
        for field in given["fields"]:
            shape, padded = field["shape"], field["padded_shape"]
            about = (field["path"], field["dtype"], str(shape), "" if padded == shape else str(padded))
            rows.append((*head, *about, field["arrives_text"], field["in_step_text"]))
            head = ("", "")
    return rows


def input_section(inputs: Sequence[InputData]) -> str:
    """Returns the inputs as a collapsible section of an HTML page; '' without inputs."""
    if not inputs:
        return ""
    header = "".join(f'<th scope="col">{name}</th>' for name in HEADER)
    rows = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>" for cells in input_rows(inputs)
    )
    return (
        f'<details id="inputs" class="card notice"><summary>Inputs ({len(inputs)})</summary><div class="box">'
        f'<table class="inputs mono"><thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table></div></details>'
    )
