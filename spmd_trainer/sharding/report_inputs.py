"""The inputs in a sharding report: what each field of a batch is, and how it is split on the mesh."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterator, Sequence
from typing import TypedDict

import jax
from jax.sharding import PartitionSpec

from spmd_trainer.sharding.messages import spec_text
from spmd_trainer.sharding.specs import PyTree, entry_axes
from spmd_trainer.sharding.variables import named_leaves

HEADER = ("input", "class", "field", "dtype", "global batch", "padded", "arrives", "in the step")


@dataclasses.dataclass(frozen=True)
class InputLayout:
    """One input of a job.

    Attributes:
      use: 'train', 'eval' or 'decode'.
      name: the input's name.
      class_name: the class or function that reads it.
      shapes: ShapeDtypeStructs of the global batch, without padding; None if they are not known.
      padded_shapes: a tree like it: the batch as it is on the devices.
      arrives: a tree like it of PartitionSpecs: how a batch is put on the devices.
      in_step: a tree like it of PartitionSpecs: how the step splits it before it computes.
      problem: why the shapes are not known.
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
    """One field of an input's batch. The specs have the axes of each dimension."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    padded_shape: tuple[int, ...]
    arrives: list[tuple[str, ...]]
    arrives_text: str
    in_step: list[tuple[str, ...]]
    in_step_text: str


InputData = TypedDict(
    "InputData", {"use": str, "name": str, "class": str, "fields": list[InputFieldData], "problem": str}
)


def input_data(layout: InputLayout) -> InputData:
    """Returns the data of one input that all forms of the report show."""
    return {
        "use": layout.use,
        "name": layout.name,
        "class": layout.class_name,
        "fields": list(_fields(layout)),
        "problem": layout.problem,
    }


def _fields(layout: InputLayout) -> Iterator[InputFieldData]:
    def is_spec(x: object) -> bool:
        return isinstance(x, PartitionSpec)

    padded = jax.tree.leaves(layout.padded_shapes)
    arrives, in_step = (jax.tree.leaves(specs, is_leaf=is_spec) for specs in (layout.arrives, layout.in_step))
    for (path, x), whole, first, then in zip(named_leaves(layout.shapes), padded, arrives, in_step, strict=True):
        yield {
            "path": path,
            "dtype": str(x.dtype),
            "shape": tuple(x.shape),
            "padded_shape": tuple(whole.shape),
            "arrives": [entry_axes(entry) for entry in first],
            "arrives_text": spec_text(first),
            "in_step": [entry_axes(entry) for entry in then],
            "in_step_text": spec_text(then),
        }


def input_rows(inputs: Sequence[InputData]) -> list[tuple[str, ...]]:
    """Returns the cells below `HEADER`, a row for each field; name and class stand in an input's first row."""
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
    """Returns the inputs as a section of an HTML page that opens on a click; '' without inputs."""
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
