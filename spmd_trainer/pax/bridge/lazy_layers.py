"""Imports the modules of `praxis.layers` when a name of theirs is first used.

`praxis/layers/__init__.py` imports 40 modules for their names, from conformers to vision transformers. A language model needs a
third of them; defining the classes of the others takes a tenth of the time of a restart.
"""

from __future__ import annotations

import ast
import collections
import types
from typing import Any

import lazy_loader


def names_by_module(source: str, package: str) -> dict[str, list[str]] | None:
    """Returns what a package's `__init__.py` imports from its own modules.

    Args:
      source: the file's text.
      package: the package's name.

    Returns:
      {module, without the package's name: names}; None if the file does anything else than to import names that it keeps.
    """
    found: dict[str, list[str]] = collections.defaultdict(list)
    first, *rest = ast.parse(source).body
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    for statement in rest if is_docstring else [first, *rest]:
        if not isinstance(statement, ast.ImportFrom) or statement.level:
            return None
        parent, _, module = (statement.module or "").rpartition(".")
        if parent != package or any(alias.asname or alias.name == "*" for alias in statement.names):
            return None
        found[module] += [alias.name for alias in statement.names]
    return dict(found)


class LazyNamesLoader:
    """Wraps the loader of a package: its names are imported at their first use. A file that does more is executed as it is."""

    def __init__(self, loader: Any):
        self._loader = loader

    def exec_module(self, module: types.ModuleType) -> None:
        """Attaches the names, or executes the module."""
        names = names_by_module(self._loader.get_source(module.__name__), module.__name__)
        if names is None:
            self._loader.exec_module(module)
        else:
            attached = lazy_loader.attach(module.__name__, submodules=list(names), submod_attrs=names)
            vars(module).update(zip(("__getattr__", "__dir__", "__all__"), attached, strict=True))

    def __getattr__(self, name: str) -> Any:  # the import system and inspect use create_module, get_source and others
        return getattr(self._loader, name)
