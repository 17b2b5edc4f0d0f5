"""Reads stored tensors onto a mesh. Each process reads only its own devices' shards, block by block, and transposes them."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding

from spmd_trainer.checkpointing.shards import Bounds, ReadShard, logical_bounds, place
from spmd_trainer.hf.errors import HfError
from spmd_trainer.hf.safetensors_file import Tensor
from spmd_trainer.hf.tensor_names import Piece, Variable
from spmd_trainer.sharding.variables import VariableSpec

# A block of this many bytes stays in the CPU cache between reading and transposing.
_BLOCK_BYTES = 1 << 20
# Maximum bytes of variables that are being read at the same time. A larger variable is read alone.
_AHEAD_BYTES = 32 << 20
# JAX uses the memory of a NumPy array without a copy if its address is a multiple of this number of bytes.
_ALIGNMENT = 64
_MAX_THREADS = 8
# Each time this many bytes were placed, memory that the C library kept when it was freed is returned to the system.
_TRIM_BYTES = 512 << 20


@dataclasses.dataclass(frozen=True)
class _Target:
    """The part of a shard that one stored tensor fills. Dimensions are named by letters, see `families.family`.

    Attributes:
      name: name of the tensor, for messages.
      array: a view of this part of the shard.
      bounds: {letter: (start, stop)}: the shard's range of indices in each dimension of the variable, without padding.
    """

    name: str
    array: npt.NDArray[Any]
    bounds: Mapping[str, tuple[int, int]]

    def copy(self, block: npt.NDArray[Any], limits: Mapping[str, tuple[int, int]], order: Sequence[str]) -> None:
        """Copies those values of a block that belong to the shard into the shard.

        Args:
          block: a part of the tensor, with its dimensions in the variable's order.
          limits: {letter: (start, stop)}: the range of indices that the block covers; lacks dimensions that it covers fully.
          order: the letters of the block's dimensions.
        """
        here, there = [], []
        for letter in order:
            start, stop = self.bounds[letter]
            first, last = limits.get(letter, (0, stop))
            begin, end = max(start, first), min(stop, last)
            if begin >= end:
                return
            here.append(slice(begin - first, end - first))
            there.append(slice(begin - start, end - start))
        copy_in_range(self.array[tuple(there)], block[tuple(here)], self.name)


def copy_in_range(target: npt.NDArray[Any], values: npt.NDArray[Any], name: str) -> None:
    """Copies floating-point values into an array of the same shape, and converts them to its dtype.

    Args:
      target: the array to copy to.
      values: the values to copy.
      name: name of the tensor, for the error message.

    Raises:
      HfError: finite values are out of the range of the target's dtype.
    """
    with np.errstate(over="ignore"):
        np.copyto(target, values, casting="unsafe")
    if _max_exponent(target.dtype) >= _max_exponent(values.dtype):
        return
    lost = np.isinf(target) & np.isfinite(values)
    if lost.any():
        largest = float(np.abs(values[lost].astype(np.float64)).max())
        limit = float(ml_dtypes.finfo(target.dtype).max)
        raise HfError(
            f"{name} has the value {largest:g}, and {target.dtype.name} ends at {limit:g}; use bfloat16 or float32"
        )


@functools.cache
def _max_exponent(dtype: np.dtype[Any]) -> int:
    return int(ml_dtypes.finfo(dtype).maxexp)


def read_onto_mesh(
    wanted: Mapping[str, VariableSpec], source: Mapping[str, Variable], tensors: Mapping[str, Tensor], mesh: Mesh
) -> dict[str, jax.Array]:
    """Reads variables onto a mesh. Each process reads each shard of its devices once. Apart from the arrays on the devices, it
    keeps at most 32 MiB of shards in host memory at a time, or the shards of one variable if these are larger.

    Args:
      wanted: the model's variables by path.
      source: the variables with their tensors, by the same paths. Floating-point values are converted to the model's dtypes.
      tensors: the stored tensors by name.
      mesh: the mesh.

    Returns:
      {path: array at its padded shape}, with zeros in the padding.

    Raises:
      HfDamagedError, CheckpointReadError: a tensor can't be read.
    """
    with concurrent.futures.ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:

        def start(path: str, spec: VariableSpec, sharding: NamedSharding) -> ReadShard:
            """Allocates the shards of a variable, and starts filling them. Returns a function that waits for a shard."""
            shape, held = sharding.shard_shape(spec.padded_shape), set(logical_bounds(spec, sharding).values())
            shards = {bounds: _shard(shape, bounds, spec.dtype) for bounds in held}
            blocks = [
                pool.submit(_fill, tensors[piece.name], piece, first, last, targets)
                for piece in source[path].pieces
                if (targets := _targets(piece, shards))
                for first, last in _blocks(tensors[piece.name], piece, targets)
            ]

            def read(bounds: Bounds) -> npt.NDArray[Any]:
                for block in blocks:
                    block.result()
                return shards[bounds]

            return read

        return place(wanted, mesh, start, ahead_bytes=_AHEAD_BYTES, trim_bytes=_TRIM_BYTES)


def _blocks(tensor: Tensor, piece: Piece, targets: Sequence[_Target]) -> Iterator[tuple[int, int]]:
    """Yields ranges [first, last) of the dimension `piece.outermost`, of about 1 MiB each, which together cover the targets."""
    outer = piece.outermost
    begin, end = piece.rows(0, 1)
    step = max(1, _BLOCK_BYTES // max(1, (end - begin) * tensor.row_bytes))
    first = min(target.bounds[outer][0] for target in targets)
    last = max(target.bounds[outer][1] for target in targets)
    for start in range(first, last, step):
        yield start, min(start + step, last)


def _fill(tensor: Tensor, piece: Piece, first: int, last: int, targets: Sequence[_Target]) -> None:
    block = piece.of_rows(tensor.read_rows(*piece.rows(first, last)))
    for target in targets:
        target.copy(block, {piece.outermost: (first, last)}, piece.order)


def _targets(piece: Piece, shards: Mapping[Bounds, npt.NDArray[Any]]) -> list[_Target]:
    """Returns, for each shard that overlaps with a tensor, the part that the tensor fills."""
    found = []
    depth = len(piece.leading)
    for bounds, shard in shards.items():
        if any(not start <= index < stop for index, (start, stop) in zip(piece.leading, bounds, strict=False)):
            continue
        index = tuple(i - start for i, (start, _) in zip(piece.leading, bounds, strict=False))
        inside = dict(zip(piece.order, bounds[depth:], strict=True))
        if all(start < stop for start, stop in inside.values()):
            found.append(_Target(piece.name, shard[index], inside))
    return found


def _shard(shape: tuple[int, ...], bounds: Bounds, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Allocates a shard, aligned so that JAX on a CPU uses it without a copy. Fills it with zeros if it has padding."""
    is_filled = shape == tuple(stop - start for start, stop in bounds)
    size = math.prod(shape) * dtype.itemsize
    memory = (np.empty if is_filled else np.zeros)(size + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return memory[first : first + size].view(dtype).reshape(shape)
