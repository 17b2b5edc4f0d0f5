"""Reads a run's scalars from its `summaries/*/metrics.jsonl`, repeatedly during training, and thins long curves."""

from __future__ import annotations

import array
import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from etils import epath

from spmd_trainer.sharding.messages import count_text
from spmd_trainer.storage import is_remote, json_values, reading
from spmd_trainer.storage.append import read_joined
from spmd_trainer.training.summary_writers import METRICS_FILE

Floats: TypeAlias = npt.NDArray[np.float64]

# Directory of the training summaries. Restarting from an earlier step repeats the steps after it.
TRAIN = "train"
# Limits of the float64 columns: integers from the first on become infinity, and steps from the second on are not exact.
_LARGEST = 10**300
_NO_STEP = 2**53


class ScalarsFile:
    """The scalars of one `metrics.jsonl`, kept as columns.

    Attributes:
      notes: {name: text} from the last record in the file that has any texts.
      bad_lines: number of lines that could not be read.
      back: the first step in the file after each restart from an earlier step.
    """

    def __init__(self, path: epath.Path):
        self._path = path
        self._is_remote = is_remote(path)
        self._forget()

    def update(self) -> bool:
        """Reads the text that was added to the file since the last call. Returns True if there was any.

        Raises:
          OSError: the file can't be read.
        """
        before = self._offset
        if self._is_remote:
            text = read_joined(self._path).encode()
            if len(text) != before:
                self._forget()
                self._add(text)
        else:
            with open(self._path, "rb", opener=reading.opened) as file:
                if file.seek(0, 2) < before:  # it is another file by now
                    self._forget()
                file.seek(self._offset)
                while block := file.read(1 << 24):
                    self._add(block)
        return self._offset != before

    def names(self) -> list[str]:
        """Returns the names of the scalars in the order in which they first appear."""
        return list(self._values)

    def series(self, name: str) -> tuple[Floats, Floats]:
        """Returns the steps and values of a scalar as two float64 arrays [points], by increasing step.

        For a step that was written several times, returns the last value. In the training summaries, leaves out values that were
        written before a restart, for steps after the one from which the restarted run continued.
        """
        empty = np.empty(0)
        if name not in self._values:
            return empty, empty
        steps, values = (np.frombuffer(column, np.float64).copy() for column in self._values[name])
        if self._path.parent.name == TRAIN:
            later = np.minimum.accumulate(steps[::-1])[::-1]
            kept = np.append(steps[:-1] < later[1:], True)
            return steps[kept], values[kept]
        _, last = np.unique(steps[::-1], return_index=True)
        chosen = steps.size - 1 - last
        return steps[chosen], values[chosen]

    def _forget(self) -> None:
        self._offset = 0
        self._rest = b""
        self._values: dict[str, tuple[array.array[float], array.array[float]]] = {}
        self._last_step = -1
        self.notes: dict[str, str] = {}
        self.bad_lines = 0
        self.back: list[int] = []

    def _add(self, block: bytes) -> None:
        self._offset += len(block)
        *lines, self._rest = (self._rest + block).split(b"\n")
        for line in lines:
            if line.strip():
                self._add_line(line)

    def _add_line(self, line: bytes) -> None:
        try:
            record = json_values.parse_object(line, finite=False)
            step = int(record.pop("step"))
        except (ValueError, KeyError, TypeError, OverflowError):
            step = _NO_STEP
        if abs(step) >= _NO_STEP:
            self.bad_lines += 1
            return
        if step <= self._last_step:
            self.back.append(step)
        self._last_step = step
        self.notes = {name: value for name, value in record.items() if isinstance(value, str)} or self.notes
        for name, value in record.items():
            if type(value) is not float and type(value) is not int:
                continue  # a note
            if name not in self._values:
                self._values[name] = (array.array("d"), array.array("d"))
            steps, values = self._values[name]
            steps.append(step)
            values.append(value if type(value) is float or abs(value) < _LARGEST else math.inf)


class RunScalars:
    """The scalars of a run. `files`: {name of a directory below `summaries`: its `ScalarsFile`}."""

    def __init__(self, job_log_dir: epath.Path):
        self._root = job_log_dir / "summaries"
        self.files: dict[str, ScalarsFile] = {}

    def update(self) -> Iterator[str]:
        """Reads new text of all files. Yields a note for each file that can't be read, or that has unreadable lines."""
        for directory in entries(self._root):
            name = directory.name
            file = self.files.setdefault(name, ScalarsFile(directory / METRICS_FILE))
            try:
                file.update()
            except (FileNotFoundError, NotADirectoryError):
                continue  # events of another program
            except OSError as error:
                yield f"summaries/{name}/{METRICS_FILE} can't be read: {error}"
            if file.bad_lines:
                yield f"summaries/{name}/{METRICS_FILE}: {count_text(file.bad_lines, 'line')} can't be read; the others are shown"


def entries(directory: epath.Path) -> list[epath.Path]:
    """Returns the sorted paths in a directory; an empty list if the directory doesn't exist."""
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def thin(steps: Floats, values: Floats, buckets: int) -> tuple[Floats, Floats]:
    """Thins a long curve: keeps the lowest, the highest and the first non-finite point of each bucket of neighboring points.

    Spikes stay visible, and the first and the last point are kept. Does not thin curves of at most `2 * buckets` points.

    Args:
      steps: float64 [points].
      values: float64 [points].
      buckets: maximum number of buckets.
    """
    inner = steps.size - 2
    if steps.size <= 2 * buckets:
        return steps, values
    width = -(-inner // buckets)
    count = -(-inner // width)
    padded = np.full(count * width, np.nan)
    padded[:inner] = values[1:-1]
    rows = padded.reshape(count, width)
    finite = np.isfinite(rows)
    starts = 1 + width * np.arange(count)
    lowest = starts + np.where(finite, rows, np.inf).argmin(axis=1)
    highest = starts + np.where(finite, rows, -np.inf).argmax(axis=1)
    broken = ~finite
    broken.reshape(-1)[inner:] = False
    first_broken = (starts + broken.argmax(axis=1))[broken.any(axis=1)]
    chosen = np.unique(np.concatenate([[0], lowest, highest, first_broken, [steps.size - 1]]))
    return steps[chosen], values[chosen]


def rounded(values: Floats) -> list[float | None]:
    """Returns values for JSON. NaN and infinity become None. Others, except the first and last, are rounded for a plot."""
    finite = values[np.isfinite(values)]
    digits = _digits(finite) if finite.size else 6
    found = [float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in values.tolist()]
    for end in {0, len(found) - 1} if found else set():
        found[end] = float(values[end]) if np.isfinite(values[end]) else None
    return found


def _digits(values: Floats) -> int:
    """Returns the number of significant digits (6 to 17) that can express differences of 1/100,000 of the values' range."""
    with np.errstate(over="ignore"):
        largest, extent = float(np.abs(values).max()), float(np.ptp(values))
    if not extent or not math.isfinite(extent):
        return 17
    return min(17, max(6, 5 + math.ceil(math.log10(largest / extent) + 1e-9)))


def differences(steps: Sequence[int]) -> list[int]:
    """Returns the first step, then each step minus the previous one. As text, these numbers are shorter than the steps."""
    return [step - before for before, step in zip([0, *steps], steps, strict=False)]
