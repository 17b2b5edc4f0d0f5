"""Protocol buffers without their library: where the values of a serialized tf.train.Example are.

See https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

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
      begin, end: the bytes of its value, without tag and length.
    """

    number: int
    kind: int
    begin: int
    end: int


class FeatureList(NamedTuple):
    """The values of one feature of an Example.

    Attributes:
      name: the feature's key, UTF-8.
      kind: BYTES_LIST, FLOAT_LIST or INT64_LIST; None if the feature has no list.
      begin, end: the bytes of the list's message.
    """

    name: bytes
    kind: int | None
    begin: int
    end: int


def fields(data: bytes, begin: int = 0, end: int | None = None) -> Iterator[Field]:
    """Yields the fields of a message.

    Args:
      data: bytes that hold the message.
      begin, end: where it stands in `data`; the end None is that of `data`.

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
    """Returns the number at a place, and the place after it.

    Raises:
      ValueError: it goes on after `end`, or is too large.
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
        raise ValueError("a number stands where a message should be")
    return field
