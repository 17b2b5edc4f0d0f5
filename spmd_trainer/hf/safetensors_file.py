"""Reads and writes files in the safetensors format: a header of names, dtypes, shapes and offsets, then the arrays' bytes.

The `safetensors` library memory-maps local files, so everything that it reads counts as memory of the process. This module
reads only the requested slices of a file, which may be on a disk or in an object store.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
import numpy.typing as npt

from spmd_trainer.checkpointing import step_files
from spmd_trainer.hf.errors import HfDamagedError
from spmd_trainer.storage import json_values, reading

DTYPES: Mapping[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_METADATA = "__metadata__"
_LENGTH_BYTES = 8
# The `safetensors` library has the same limit.
_MAX_HEADER_BYTES = 100_000_000


@dataclasses.dataclass(frozen=True)
class Described:
    """Name, dtype and shape of an array."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Tensor(Described):
    """An array in a safetensors file.

    Attributes:
      path: path of the file.
      start: offset of the array's first byte in the file.
    """

    path: str
    start: int

    @property
    def row_bytes(self) -> int:
        """Size in bytes of a row, i.e. of the values at one index of the first dimension."""
        return self.dtype.itemsize * math.prod(self.shape[1:])

    def read_rows(self, first: int, last: int) -> npt.NDArray[Any]:
        """Returns the rows [first, last) as a read-only array of shape [last - first, ...].

        Raises:
          HfDamagedError: the file ends before the last of these rows.
          CheckpointReadError: storage does not answer, or refuses access.
        """
        start, end = self.start + first * self.row_bytes, self.start + last * self.row_bytes
        content = step_files.read(f"reading {self.path}", lambda: reading.read(self.path, start, end))
        if len(content) != end - start:
            raise HfDamagedError(f"{self.path} is cut off: it ends inside of {self.name}. Copy it again.")
        return np.frombuffer(content, self.dtype).reshape(last - first, *self.shape[1:])


def read_header(path: str) -> dict[str, Tensor]:
    """Reads the header of a safetensors file. Returns the arrays in the file by name, without reading their values.

    Raises:
      HfDamagedError: the file is malformed or cut off.
      FileNotFoundError: the file doesn't exist.
      CheckpointReadError: storage does not answer, or refuses access.
    """
    size = step_files.read(f"looking at {path}", lambda: reading.size(path))
    length = int.from_bytes(step_files.read(f"reading {path}", lambda: reading.read(path, 0, _LENGTH_BYTES)), "little")
    first = _LENGTH_BYTES + length
    if length > _MAX_HEADER_BYTES or first > size:
        raise HfDamagedError(
            f"{path} is not a safetensors file, or is cut off: it has {size} bytes, and a header of {length} would begin it"
        )
    try:
        content = step_files.read(f"reading {path}", lambda: reading.read(path, _LENGTH_BYTES, first))
        header = json_values.parse_object(content, unique=True)  # the format forbids duplicate names
        found = {name: _parse(name, path, entry, first) for name, entry in header.items() if name != _METADATA}
        end = _end(found.values(), first)
    except (ValueError, KeyError, TypeError) as error:
        raise HfDamagedError(
            f"{path} is not a safetensors file: its header is malformed ({type(error).__name__}: {error})"
        ) from error
    if end > size:
        raise HfDamagedError(f"{path} is cut off: it has {size} bytes of {end}. Copy it again.")
    if end < size:
        raise HfDamagedError(f"{path} has {size} bytes, and the tensors of its header end at {end}. Copy it again.")
    return found


def _end(tensors: Iterable[Tensor], first: int) -> int:
    """Returns the file offset at which the last tensor ends. Checks that tensors are contiguous, starting at offset `first`.

    Raises:
      ValueError: tensors overlap, or there are gaps between them.
    """
    end, before = first, "the header"
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.nbytes)):
        if tensor.start != end:
            raise ValueError(
                f"{tensor.name} begins at offset {tensor.start - first}, and {before} before it ends at {end - first}"
            )
        end, before = tensor.start + tensor.nbytes, tensor.name
    return end


def _parse(name: str, path: str, entry: Mapping[str, Any], first: int) -> Tensor:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"{name} has the dtype {entry['dtype']!r:.100}")
    dtype, shape = DTYPES[entry["dtype"]], json_values.shape(entry["shape"], f"{name}.shape")
    start, end = (json_values.integer(offset, f"{name}.data_offsets") for offset in entry["data_offsets"])
    found = Tensor(name, dtype, shape, path, first + start)
    if end - start != found.nbytes:
        raise ValueError(f"{name} has offsets {start} to {end}, and needs {found.nbytes} bytes")
    return found


def in_file_order(tensors: Iterable[Described]) -> list[Described]:
    """Sorts arrays into the order in which the `safetensors` library writes them: by descending element size, then by name."""
    return sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))


def write(file: BinaryIO, tensors: list[Described], arrays: Iterator[npt.NDArray[Any]]) -> None:
    """Writes a safetensors file, one array at a time.

    Args:
      file: an empty file, opened for writing.
      tensors: names, dtypes and shapes of the arrays, in the order of `in_file_order`.
      arrays: the values of the arrays, in the same order.
    """
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        offsets = [offset, offset + tensor.nbytes]
        header[tensor.name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        offset += tensor.nbytes
    content = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    content += b" " * (-len(content) % _LENGTH_BYTES)
    file.write(len(content).to_bytes(_LENGTH_BYTES, "little") + content)
    for tensor, array in zip(tensors, arrays, strict=True):
        assert (array.shape, array.dtype) == (tensor.shape, tensor.dtype), tensor.name
        file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
