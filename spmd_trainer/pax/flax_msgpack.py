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
# Bytes behind the header of a value, by its first byte: numbers and extensions of fixed size, ...
_FIXED_SIZES: dict[int, int] = {
    **dict.fromkeys((0xCC, 0xD0), 1),
    **dict.fromkeys((0xCD, 0xD1), 2),
    **dict.fromkeys((0xCE, 0xD2, 0xCA), 4),
    **dict.fromkeys((0xCF, 0xD3, 0xCB), 8),
    **{0xD4 + i: 1 + 2**i for i in range(5)},
}
# ... and bytes of the length itself, of binary values, extensions and texts.
_LENGTH_SIZES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}


@dataclasses.dataclass(frozen=True)
class FlaxLeaf:
    """An array in a msgpack file.

    Attributes:
      shape: its shape.
      dtype: its element type.
      parts: (offset, size) of its bytes in the file; several of a large array.
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
      ValueError, TypeError, KeyError, EOFError, msgpack.exceptions.UnpackException: it is no such file, or it is cut short.
      OSError: it can't be read.
    """
    reader = _Reader(path, size)
    leaves: dict[int, FlaxLeaf | None] | None = None
    structure: str | None = None
    for _ in range(reader.map_size()):
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
    """Steps over msgpack values, and reads those that are not arrays."""

    def __init__(self, path: str, size: int) -> None:
        """Starts at the beginning of a file of this size."""
        self._path, self._size, self._at = path, size, 0
        self._window, self._window_start = b"", 0

    def _step(self, size: int) -> None:
        if self._at + size > self._size:
            raise EOFError("the file is cut short")
        self._at += size

    def _bytes(self, start: int, size: int) -> bytes:
        """Returns bytes of the file; reads a window of it at a time."""
        if not self._window_start <= start <= start + size <= self._window_start + len(self._window):
            end = min(self._size, start + max(size, _WINDOW_BYTES))
            self._window, self._window_start = reading.read(self._path, start, end), start
        return self._window[start - self._window_start :][:size]

    def _number(self, size: int) -> int:
        self._step(size)
        return int.from_bytes(self._bytes(self._at - size, size), "big")

    def _code(self) -> int:
        return self._number(1)

    def map_size(self) -> int:
        """Returns the number of entries of the map that comes next; its keys and values follow."""
        code = self._code()
        if code >> 4 == 0x8:
            return code & 0xF
        if code in (0xDE, 0xDF):
            return self._number(2 if code == 0xDE else 4)
        raise ValueError(f"byte {self._at - 1} starts no map")

    def value(self) -> Any:
        """Returns the number or text that comes next."""
        start = self._at
        self.skip()
        return msgpack.unpackb(self._bytes(start, self._at - start), strict_map_key=False)

    def skip(self) -> None:
        """Steps over the value that comes next."""
        code = self._code()
        if code <= 0x7F or code >= 0xE0 or code in (0xC0, 0xC2, 0xC3):
            return
        if 0x80 <= code <= 0x9F or code in (0xDC, 0xDD, 0xDE, 0xDF):
            self._at -= 1
            for _ in range(self._entries()):
                self.skip()
            return
        self._step(self._payload(code))

    def _entries(self) -> int:
        """Returns how many values the map or list that comes next holds, keys included."""
        code = self._code()
        if code >> 4 == 0x9:
            return code & 0xF
        if code in (0xDC, 0xDD):
            return self._number(2 if code == 0xDC else 4)
        self._at -= 1
        return 2 * self.map_size()

    def _payload(self, code: int) -> int:
        """Returns the number of bytes that follow a header, after reading the rest of the header."""
        if code >> 5 == 0x5:
            return code & 0x1F
        if code in _FIXED_SIZES:
            return _FIXED_SIZES[code]
        if code in _LENGTH_SIZES:
            size: int = self._number(_LENGTH_SIZES[code])
            return size + 1 if code in (0xC7, 0xC8, 0xC9) else size  # an extension has its type first
        raise ValueError(f"byte {self._at - 1} ({code:#x}) is no msgpack value")

    def leaves(self) -> dict[int, FlaxLeaf | None]:
        """Returns the leaves by position: Orbax writes a list, Flax a map with the positions as keys."""
        start = self._at
        code = self._code()
        self._at = start
        if code >> 4 == 0x9 or code in (0xDC, 0xDD):
            return {position: self.leaf() for position in range(self._entries())}
        return {int(self.value()): self.leaf() for _ in range(self.map_size())}

    def leaf(self) -> FlaxLeaf | None:
        """Returns the leaf that comes next; None for an empty map or nil."""
        start = self._at
        code = self._code()
        if code == 0xC0:
            return None
        if code >> 4 == 0x8 or code in (0xDE, 0xDF):
            self._at = start
            return self._chunked()
        if code in (0xC7, 0xC8, 0xC9, 0xD4, 0xD5, 0xD6, 0xD7, 0xD8):
            return self._array(self._payload(code) - 1)
        self._at = start
        return self._scalar(start)

    def _array(self, size: int) -> FlaxLeaf:
        kind = self._code()
        if kind not in _ARRAY_CODES:
            raise ValueError(f"extension type {kind} is no array")
        end = self._at + size
        if self._entries() != 3:
            raise ValueError("an array must have shape, dtype and bytes")
        shape = tuple(self.value() for _ in range(self._entries()))
        dtype = _dtype(self.value())
        code = self._code()
        length = self._payload(code)
        offset = self._at
        self._step(length)
        if self._at != end or length != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"an array of shape {shape} has {length} bytes")
        return FlaxLeaf(shape, dtype, ((offset, length),))

    def _chunked(self) -> FlaxLeaf | None:
        """Reads an array that Flax stored in chunks; returns None for an empty map."""
        size = self.map_size()
        if not size:
            return None
        entries: dict[str, Any] = {}
        for _ in range(size):
            key = self.value()
            if key == "chunks":
                entries[key] = {int(self.value()): self.leaf() for _ in range(self.map_size())}
            else:
                entries[key] = self.value()
        if _CHUNKED not in entries:
            raise ValueError(f"a leaf is a map with {', '.join(map(repr, entries))}, not an array")
        chunks = [entries["chunks"][i] for i in range(len(entries["chunks"]))]
        shape = tuple(entries["shape"][str(i)] for i in range(len(entries["shape"])))
        return FlaxLeaf(shape, chunks[0].dtype, tuple(part for chunk in chunks for part in chunk.parts))

    def _scalar(self, start: int) -> FlaxLeaf:
        raise ValueError(f"the value at byte {start} is no array: {self.value()!r:.100}")


def _dtype(name: str | bytes) -> np.dtype[Any]:
    import jax.numpy as jnp

    text = name.decode() if isinstance(name, bytes) else name
    return np.dtype(jnp.bfloat16) if text in ("bfloat16", "V2") else np.dtype(jnp.dtype(text))
