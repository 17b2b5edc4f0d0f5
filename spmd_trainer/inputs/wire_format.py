"""Parses serialized tf.train.Examples without the protobuf library, and whole batches at once if their byte layouts
agree.

See https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

# Wire types.
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
# Field numbers: Example.features, Features.feature, and the key and the value of a map's entry.
_FEATURES, _FEATURE, _KEY, _VALUE = 1, 1, 1, 2
# Field numbers of Feature: the kinds of its list.
BYTES_LIST, FLOAT_LIST, INT64_LIST = 1, 2, 3
# Field number of the values in a list of each kind.
LIST_VALUE = 1


class Field(NamedTuple):
    """A field of a message.

    Attributes:
      number: its number.
      kind: its wire type.
      begin, end: bytes of its value, without tag and length.
    """

    number: int
    kind: int
    begin: int
    end: int


class FeatureList(NamedTuple):
    """The values of one feature of an Example.

    Attributes:
      name: the feature's key, UTF-8.
      kind: BYTES_LIST, FLOAT_LIST or INT64_LIST; None for a feature without a list.
      begin, end: bytes of the list's message.
    """

    name: bytes
    kind: int | None
    begin: int
    end: int


def fields(data: bytes, begin: int = 0, end: int | None = None) -> Iterator[Field]:
    """Yields the fields of the message in `data[begin:end]`.

    Raises:
      ValueError: it is not a message.
    """
    place, end = begin, len(data) if end is None else end
    while place < end:
        tag, place = varint(data, place, end)
        kind, start = tag & 7, place
        if kind == VARINT:
            _, place = varint(data, place, end)
        elif kind == BYTES:
            size, start = varint(data, place, end)
            place = start + size
        elif kind in (FIXED64, FIXED32):
            place += 8 if kind == FIXED64 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if place > end:
            raise ValueError(f"the field at byte {start} is cut off")
        yield Field(tag >> 3, kind, start, place)


def example_features(data: bytes) -> Iterator[FeatureList]:
    """Yields the features of a serialized tf.train.Example.

    Raises:
      ValueError: it is not a tf.train.Example.
    """
    for features in _messages(data, 0, len(data), _FEATURES):
        for entry in _messages(data, features.begin, features.end, _FEATURE):
            parts = {field.number: _message(field) for field in fields(data, entry.begin, entry.end)}
            key, value = parts.get(_KEY), parts.get(_VALUE)
            name = data[key.begin : key.end] if key else b""
            lists = [_message(field) for field in fields(data, value.begin, value.end)] if value else []
            if lists:
                yield FeatureList(name, lists[-1].number, lists[-1].begin, lists[-1].end)
            else:
                yield FeatureList(name, None, entry.end, entry.end)


def varint(data: bytes, place: int, end: int) -> tuple[int, int]:
    """Reads the varint at `place`; returns it and the place after it.

    Raises:
      ValueError: it continues after `end`, or is too large.
    """
    value, shift, begin = 0, 0, place
    while place < end and shift < 64:
        byte = data[place]
        value, place, shift = value | (byte & 0x7F) << shift, place + 1, shift + 7
        if byte < 0x80:
            return value, place
    raise ValueError(f"a number at byte {begin} is cut off")


def _messages(data: bytes, begin: int, end: int, number: int) -> Iterator[Field]:
    return (_message(field) for field in fields(data, begin, end) if field.number == number)


def _message(field: Field) -> Field:
    if field.kind != BYTES:
        raise ValueError("found a number instead of a message")
    return field


# TensorFlow parses batches with more distinct sizes than 1 in this many examples: layouts would fit too few.
_ALIKE = 8
# Most layouts; with more, TensorFlow parses all further batches.
_MOST_LAYOUTS = 64
# In each byte of a varint: the continuation bit, and the bits of the number.
_GOES_ON, _DIGITS = 0x80, 0x7F
# Bytes of the largest varint.
_MOST_BYTES = 10


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Values to find in each example.

    Attributes:
      name: name of the array.
      kind: FLOAT_LIST, INT64_LIST or BYTES_LIST.
      shape: shape of one example's values.
      dtype: dtype of the values: float32, int64 or, for bytes, that of the serialized array, little endian.
    """

    name: str
    kind: int
    shape: tuple[int, ...]
    dtype: str


class Layouts:
    """Byte layouts of the examples seen so far."""

    def __init__(self, wanted: Mapping[str, Wanted]):
        """`wanted` maps a feature's key to the values to find."""
        self._wanted = {key.encode(): one for key, one in wanted.items()}
        self._known: dict[int, list[_Layout]] = collections.defaultdict(list)
        self._count = 0
        self._gave_up = False

    def parse(self, serialized: Sequence[bytes]) -> dict[str, np.ndarray] | None:
        """Parses serialized examples to arrays [B, *shape] by name; None if TensorFlow must parse them or find the
        error.
        """
        if self._gave_up:
            return None
        groups: dict[int, list[int]] = collections.defaultdict(list)
        for row, example in enumerate(serialized):
            groups[len(example)].append(row)
        if len(groups) * _ALIKE > len(serialized) + _ALIKE:
            return None
        found = {one.name: np.empty((len(serialized), *one.shape), one.dtype) for one in self._wanted.values()}
        for size, members in groups.items():
            rows = np.array(members)
            table = np.frombuffer(b"".join([serialized[row] for row in members]), np.uint8).reshape(len(rows), size)
            for layout, fitting in self._split(table):
                if layout is None:
                    return None
                chosen = table if len(fitting) == len(rows) else table[fitting]
                for name, values in layout.values(chosen):
                    found[name][rows[fitting]] = values
        return found

    def _split(self, table: np.ndarray) -> Iterator[tuple[_Layout | None, np.ndarray]]:
        """Groups the rows of a table [B, bytes] by layout; None for rows without one."""
        left = np.arange(len(table))
        known = self._known[table.shape[1]]
        for layout in known:
            fits = layout.fits(table[left] if len(left) < len(table) else table)
            if fits.any():
                yield layout, left[fits]
                left = left[~fits]
            if not len(left):
                return
        while len(left):
            learned = self._learn(table[left[0]].tobytes())
            if learned is None:
                yield None, left
                return
            fits = learned.fits(table[left])
            yield learned, left[fits]
            left = left[~fits]

    def _learn(self, example: bytes) -> _Layout | None:
        self._gave_up = self._count >= _MOST_LAYOUTS
        if self._gave_up:
            return None
        try:
            layout = _layout_of(example, self._wanted)
        except ValueError:
            return None
        if layout is not None:
            self._known[len(example)].append(layout)
            self._count += 1
        return layout


class _Span(NamedTuple):
    """Place of a feature's values in an example.

    Attributes:
      wanted: the values.
      begin, end: their bytes.
      numbers: for varints: first byte of each, counted from `begin`; otherwise None.
      shifts: for varints: left shift of each byte's bits, uint64 [bytes]; otherwise None.
    """

    wanted: Wanted
    begin: int
    end: int
    numbers: np.ndarray | None = None
    shifts: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Place of all values in an example.

    Attributes:
      example: an example with this layout, uint8 [bytes].
      mask: the bits that all examples with this layout share, uint8 [bytes].
      spans: the wanted features.
    """

    example: np.ndarray
    mask: np.ndarray
    spans: tuple[_Span, ...]

    def fits(self, table: np.ndarray) -> np.ndarray:
        """Marks the rows of a table [B, bytes] that have this layout, bool [B]."""
        fitting: np.ndarray = ~((table ^ self.example) & self.mask).any(axis=1)
        return fitting

    def values(self, table: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the name and the values [B, *shape] of each wanted feature of examples with this layout."""
        for span in self.spans:
            cut = np.ascontiguousarray(table[:, span.begin : span.end])
            if span.numbers is None or span.shifts is None:
                values = cut.view(np.dtype(span.wanted.dtype).newbyteorder("<"))
            else:
                digits = (cut & np.uint8(_DIGITS)).astype(np.uint64) << span.shifts
                values = np.bitwise_or.reduceat(digits, span.numbers, axis=1).view(np.int64)
            yield span.wanted.name, values.reshape(len(table), *span.wanted.shape)


def _layout_of(example: bytes, wanted: Mapping[bytes, Wanted]) -> _Layout | None:
    """Finds the layout of an example; None if a feature is missing or has another kind or size.

    Raises:
      ValueError: it is not a tf.train.Example.
    """
    table = np.frombuffer(example, np.uint8)
    mask = np.full(len(example), 0xFF, np.uint8)
    spans: dict[bytes, _Span] = {}
    for feature in example_features(example):
        parts = [
            part
            for part in fields(example, feature.begin, feature.end)
            if (part.number, part.kind) == (LIST_VALUE, BYTES)
        ]
        for part in parts:
            mask[part.begin : part.end] = 0
        if feature.name not in wanted:
            continue
        one = wanted[feature.name]
        if feature.name in spans or feature.kind != one.kind or len(parts) != 1:
            return None
        (part,) = parts
        span = _Span(one, part.begin, part.end)
        if one.kind == INT64_LIST:
            mask[part.begin : part.end] = _GOES_ON
            span = _with_numbers(span, table[part.begin : part.end])
        count = (part.end - part.begin) / np.dtype(one.dtype).itemsize if span.numbers is None else len(span.numbers)
        if count != np.prod(one.shape, dtype=np.int64):
            return None
        spans[feature.name] = span
    return _Layout(table, mask, tuple(spans.values())) if len(spans) == len(wanted) else None


def _with_numbers(span: _Span, varints: np.ndarray) -> _Span:
    """Completes the span of a list of varints, uint8 [bytes]. Raises ValueError if it is malformed."""
    lasts = np.flatnonzero(varints < _GOES_ON)
    if not len(varints) or not len(lasts) or lasts[-1] != len(varints) - 1:
        raise ValueError("the last number of a list is cut off")
    starts = np.concatenate([[0], lasts[:-1] + 1])
    sizes = lasts + 1 - starts
    if sizes.max() > _MOST_BYTES:
        raise ValueError(f"a number of {sizes.max()} bytes")
    shifts = 7 * (np.arange(len(varints)) - np.repeat(starts, sizes))
    return span._replace(numbers=starts, shifts=shifts.astype(np.uint64))
