"""Decoded examples as a table of texts and as pictures."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence

import numpy as np

from spmd_trainer.sharding.messages import shortened

Row = Mapping[str, object]
# Columns of a language model's table. The other fields of an example describe all samples of its prompt.
_OF_TEXTS = ("index", "prompt", "output", "score")
# Maximum number of characters in a cell. Longer content is in the run's directory, and the cell says so.
_CELL = 4000


def table(rows: Sequence[Row], dataset: str, step: int) -> tuple[list[str], list[list[object]]]:
    """Returns the columns and rows of a table of decoded examples.

    A language model's table has index, prompt, best output and score. Other tables have every field except pictures, and
    arrays are written as JSON.
    """
    columns = [name for name in _OF_TEXTS if any(name in row for row in rows)]
    if not any("output" in row for row in rows):
        names = {name for row in rows for name, value in row.items() if picture(value) is None}
        columns += sorted(names.difference(columns))
    whole = f"decode_out/{dataset}/step_{step}.jsonl"
    return columns, [[_cell(row.get(name), whole) for name in columns] for row in rows]


def markdown(rows: Sequence[Row], dataset: str, step: int) -> str:
    """Returns the `table` of decoded examples in Markdown, with special characters escaped."""
    columns, cells = table(rows, dataset, step)
    lines = [columns, ["---"] * len(columns), *(map(_escaped, row) for row in cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def pictures(rows: Sequence[Row]) -> list[tuple[str, np.ndarray]]:
    """Returns names and pictures (uint8 [height, width, 3 or 4]) for all image-like arrays in decoded examples."""
    found = []
    for number, row in enumerate(rows):
        for name, value in row.items():
            array = picture(value)
            if array is not None:
                found.append((f"{name}/{row.get('index', number)}", array))
    return found


def picture(value: object) -> np.ndarray | None:
    """Converts an array of rank 3 with 1, 3 or 4 channels to a picture, uint8 [height, width, 3 or 4]. Returns None for any
    other value.

    Integers from 0 to 255, or other numbers from 0 to 1, are used as brightness. Arrays with other values are scaled so that
    the minimum is black and the maximum is white.

    Args:
      value: a field of a decoded example: for an array, nested lists of numbers, where NaN and infinity are None.
    """
    if not isinstance(value, list) or not value or not isinstance(value[0], list):
        return None
    try:
        array = np.asarray(value)
        array = array.astype(np.float64) if array.dtype == object else array
    except (ValueError, TypeError):
        return None
    if array.ndim != 3 or array.shape[-1] not in (1, 3, 4) or 0 in array.shape or array.dtype.kind not in "biuf":
        return None
    array = array.repeat(3, axis=-1) if array.shape[-1] == 1 else array
    if array.dtype.kind in "iu" and array.min() >= 0 and array.max() <= 255:
        return array.astype(np.uint8)
    finite = np.nan_to_num(array.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    low, high = (0.0, 1.0) if finite.min() >= 0 and finite.max() <= 1 else (finite.min(), finite.max())
    scaled = (finite - low) / (high - low) if high > low else finite * 0
    return np.asarray(np.rint(scaled * 255), np.uint8)


def png(array: np.ndarray) -> bytes:
    """Encodes a picture, uint8 [height, width, 3 or 4], as PNG."""
    from PIL import Image  # TensorBoard needs it too

    content = io.BytesIO()
    Image.fromarray(array).save(content, "PNG")
    return content.getvalue()


def _cell(value: object, whole: str) -> object:
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return shortened(text, _CELL, f" ... ({len(text)} characters, all of them in {whole})")


def _escaped(cell: object) -> str:
    text = cell if isinstance(cell, str) else json.dumps(cell)
    return re.sub(r"[\\`*_\[\]<>|#~]", r"\\\g<0>", text).replace("\r", "").replace("\n", "↵ ")
