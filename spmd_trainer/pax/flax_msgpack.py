"""Finds the arrays in a msgpack file of Flax without reading them.

Flax packs an array as an extension whose payload is (shape, dtype, bytes), and a large array as a map of flat chunks.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgpack
import numpy as np

from spmd_trainer.storage import reading

LEAVES, STRUCTURE = "flattened_state", "str_pytree_state"
_ARRAY_CODES = (1, 3)  # Flax' extension types of arrays and of NumPy scalars
_CHUNKED = "__msgpack_chunked_array__"
_WINDOW_BYTES = 1 << 16
# (kind of a value, bytes behind its header) by its first byte: constants, numbers and extensions of fixed size, ...
_FIXED_SIZES: dict[int, tuple[str, int]] = {
    0xC0: ("nil", 0),
    **dict.fromkeys((*range(0x80), *range(0xE0, 0x100), 0xC2, 0xC3), ("plain", 0)),
    **dict.fromkeys((0xCC, 0xD0), ("plain", 1)),
    **dict.fromkeys((0xCD, 0xD1), ("plain", 2)),
    **dict.fromkeys((0xCE, 0xD2, 0xCA), ("plain", 4)),
    **dict.fromkeys((0xCF, 0xD3, 0xCB), ("plain", 8)),
    **{0xD4 + i: ("extension", 1 + 2**i) for i in range(5)},
    # ... and what has its size in the first byte: maps and lists (their entries), texts.
    **{0x80 + i: ("map", i) for i in range(16)},
    **{0x90 + i: ("list", i) for i in range(16)},
    **{0xA0 + i: ("plain", i) for i in range(32)},
}
# (kind, bytes of the size itself), where the size follows the first byte.
_SIZED: dict[int, tuple[str, int]] = {
    **{code: ("plain", size) for code, size in {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}.items()},
    **{code: ("extension", size) for code, size in {0xC7: 1, 0xC8: 2, 0xC9: 4}.items()},
    **{0xDC: ("list", 2), 0xDD: ("list", 4), 0xDE: ("map", 2), 0xDF: ("map", 4)},
}


@dataclasses.dataclass(frozen=True)
class FlaxLeaf:
    """An array in a msgpack file.

    Attributes:
      shape: its shape.
      dtype: its element type.
      parts: (offset, size) in bytes of each part of its data in the file; a large array has several parts.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    parts: tuple[tuple[int, int], ...]


def walk(path: str, size: int) -> tuple[list[FlaxLeaf | None], str]:
    """Finds the leaves of a file without reading them.

    Args:
      path: the file.
      size: its size in bytes.

    Returns:
      The leaves by position, None where the state held a node without an array; and the printed structure of the state.

    Raises:
      ValueError, TypeError, KeyError, EOFError, msgpack.exceptions.UnpackException: the file has another format or is cut short.
      OSError: the file can't be read.
    """
    reader = _Reader(path, size)
    leaves: dict[int, FlaxLeaf | None] | None = None
    structure: str | None = None
    for _ in range(reader.entries("map")):
        key = reader.value()
        if key == LEAVES:
            leaves = reader.leaves()
        elif key == STRUCTURE:
            structure = str(reader.value())
        else:
            reader.skip()
    if leaves is None or structure is None or sorted(leaves) != list(range(len(leaves))):
        raise ValueError(f"{LEAVES!r} or {STRUCTURE!r} is missing")
    return [leaves[i] for i in range(len(leaves))], structure


class _Reader:
    """Reader of a file's msgpack values in order. It locates arrays without reading them."""

    def __init__(self, path: str, size: int) -> None:
        """Starts at the beginning of a file. `size`: the file's size in bytes."""
        self._path, self._size, self._at = path, size, 0
        self._window, self._window_start = b"", 0

    def _step(self, size: int) -> None:
        if self._at + size > self._size:
            raise EOFError("the file is cut short")
        self._at += size

    def _bytes(self, start: int, size: int) -> bytes:
        """Returns `size` bytes from offset `start`. Reads and keeps a window of the file at a time."""
        if not self._window_start <= start <= start + size <= self._window_start + len(self._window):
            end = min(self._size, start + max(size, _WINDOW_BYTES))
            self._window, self._window_start = reading.read(self._path, start, end), start
        return self._window[start - self._window_start :][:size]

    def _number(self, size: int) -> int:
        self._step(size)
        return int.from_bytes(self._bytes(self._at - size, size), "big")

    def _head(self) -> tuple[str, int]:
        """Steps over the header of the next value. Returns its kind, and its number of entries (map, list) or bytes (others)."""
        code = self._number(1)
        if code in _FIXED_SIZES:
            return _FIXED_SIZES[code]
        if code not in _SIZED:
            raise ValueError(f"byte {self._at - 1} ({code:#x}) is no msgpack value")
        kind, length = _SIZED[code]
        size = self._number(length)
        return kind, size + 1 if kind == "extension" else size  # an extension has its type first

    def entries(self, kind: str) -> int:
        """Steps into the next value, which must be a map or list of kind `kind`, and returns its number of entries."""
        found, size = self._head()
        if found != kind:
            raise ValueError(f"the value before byte {self._at} is no {kind}")
        return size

    def value(self) -> Any:
        """Returns the next value, a number or a text."""
        start = self._at
        self.skip()
        return msgpack.unpackb(self._bytes(start, self._at - start), strict_map_key=False)

    def skip(self) -> None:
        """Steps over the next value."""
        kind, size = self._head()
        if kind not in ("map", "list"):
            self._step(size)
            return
        for _ in range(2 * size if kind == "map" else size):
            self.skip()

    def leaves(self) -> dict[int, FlaxLeaf | None]:
        """Returns the leaves by position: Orbax writes a list, Flax a map with the positions as keys."""
        kind, size = self._head()
        if kind not in ("map", "list"):
            raise ValueError(f"the leaves before byte {self._at} are no map or list")
        return {int(self.value()) if kind == "map" else position: self.leaf() for position in range(size)}

    def leaf(self) -> FlaxLeaf | None:
        """Returns the next leaf; None for an empty map or nil."""
        start = self._at
        kind, size = self._head()
        if kind == "map":
            return self._chunked(size) if size else None
        if kind == "extension":
            return self._array(size - 1)
        if kind == "nil":
            return None
        self._at = start
        raise ValueError(f"the value at byte {start} is no array: {self.value()!r:.100}")

    def _array(self, size: int) -> FlaxLeaf:
        kind = self._number(1)
        if kind not in _ARRAY_CODES:
            raise ValueError(f"extension type {kind} is no array")
        end = self._at + size
        if self.entries("list") != 3:
            raise ValueError("an array must have shape, dtype and bytes")
        shape = tuple(self.value() for _ in range(self.entries("list")))
        dtype = _dtype(self.value())
        _, length = self._head()
        offset = self._at
        self._step(length)
        if self._at != end or length != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"an array of shape {shape} has {length} bytes")
        return FlaxLeaf(shape, dtype, ((offset, length),))

    def _chunked(self, size: int) -> FlaxLeaf:
        """Locates an array that Flax stored in chunks, as a map with `size` entries."""
        entries: dict[str, Any] = {}
        for _ in range(size):
            key = self.value()
            if key == "chunks":
                entries[key] = {int(self.value()): self.leaf() for _ in range(self.entries("map"))}
            else:
                entries[key] = self.value()
        if _CHUNKED not in entries:
            raise ValueError(f"a leaf is a map with {', '.join(map(repr, entries))}, not an array")
        chunks = [entries["chunks"][i] for i in range(len(entries["chunks"]))]
        shape = tuple(entries["shape"][str(i)] for i in range(len(entries["shape"])))
        return FlaxLeaf(shape, chunks[0].dtype, tuple(part for chunk in chunks for part in chunk.parts))


def _dtype(name: str | bytes) -> np.dtype[Any]:
    import jax.numpy as jnp

    text = name.decode() if isinstance(name, bytes) else name
    return np.dtype(jnp.bfloat16) if text in ("bfloat16", "V2") else np.dtype(jnp.dtype(text))
