"""Draws the pictures of docs/pictures: `python tools/draw_docs.py`. The layouts are computed with the sharding library.

With `--pages` it also runs README's example, and photographs the pages of the run with Chromium.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from html import escape

from jax.sharding import PartitionSpec

from spmd_trainer.sharding import to_partition_spec, uneven_paddings
from spmd_trainer.sharding.specs import axes_by_dim

ROOT = pathlib.Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
MESH = {"replica": 1, "data": 4, "mdl": 2}
# One colour for each part of the first split dimension.
COLOURS = ("#cfe3fb", "#d5efd2", "#fce3c5", "#eadcf5", "#f9d3d6", "#d3eeee", "#f3efc3", "#e3e3e3")
_LINE = "#44546a"


class Drawing:
    """An SVG on a white card, which is readable on light and dark pages."""

    def __init__(self, width: int, height: int, title: str):
        """Starts a drawing; screen readers read `title`."""
        self._width, self._height, self._title = width, height, title
        self._parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, fill: str = "#ffffff", dashed: bool = False) -> None:
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}" stroke="{_LINE}"{dash}/>'
        )

    def text(
        self, x: float, y: float, text: str, *, size: int = 13, anchor: str = "middle", bold: bool = False
    ) -> None:
        """Writes a line; y is its baseline."""
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self._parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{_LINE}" stroke-width="1.5" marker-end="url(#head)"/>'
        )

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self._width} {self._height}" width="{self._width}" '
            f'height="{self._height}" role="img" font-family="sans-serif" fill="#1d2733">'
        )
        defs = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{_LINE}"/></marker></defs>'
        )
        card = f'<rect width="{self._width}" height="{self._height}" rx="8" fill="#ffffff"/>'
        lines = [head, f"<title>{escape(self._title)}</title>", defs, card, *self._parts, "</svg>"]
        return "\n".join(lines) + "\n"


def parts(spec: PartitionSpec, rank: int) -> dict[tuple[int, ...], list[int]]:
    """Returns {part index of each dimension: devices that hold it} on MESH."""
    axes = axes_by_dim(spec, rank)
    held: dict[tuple[int, ...], list[int]] = {}
    for device, place in enumerate(itertools.product(*(range(size) for size in MESH.values()))):
        at = dict(zip(MESH, place, strict=True))
        part = []
        for names in axes:
            index = 0
            for name in names:
                index = index * MESH[name] + at[name]
            part.append(index)
        held.setdefault(tuple(part), []).append(device)
    return held


def _grid(drawing: Drawing, x: int, y: int, width: int, height: int, spec: PartitionSpec) -> None:
    """Draws the first and last dimension of an array, with the devices of each part."""
    rank = max(2, len(spec))
    held = parts(spec, rank)
    rows = max(part[0] for part in held) + 1
    columns = max(part[-1] for part in held) + 1
    for part, devices in held.items():
        w, h = width / columns, height / rows
        left, top = x + part[-1] * w, y + part[0] * h
        drawing.box(left, top, w, h, COLOURS[part[0] % len(COLOURS)])
        drawing.text(left + w / 2, top + h / 2 + 4, ", ".join(map(str, devices)), size=12)


def split_mappings() -> str:
    """The mesh, and inputs of rank 1 to 4 with the mapping of the worked example."""
    mapping = {
        "labels [8]": (("replica", "data"),),
        "ids [8, 16]": (("replica", "data"), None),
        "boxes [8, 5, 4]": (("replica", "data"), None, None),
        "images [8, 8, 8, 2]": ("data", None, None, "mdl"),
    }
    drawing = Drawing(860, 330, "Eight devices as a mesh, and which device holds which part of inputs of rank 1 to 4")
    drawing.text(20, 30, "The mesh", anchor="start", bold=True)
    drawing.text(20, 300, "replica 1, data 4, mdl 2", anchor="start", size=12)
    for device in range(8):
        row, column = divmod(device, 2)
        drawing.box(90 + 45 * column, 70 + 45 * row, 40, 40, COLOURS[row])
        drawing.text(110 + 45 * column, 95 + 45 * row, str(device))
    drawing.text(132, 60, "mdl 0, 1", size=12)
    for row in range(4):
        drawing.text(80, 95 + 45 * row, f"data {row}", size=12, anchor="end")
    drawing.text(240, 30, "Who holds which rows (down) and last dimension (across)", anchor="start", bold=True)
    names = list(MESH)
    for column, (name, dims) in enumerate(mapping.items()):
        x, width = 240 + 155 * column, 130 if len(dims) > 1 else 60
        drawing.text(x, 60, name, size=12, anchor="start")
        _grid(drawing, x, 70, width, 175, to_partition_spec(dims, names))
        text = str(dims).replace("'", "").replace("(replica, data)", "(rep., data)")
        drawing.text(x, 268, text, size=11, anchor="start")
    drawing.text(
        240, 300, "Rows are split over data. Both devices of a data row hold the same rows, ", size=12, anchor="start"
    )
    drawing.text(240, 316, "except of images: their channels are split over mdl.", size=12, anchor="start")
    return drawing.svg()


def padding() -> str:
    """A variable of 6 rows on 4 devices."""
    rows, shards = 6, MESH["data"]
    (padded,) = uneven_paddings(PartitionSpec("data"), (rows,), tuple(MESH.values()), tuple(MESH))
    drawing = Drawing(760, 260, "A variable of 6 rows is stored as 8 rows on 4 devices; the step sees 6")
    drawing.text(30, 30, "What the model declares", anchor="start", bold=True)
    for row in range(rows):
        drawing.box(60, 45 + 24 * row, 110, 22, "#eef2f7")
        drawing.text(115, 61 + 24 * row, f"row {row}", size=12)
    drawing.arrow(190, 120, 270, 120)
    drawing.text(230, 110, "pad", size=12)
    drawing.text(280, 30, "What the devices hold", anchor="start", bold=True)
    each = (rows + padded) // shards
    for row in range(rows + padded):
        device = row // each
        is_padding = row >= rows
        drawing.box(310, 45 + 24 * row, 110, 22, "#ffffff" if is_padding else COLOURS[device], dashed=is_padding)
        drawing.text(365, 61 + 24 * row, "0 (padding)" if is_padding else f"row {row}", size=12)
        if row % each == 0:
            drawing.text(430, 73 + 24 * row, f"data {device}", size=12, anchor="start")
    drawing.arrow(500, 120, 580, 120)
    drawing.text(540, 110, "slice", size=12)
    drawing.text(590, 30, "What the step sees", anchor="start", bold=True)
    for row in range(rows):
        drawing.box(610, 45 + 24 * row, 110, 22, "#eef2f7")
        drawing.text(665, 61 + 24 * row, f"row {row}", size=12)
    drawing.text(
        30, 250, "Checkpoints hold what the model declares, so any mesh can read them.", anchor="start", size=12
    )
    return drawing.svg()


def _chain(
    drawing: Drawing, boxes: Sequence[tuple[str, Sequence[str], str]], x: int, y: int, width: int, unlinked: str = ""
) -> None:
    for index, (title, lines, fill) in enumerate(boxes):
        left = x + index * (width + 28)
        drawing.box(left, y, width, 92, fill)
        drawing.text(left + width / 2, y + 24, title, bold=True)
        for number, line in enumerate(lines):
            drawing.text(left + width / 2, y + 46 + 17 * number, line, size=11)
        if index and title not in unlinked:
            drawing.arrow(left - 27, y + 46, left - 2, y + 46)


def step_flow() -> str:
    """The path of a batch and of the state through one training step."""
    drawing = Drawing(860, 300, "A batch and the train state flow through one training step")
    input_side, device_side = "#fff7e6", "#e8f1fb"
    _chain(
        drawing,
        [
            ("input", ["batch n, a function", "of n alone"], input_side),
            ("split", ["by rank: map_1d,", "map_2d, ... , by_name"], input_side),
            ("the step", ["forward, backward,", "learner: logical shapes"], device_side),
            ("scalars", ["loss, metrics: one", "copy to the host"], device_side),
            ("callbacks", ["summaries, early", "stop, yours"], input_side),
        ],
        20,
        40,
        140,
    )
    _chain(
        drawing,
        [
            ("state n", ["on the mesh, padded", "where it must be"], device_side),
            ("slice", ["padding off, inside", "the compiled step"], device_side),
            ("the new state", ["logical shapes", ""], device_side),
            ("pad", ["zeros again; the old", "buffers are reused"], device_side),
            ("state n + 1", ["saved as the model", "declares it"], device_side),
        ],
        20,
        180,
        140,
        unlinked="the new state",
    )
    drawing.arrow(328, 180, 366, 133)
    drawing.arrow(426, 133, 426, 178)
    drawing.text(20, 24, "orange: on the host; blue: on the devices, one compiled program", size=12, anchor="start")
    return drawing.svg()


DRAWINGS = {"split_mappings.svg": split_mappings, "padding.svg": padding, "step_flow.svg": step_flow}


def photograph_pages() -> None:
    """Trains README's example, and photographs the pages that it writes."""
    (example,) = re.findall(r"^```python\n(import .*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-c", example], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True
        )
        for name, height in (("sharding_report", 560), ("run", 880)):
            picture = f"--screenshot={PICTURES / name}.png"
            window = [f"--window-size=1000,{height}", "--virtual-time-budget=4000", "--hide-scrollbars"]
            page = f"file://{folder}/runs/waves/{name}.html"
            subprocess.run(
                ["chromium", "--headless", "--no-sandbox", "--disable-gpu", *window, picture, page], check=True
            )


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (PICTURES / name).write_text(draw())
    if "--pages" in sys.argv:
        photograph_pages()


if __name__ == "__main__":
    main()
