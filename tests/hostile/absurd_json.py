"""JSON that others might write: nested without an end, with numbers and names that no program expects, cut off."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

_HERE = "@@here@@"
# Tried to reach: a terminal's commands, marks of direction, half a surrogate pair.
ESCAPES = ("\x1b[2J", "\x1b]0;owned\x07", "\u202e", "\x9b31m", "\x08\x08\x7f")


def absurd(rng: random.Random, document: Any) -> tuple[str, bytes, bool]:
    """Changes a document at random; returns what was done, the new file, and whether the file is no JSON any more."""
    how = rng.choice((_deep, _deep, _unclosed, _number, _number, _number, _value, _value, _bytes, _cut, _huge, _names))
    return how(rng, document)


def _deep(rng: random.Random, document: Any) -> tuple[str, bytes, bool]:
    depth = rng.choice((900, 2_000, 20_000, 200_000, 2_000_000))
    opened, closed = rng.choice((("[", "]"), ('{"a":', "}")))
    inner = "1" if opened != "[" else ""
    text = opened * depth + inner + closed * depth
    if rng.random() < 0.3:
        return f"{depth:,} brackets alone", text.encode(), False
    return f"{depth:,} brackets inside", _placed(rng, document, text), False


def _unclosed(rng: random.Random, document: Any) -> tuple[str, bytes, bool]:
    depth = rng.choice((1, 990, 200_000))
    return f"{depth:,} brackets, not closed", (rng.choice(("[", '{"a":')) * depth).encode(), True


def _number(rng: random.Random, document: Any) -> tuple[str, bytes, bool]:
    digits = rng.choice((4_000, 4_400, 1_000_000))
    given = (
        "1e400",
        "-1e400",
        "NaN",
        "-Infinity",
        "1e308",
        "-1",
        "0",
        "0.5",
        "1e9",
        "1000000000",
        "-0.0",
        "1e-400",
        "2e0",
    )
    text = rng.choice((*given, str(2**31), str(2**63), str(2**64), str(-(2**63) - 1), "9" * digits))
    return f"{text[:24]} inside", _placed(rng, document, text, numbers=True), False


def _value(rng: random.Random, document: Any) -> tuple[str, bytes, bool]:
    text = rng.choice(
        ("null", "true", '""', '"x"', "[]", "{}", "[[]]", '{"a": 1}', "[null]", '"\\ud800"', '"\\u0000"', "[1e400]")
    )
    return f"{text} inside", _placed(rng, document, text), False


def _bytes(rng: random.Random, document: Any) -> tuple[str, bytes, bool]:
    content = json.dumps(document).encode()
    what, text = rng.choice(
        (
            ("empty", b""),
            ("zeros", bytes(1_000)),
            ("not UTF-8", b"\xff\xfe" + content),
            ("invalid UTF-8 inside", content[:20] + b"\xc3\x28" + content[20:]),
            ("two documents", content + content),
            ("a string", b'"x"'),
            ("a number", b"1e400"),
            ("null", b"null"),
        )
    )
    return what, text, what not in ("a string", "a number", "null")


def _cut(rng: random.Random, document: Any) -> tuple[str, bytes, bool]:
    content = json.dumps(document).encode()
    end = rng.randrange(len(content))
    return f"cut off at byte {end}", content[:end], True


def _huge(rng: random.Random, document: Any) -> tuple[str, bytes, bool]:
    count = rng.choice((100_000, 1_000_000))
    what, text = rng.choice(
        (
            ("an array of numbers", "[" + "1," * count + "1]"),
            ("an object", "{" + ",".join(f'"{i}":0' for i in range(count // 2)) + "}"),
            ("a string of 40 MB", '"' + "x" * 40_000_000 + '"'),
            ("repeated keys", "{" + '"a":0,' * count + '"a":1}'),
        )
    )
    return f"{what}, {count:,}", _placed(rng, document, text), False


def _names(rng: random.Random, document: Any) -> tuple[str, bytes, bool]:
    """Writes commands of terminals into names and values."""
    escape = rng.choice(ESCAPES)
    places = [found for found in _places(document) if found[0]]
    path, _ = rng.choice(places)
    if rng.random() < 0.5:
        return f"{escape!r} as a value", _placed(rng, document, json.dumps(f"a{escape}b")), False
    changed = json.loads(json.dumps(document))
    holder = _at(changed, path[:-1])
    if isinstance(holder, dict):
        holder[f"{path[-1]}{escape}"] = holder.pop(path[-1])
    else:
        holder[path[-1]] = escape
    return f"{escape!r} in a name", json.dumps(changed, ensure_ascii=False).encode(), False


def _placed(rng: random.Random, document: Any, text: str, *, numbers: bool = False) -> bytes:
    """Puts a text in the place of one value of a document, of a number if there are any and `numbers` says so."""
    found = [path for path, value in _places(document) if path]
    if numbers:
        found = [
            p for p, v in _places(document) if p and isinstance(v, int | float) and not isinstance(v, bool)
        ] or found
    if not found:
        return text.encode()
    path = rng.choice(found)
    changed = json.loads(json.dumps(document))
    _at(changed, path[:-1])[path[-1]] = _HERE
    return json.dumps(changed).replace(f'"{_HERE}"', text).encode()


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    yield path, value
    inside: Any = ()
    if isinstance(value, dict):
        inside = value.items()
    elif isinstance(value, list):
        inside = enumerate(value)
    for key, entry in inside:
        yield from _places(entry, (*path, key))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value
