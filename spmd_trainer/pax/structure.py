"""Parses the structure of a state as JAX prints it: PyTreeDef(CustomNode(TrainState[()], [*, {'params': {'w': *}}, [], ()]))."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

_QUOTES = ("'", '"')
_FIELDS = {"TrainState": ("step", "mdl_vars", "opt_states", "extra_state")}
# Texts, numbers and names, and every other character by itself.
_TOKEN = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[\w.]+|.""")


def structure_paths(text: str) -> list[str] | None:
    """Returns the paths of the leaves of a printed PyTreeDef, or None if it can't be understood.

    The fields of a named tuple are not printed; they are written as positions.
    """
    try:
        parser = _Structure(text)
        paths = list(parser.leaves(""))
        parser.expect(")")
        return paths
    except (ValueError, IndexError, SyntaxError):
        return None


class _Structure:
    """Parses a printed PyTreeDef."""

    def __init__(self, text: str) -> None:
        """Starts behind 'PyTreeDef('."""
        prefix = "PyTreeDef("
        if not text.startswith(prefix):
            raise ValueError("no PyTreeDef")
        self._tokens = [m[0] for m in _TOKEN.finditer(text[len(prefix) :]) if not m[0].isspace()]
        self._at = 0

    def _next(self) -> str:
        self._at += 1
        return self._tokens[self._at - 1]

    def _peek(self) -> str:
        return self._tokens[self._at]

    def expect(self, token: str) -> None:
        """Steps over a token.

        Raises:
          ValueError: another one comes.
        """
        if self._next() != token:
            raise ValueError(f"{token!r} expected")

    def leaves(self, path: str) -> Iterator[str]:
        """Yields the paths of the leaves of the node that comes next."""
        token = self._next()
        if token == "*":
            yield path
        elif token in ("[", "("):
            yield from self._children(path, {"[": "]", "(": ")"}[token], None)
        elif token == "{":
            yield from self._entries(path)
        elif token == "CustomNode":
            self.expect("(")
            kind = self._next()
            keys = self._keys(kind)
            self.expect(",")
            self.expect("[")
            yield from self._children(path, "]", keys)
            self.expect(")")
        elif token != "None":
            raise ValueError(f"{token!r} starts no node")

    def _keys(self, kind: str) -> Sequence[str] | None:
        """Reads what JAX prints of a node's own data: the keys of a NestedMap, the name of a named tuple's class."""
        self.expect("[")
        depth, words = 1, []
        while depth:
            token = self._next()
            depth += (token == "[") - (token == "]")
            if token[0] in _QUOTES:
                words.append(str(ast.literal_eval(token)))
        return words if kind == "NestedMap" else _FIELDS.get(kind)

    def _children(self, path: str, end: str, keys: Sequence[str] | None) -> Iterator[str]:
        number = 0
        while self._peek() != end:
            key = str(number) if keys is None else keys[number]
            yield from self.leaves(f"{path}/{key}" if path else key)
            number += 1
            if self._peek() == ",":
                self._next()
        self.expect(end)

    def _entries(self, path: str) -> Iterator[str]:
        while self._peek() != "}":
            key = str(ast.literal_eval(self._next()))
            self.expect(":")
            yield from self.leaves(f"{path}/{key}" if path else key)
            if self._peek() == ",":
                self._next()
        self.expect("}")
