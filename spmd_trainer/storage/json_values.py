"""Parses JSON that other programs wrote or that may be damaged on a disk. All such JSON is parsed by this module.

Limits on size, nesting and numbers keep such JSON from causing a traceback or exhausting the memory.
"""

from __future__ import annotations

import collections
import json
import math
import os
import re
from collections.abc import Sequence
from typing import Any

from spmd_trainer.sharding.messages import shortened
from spmd_trainer.storage import backends, reading

# The largest JSON files are tokenizers of 35 MB, in which objects and lists are nested 10 deep and have 2 million values.
MOST_BYTES = 128 * 2**20
MOST_DEPTH = 64
# Three bytes of JSON can be a list, which takes 80 bytes of memory.
MOST_VALUES = 8_000_000
# Enough for integers of 128 bits, as in states of random number generators. Python converts these to floats without overflow.
MOST_DIGITS = 39
LARGEST_INTEGER = 2**63 - 1
# The limit of NumPy.
MOST_DIMENSIONS = 64
# Only longer texts can have more values than the limit.
_FEW_BYTES = MOST_VALUES
_STRING = r'"(?:[^"\\]|\\.)*"'
_STRINGS = re.compile(_STRING, re.DOTALL)
_TOKENS = re.compile(rf"{_STRING}|[\[{{\]}}]", re.DOTALL)
_SHOWN = 100


class _Refused:
    """Placeholder in a parsed value for a refused number, so that the error can name the keys that lead to it."""

    def __init__(self, text: str):
        self.text = text


def content_of(path: str | os.PathLike[str]) -> bytes:
    """Returns a file's bytes for `parse`. If a local file is too large, returns just enough bytes for `parse` to refuse it.

    Raises:
      OSError: the file can't be read.
    """
    end = None if backends.scheme_of(path) is not None else MOST_BYTES + 1
    return reading.read(os.fspath(path), 0, end)


def parse(content: bytes | str, *, finite: bool = True, unique: bool = False) -> Any:
    """Returns the value of a JSON text.

    Args:
      content: the text.
      finite: True refuses NaN and infinities. False accepts them, because Python writes them into data rows and metrics.
      unique: True refuses an object that has a key twice. False keeps the key's last value, as `json` does.

    Raises:
      ValueError: the text is not JSON, exceeds a limit on bytes, values, nesting or digits, or has a number or key that `finite`
        or `unique` refuses. The message is a clause that names the field, e.g. 'step is 1e400, which is not finite'.
    """
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes, the most that are read of such a file")
    # Bytes are decoded as `json` does it.
    text = content if isinstance(content, str) else content.decode(json.detect_encoding(content), "surrogatepass")
    if len(text) > _FEW_BYTES and (count := _most_values(text)) > MOST_VALUES:
        raise ValueError(f"it has up to {count} values; {MOST_VALUES} is the most that are read of such a file")
    refused: list[_Refused] = []

    def refuse(text: str) -> _Refused:
        refused.append(_Refused(text))
        return refused[-1]

    def whole(text: str) -> int | _Refused:
        return int(text) if len(text.removeprefix("-")) <= MOST_DIGITS else refuse(text)

    def real(text: str) -> float | _Refused:
        value = float(text)
        return value if math.isfinite(value) or not finite else refuse(text)

    try:
        value = json.loads(
            text, parse_int=whole, parse_float=real, parse_constant=real, object_pairs_hook=_once if unique else None
        )
    except RecursionError:
        raise ValueError(_too_deep(text)) from None
    # No value is nested deeper than the text has brackets.
    if text.count("[") + text.count("{") > MOST_DEPTH and _depth_exceeds(value):
        raise ValueError(_too_deep(text))
    if refused:
        first = refused[0]
        reason = f"has more than {MOST_DIGITS} digits" if first.text.lstrip("-").isdigit() else "is not finite"
        raise ValueError(f"{_named(_keys_of(value, first))} is {shortened(first.text, _SHOWN)}, which {reason}")
    return value


def parse_object(content: bytes | str, *, finite: bool = True, unique: bool = False) -> dict[str, Any]:
    """Like `parse`, for a text that must be a JSON object: any other value raises ValueError too."""
    value = parse(content, finite=finite, unique=unique)
    if not isinstance(value, dict):
        raise ValueError(f"it holds {type(value).__name__}, not an object")
    return value


def lines(text: str) -> list[str]:
    """Splits a JSON Lines text into its lines. `str.splitlines` would also split at U+2028 and the like, inside strings."""
    return text.removesuffix("\n").split("\n") if text else []


def integer(value: object, name: str, *, least: int = 0) -> int:
    """Returns `value`, which must be a whole number from `least` to `LARGEST_INTEGER`. `name`: the field's name, for messages.

    Raises:
      ValueError: `value` is out of range or not a whole number, e.g. true or 2.0.
    """
    if type(value) is not int or not least <= value <= LARGEST_INTEGER:
        raise ValueError(
            f"{name} is {shortened(repr(value), _SHOWN)}, not a whole number from {least} to {LARGEST_INTEGER}"
        )
    return value


def shape(value: object, name: str) -> tuple[int, ...]:
    """Returns `value`, which must be the shape of an array, as a tuple. `name`: the field's name, for messages.

    Raises:
      ValueError: `value` is not a list of whole numbers, or has more than `MOST_DIMENSIONS` dimensions or too many elements.
    """
    if not isinstance(value, list) or len(value) > MOST_DIMENSIONS:
        raise ValueError(
            f"{name} is {shortened(repr(value), _SHOWN)}, not a list of up to {MOST_DIMENSIONS} whole numbers"
        )
    sizes = tuple(integer(size, f"{name}[{number}]") for number, size in enumerate(value))
    integer(math.prod(sizes), f"the product of {name}")
    return sizes


def _once(entries: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(entries)
    if len(found) < len(entries):
        counted = collections.Counter(key for key, _ in entries)
        raise ValueError(
            f"{shortened(repr(max(counted, key=counted.__getitem__)), _SHOWN)} stands in it more than once"
        )
    return found


def _most_values(text: str) -> int:
    """Returns an upper bound on the number of values in a JSON text: the number of its commas and opening brackets."""
    count = sum(map(text.count, ",[{"))
    return count if count <= MOST_VALUES else sum(map(_STRINGS.sub("", text).count, ",[{"))


def _depth_exceeds(value: Any) -> bool:
    level = [[value]]
    for _ in range(MOST_DEPTH + 2):
        level = [
            child
            for part in level
            for child in (part.values() if type(part) is dict else part)
            if type(child) in (dict, list)
        ]
        if not level:
            return False
    return True


def _too_deep(text: str) -> str:
    """Returns the error message for a text nested too deeply. It names the top-level field that nests too deeply."""
    depth, field = 0, ""
    for token in _TOKENS.finditer(text):
        if token[0] in "[{":
            depth += 1
            if depth > MOST_DEPTH:
                break
        elif token[0] in "]}":
            depth -= 1
        elif depth == 1:
            field = token[0]
    where = f"the field {shortened(field, _SHOWN)}" if field and depth else "it"
    return f"{where} nests lists and objects deeper than {MOST_DEPTH}"


def _keys_of(value: Any, wanted: _Refused) -> list[str | int] | None:
    """Returns the keys and indices that lead to `wanted` in `value`; None if a later entry with the same key replaced it."""
    if value is wanted:
        return []
    entries = value.items() if type(value) is dict else enumerate(value) if type(value) is list else ()
    for key, child in entries:
        if (child is wanted or type(child) in (dict, list)) and (below := _keys_of(child, wanted)) is not None:
            return [key, *below]
    return None


def _named(keys: Sequence[str | int] | None) -> str:
    """Formats keys and indices for messages, e.g. as layers[3].size."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys or ()).removeprefix(".")
    return shortened(text if text.isprintable() else repr(text), _SHOWN) or "a number"
