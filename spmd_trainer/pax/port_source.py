"""Parses a file written for paxml with `ast`: finds the imported names and their uses, and renames the imports."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import io
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence

from spmd_trainer.errors import UserError

PAX, OURS = "paxml", "spmd_trainer"


@dataclasses.dataclass(frozen=True)
class Use:
    """A full dotted name that a file uses, e.g. 'paxml.tasks_lib.SingleTask', and the first line that uses it."""

    path: str
    line: int


class Source:
    """One parsed Python file.

    Attributes:
      path: path of the file.
      text: the file's text.
      tree: the file's syntax tree.
      aliases: {imported name as the file writes it: its full name}, e.g. {'tasks_lib': 'paxml.tasks_lib'}.
    """

    def __init__(self, path: pathlib.Path):
        """Reads and parses a file.

        Raises:
          UserError: the file can't be read, or is not Python.
        """
        self.path = path
        try:
            self.text = path.read_text(encoding="utf-8-sig")
            self.tree = ast.parse(self.text, filename=str(path))
        except (RecursionError, MemoryError) as error:
            raise nested_too_deeply(path) from error
        except SyntaxError as error:
            raise UserError(f"{path}:{error.lineno}: not valid Python: {error.msg}") from error
        except (OSError, ValueError) as error:
            raise UserError(f"{path} can't be read: {error}") from error
        self._imports = [node for node in ast.walk(self.tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        self.aliases = {alias: full for use, alias in self._imported() if alias for full in [use.path]}

    def full_name(self, node: ast.expr) -> str | None:
        """Returns the full name of an expression such as `tasks_lib.SingleTask.Train`; None for other expressions."""
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.aliases:
            return None
        return ".".join([self.aliases[node.id], *reversed(names)])

    @functools.cached_property
    def uses(self) -> Sequence[Use]:
        """Every imported name and every used attribute of an imported name, once each, in line order."""
        found = [use for use, _ in self._imported()]
        inner = {id(node.value) for node in ast.walk(self.tree) if isinstance(node, ast.Attribute)}
        rebound = self._rebound()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute) and id(node) not in inner and _root(node) not in rebound:
                path = self.full_name(node)
                if path is not None:
                    found.append(Use(path, node.lineno))
        first: dict[str, Use] = {}
        for use in sorted(found, key=lambda use: use.line):
            first.setdefault(use.path, use)
        return list(first.values())

    def packages(self) -> list[Use]:
        """Returns the imported top-level packages, each with the first line that imports it."""
        first: dict[str, Use] = {}
        for use, _ in self._imported():
            name = use.path.partition(".")[0]
            first.setdefault(name, Use(name, use.line))
        return list(first.values())

    def renamed(self) -> str:
        """Returns the text with `paxml` renamed to `spmd_trainer` in imports, and where the imported name `paxml` is used."""
        lines = [line.encode() for line in _lines(self.text)]  # ast counts columns in bytes
        for line, column in sorted(self._places(), reverse=True):
            before, after = lines[line - 1][:column], lines[line - 1][column:]
            lines[line - 1] = before + after.replace(PAX.encode(), OURS.encode(), 1)
        return b"".join(lines).decode()

    def diff(self) -> str:
        """Returns a unified diff that renames the imports and that `patch -p0` applies; '' if there is nothing to rename."""
        here = pathlib.Path.cwd()
        # `patch` takes no absolute paths.
        path = str(self.path.relative_to(here) if self.path.is_relative_to(here) else self.path)
        return "".join(difflib.unified_diff(_lines(self.text), _lines(self.renamed()), path, path))

    def strings(self, beginning: str) -> list[int]:
        """Returns the line numbers of the string literals that begin with `beginning`, ascending."""
        constants = (node for node in ast.walk(self.tree) if isinstance(node, ast.Constant))
        return sorted(
            node.lineno for node in constants if isinstance(node.value, str) and node.value.startswith(beginning)
        )

    def _imported(self) -> Iterator[tuple[Use, str]]:
        """Yields each imported name with the name that the file gives it ('' for `*`). Relative imports are skipped."""
        for node in self._imports:
            for alias in node.names:
                if isinstance(node, ast.Import):
                    name = alias.asname or alias.name.partition(".")[0]
                    yield Use(alias.name, node.lineno), alias.asname or ""
                    if not alias.asname:
                        yield Use(name, node.lineno), name
                elif not node.level:
                    star = alias.name == "*"
                    path = node.module or ""
                    yield (
                        Use(path if star else f"{path}.{alias.name}", node.lineno),
                        "" if star else alias.asname or alias.name,
                    )

    def _rebound(self) -> set[str]:
        """Returns the names that the file also binds to something else, e.g. as a parameter."""
        names = {
            node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        return names | {node.arg for node in ast.walk(self.tree) if isinstance(node, ast.arg)}

    def _places(self) -> Iterator[tuple[int, int]]:
        """Yields (line, column in bytes) of each `paxml` to rename."""
        lines = _lines(self.text)
        for node in self._imports:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if _is_pax(alias.name):
                        yield alias.lineno, alias.col_offset
            elif not node.level and _is_pax(node.module or ""):
                # The module's name follows `from`; a backslash may put it on a later line.
                for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                    start = node.col_offset + len("from") if number == node.lineno else 0
                    column = lines[number - 1].encode().find(PAX.encode(), start)
                    if column >= 0:
                        yield number, column
                        break
        if self.aliases.get(PAX) == PAX:
            for name in ast.walk(self.tree):
                if isinstance(name, ast.Name) and name.id == PAX:
                    yield name.lineno, name.col_offset


def nested_too_deeply(path: pathlib.Path) -> UserError:
    """Returns the error for a file whose expressions, blocks or base classes nest too deeply for Python."""
    return UserError(f"{path}: its expressions, blocks or base classes nest too deeply to be read; divide them")


def find_files(module: str) -> list[pathlib.Path]:
    """Returns the Python files of a module or package, which is given by path or dotted name. Imports nothing.

    Raises:
      UserError: the file or module doesn't exist.
    """
    path = pathlib.Path(module).expanduser()
    if not path.exists() and all(part.isidentifier() for part in module.split(".")):
        found = _file_of_module(module)
        if found is None:
            raise UserError(
                f"--module={module}: no such file, and no such module in {os.getcwd()} or installed; give a path, "
                "e.g. --module=my_pkg/my_file.py"
            )
        path = found
    if path.is_dir():
        files = sorted(path.rglob("*.py"))
        if not files:
            raise UserError(f"--module={module}: there are no Python files in {path}")
        return files
    if not path.is_file():
        raise UserError(f"--module={module}: the file doesn't exist; give the path of a file written for paxml")
    return [path]


def _file_of_module(module: str) -> pathlib.Path | None:
    for folder in [os.getcwd(), *sys.path]:
        path = pathlib.Path(folder, *module.split("."))
        if path.is_dir():
            return path
        if path.with_suffix(".py").is_file():
            return path.with_suffix(".py")
    return None


def _lines(text: str) -> list[str]:
    """Splits into lines, with their line ends. `str.splitlines` would also split at form feeds, which don't end Python lines."""
    return io.StringIO(text).readlines()


def _is_pax(name: str) -> bool:
    return name.partition(".")[0] == PAX


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
