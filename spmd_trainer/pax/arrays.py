"""One array of a Pax checkpoint, read on demand."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from spmd_trainer.checkpointing.errors import CheckpointError, CheckpointReadError
from spmd_trainer.pax.errors import PaxDamagedError
from spmd_trainer.storage import json_values

if TYPE_CHECKING:
    import numpy.typing as npt
    import tensorstore as ts

Index: TypeAlias = tuple[slice, ...]
# Starts to read the part of a stored array that an index selects. Returns a function that waits for the part, a new array.
StartReading: TypeAlias = Callable[[Index], Callable[[], "npt.NDArray[Any]"]]

# TensorStore raises ValueError for everything. The error's text shows whether a file is missing, cut short or can't be decoded.
# Other texts count as a failure of the storage: Pax has no checksums, and an outage must not look like damage.
_OF_FILES = re.compile(
    "NOT_FOUND|OUT_OF_RANGE|DATA_LOSS|FAILED_PRECONDITION|INVALID_ARGUMENT|Error decoding|is missing|Not enough data"
)
_OF_STORAGE = re.compile(
    "PERMISSION_DENIED|UNAUTHENTICATED|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|RESOURCE_EXHAUSTED|Permission denied|CURL error"
)
# Bytes of decoded chunks that are kept in memory, because several devices take parts of the same chunk.
_CACHE_BYTES = 32 << 20
# The file that describes a zarr array.
ZARR_METADATA = ".zarray"


@dataclasses.dataclass(frozen=True, eq=False)
class PaxArray:
    """A stored array, read by `np.asarray(x)` or, in part, by `x[2:4]`. If `logical_shape` is known, padding is left out.

    Attributes:
      path: the variable's path, e.g. 'opt_states/0/no_prefix/2/m/params/lm/w'.
      name: the array's name on disk.
      stored_shape: the shape on disk, which Pax may have padded.
      dtype: the element type.
      logical_shape: the shape without padding; None if the checkpoint does not record it.
      shards: the number of shards along each dimension when Pax saved the array; None if the checkpoint does not record it. Pax
        pads a dimension to a multiple of this number.
      start_reading: starts to read the part that a tuple of slices selects; returns a function that waits for that part.
    """

    path: str
    name: str
    stored_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    logical_shape: tuple[int, ...] | None
    shards: tuple[int, ...] | None
    start_reading: StartReading = dataclasses.field(repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape, or the stored shape if the logical one is not known."""
        return self.stored_shape if self.logical_shape is None else self.logical_shape

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.size * self.dtype.itemsize

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Reads the whole array."""
        del copy  # what is read is a new array
        return np.asarray(self.start_reading(tuple(slice(0, size) for size in self.shape))(), dtype)

    def __getitem__(self, index: Any) -> npt.NDArray[Any]:
        """Reads the part that an index selects.

        With integers and slices of positive step, only this part is read from storage. Any other index reads the whole array.
        """
        given = index if isinstance(index, tuple) else (index,)
        whole = [slice(0, size) for size in self.shape]
        if len(given) > len(whole) or not all(isinstance(i, slice | int | np.integer) for i in given):
            return np.asarray(np.asarray(self)[index])
        read = whole
        then: list[slice | int] = []
        for dim, entry in enumerate(given):
            if isinstance(entry, slice):
                start, stop, step = entry.indices(self.shape[dim])
                if step < 0:
                    return np.asarray(np.asarray(self)[index])
                read[dim] = slice(start, max(start, stop))
                then.append(slice(None, None, step))
            else:
                position = range(self.shape[dim])[int(entry)]
                read[dim] = slice(position, position + 1)
                then.append(0)
        return np.asarray(self.start_reading(tuple(read))()[tuple(then)])


def open_tensorstore(specs: Mapping[str, dict[str, Any]], checkpoint: str) -> dict[str, ts.TensorStore]:
    """Opens zarr arrays for reading. Their metadata is read concurrently.

    Args:
      specs: {array name: TensorStore spec of the key-value store that has this array}.
      checkpoint: the checkpoint's name in error messages.

    Raises:
      PaxDamagedError: a file is missing or malformed.
      CheckpointReadError: the storage fails.
    """
    import tensorstore as ts

    context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
    # TensorStore's own parser ends the process at deep JSON.
    stores = {name: ts.KvStore.open(kvstore, context=context) for name, kvstore in specs.items()}
    described = {name: _result(store, name, checkpoint).read(ZARR_METADATA) for name, store in stores.items()}
    for name, future in described.items():
        _check_metadata(_result(future, name, checkpoint).value, name, checkpoint)
    # A missing chunk is an error: by default TensorStore reads it as zeros.
    opening = {
        name: ts.open(
            {"driver": "zarr", "kvstore": kvstore, "fill_missing_data_reads": False},
            read=True,
            open=True,
            context=context,
        )
        for name, kvstore in specs.items()
    }
    return {name: _result(future, name, checkpoint) for name, future in opening.items()}


def _check_metadata(content: bytes, name: str, checkpoint: str) -> None:
    try:
        if not content:
            raise ValueError(f"its file {ZARR_METADATA} is missing or empty")
        json_values.parse_object(content)
    except ValueError as error:
        raise _damaged(str(error), name, checkpoint) from error


def reader(store: ts.TensorStore, name: str, checkpoint: str) -> StartReading:
    """Returns the `PaxArray.start_reading` function of an opened array."""

    def start(index: Index) -> Callable[[], npt.NDArray[Any]]:
        future = store[index].read(order="C")
        return functools.partial(_result, future, name, checkpoint)

    return start


def _result(future: Any, name: str, checkpoint: str) -> Any:
    try:
        return future.result()
    except (ValueError, OSError) as error:
        raise read_error(error, name, checkpoint) from error


def read_error(error: Exception, name: str, checkpoint: str) -> CheckpointError:
    """Returns the error to raise for an array that TensorStore could not open or read."""
    text = str(error).split("[source locations")[0].strip()
    if _OF_STORAGE.search(text) or not _OF_FILES.search(text):
        return CheckpointReadError(f"reading {name} of {checkpoint} failed: {text}")
    if "NOT_FOUND" in text or "is missing" in text:
        text = f"a file is missing ({text})"
    return _damaged(text, name, checkpoint)


def _damaged(why: str, name: str, checkpoint: str) -> PaxDamagedError:
    return PaxDamagedError(f"{checkpoint} is not complete or is damaged: {name} can't be read: {why}. Copy it again.")


def shard_counts(chunks: Sequence[int | None], shape: Sequence[int]) -> tuple[int, ...]:
    """Returns an array's number of shards along each dimension, given the chunk sizes. Pax stores each shard as one chunk."""
    return tuple(-(-size // max(1, chunk or size)) for size, chunk in zip(shape, chunks, strict=True))
