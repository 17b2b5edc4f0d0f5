"""The registry of experiments: `@register` adds a class, `get(name)` returns it.

An experiment's names are its full name `module.Class`, any unambiguous suffix of it, and Pax's short form without `.params.`
(`lm.lm_cloud.X` for `lm.params.lm_cloud.X`). Nothing is printed at import. `experiment_modules.py` imports the module of a
name and explains names that don't exist.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import pathlib
import sys
from collections.abc import Iterable, Mapping
from importlib.machinery import ModuleSpec
from typing import Any

from spmd_trainer import experiment_modules
from spmd_trainer.experiment_modules import EXPERIMENTS_PACKAGE, short_name

__all__ = [
    "EXPERIMENTS_PACKAGE",
    "Found",
    "find",
    "full_name",
    "get",
    "get_all",
    "get_registry_tags",
    "register",
    "short_name",
]

_registry: dict[str, type] = {}
_tags: dict[str, list[str]] = {}
# The module spec at the time of registration; reloading a module makes a new spec.
_specs: dict[str, ModuleSpec | None] = {}
_full_names_by_key: dict[str, list[str]] = collections.defaultdict(list)


def register(
    experiment_class: type | None = None, *, tags: Iterable[str] | None = None, allow_overwrite: bool = False
) -> Any:
    """Registers an experiment class. Works as a decorator, with or without arguments.

    Args:
      experiment_class: a `BaseExperiment` subclass.
      tags: arbitrary strings to store with the experiment, see `get_registry_tags`; not regexes.
      allow_overwrite: True replaces a class that is already registered with the same full name. Running a notebook's cell
        again or reloading a module always replaces the class.

    Returns:
      The class itself, or a decorator when called with keyword arguments only.

    Raises:
      ValueError: a different class with the same full name is registered, and `allow_overwrite` is False.
    """
    if experiment_class is None:
        return lambda cls: register(cls, tags=tags, allow_overwrite=allow_overwrite)
    name = full_name(experiment_class)
    spec = getattr(sys.modules.get(experiment_class.__module__), "__spec__", None)
    known = _registry.get(name)
    # A notebook's cell may run any number of times, a module only once per import.
    runs_again = experiment_class.__module__ == "__main__" or _specs.get(name) is not spec
    if known is not None and not allow_overwrite and not runs_again:
        raise ValueError(
            f"experiment {name} is registered already; rename one, or use register(allow_overwrite=True) to replace it"
        )
    if known is None:
        for key in _keys(name):
            _full_names_by_key[key].append(name)
    _registry[name] = experiment_class
    _tags[name], _specs[name] = list(tags or []), spec
    return experiment_class


@dataclasses.dataclass(frozen=True)
class Found:
    """An experiment class and its names.

    Attributes:
      cls: the class.
      name: its full name, see `full_name`.
      label: the name in messages: the string that the user gave or, for a class or an instance, the class's short name.
    """

    cls: type
    name: str
    label: str


def find(exp: str | type | object) -> Found:
    """Returns the class of an experiment with its names.

    Args:
      exp: a registered name (see `get`), a class or an instance.

    Raises:
      ValueError: as for `get`.
    """
    if isinstance(exp, str):
        cls = get(exp)
        return Found(cls, full_name(cls), exp)
    cls = exp if isinstance(exp, type) else type(exp)
    name = full_name(cls)
    return Found(cls, name, short_name(name))


def full_name(experiment_class: type) -> str:
    """Returns the name under which a class is registered: `module.Class`.

    In a checkout, the shipped experiments can also be imported as `experiments...`. Their full name is the same either way.
    """
    module = experiment_class.__module__
    if module.startswith("experiments.") and _is_shipped(sys.modules.get(module)):
        module = f"{EXPERIMENTS_PACKAGE}.{module.removeprefix('experiments.')}"
    return f"{module}.{experiment_class.__qualname__}"


def _is_shipped(module: Any) -> bool:
    file = getattr(module, "__file__", None)
    folders = importlib.import_module(EXPERIMENTS_PACKAGE).__path__
    return file is not None and any(pathlib.Path(file).resolve().is_relative_to(folder) for folder in folders)


def _keys(name: str) -> set[str]:
    parts = name.split(".")
    keys = {".".join(parts[i:]) for i in range(len(parts))}
    if "params" in parts[1:]:
        at = parts.index("params", 1)
        short = parts[:at] + parts[at + 1 :]
        keys |= {".".join(short[i:]) for i in range(at)}
    return keys


def get(name: str) -> type:
    """Returns the experiment class of this name, and imports its module if needed.

    Args:
      name: the full name, an unambiguous suffix of it, or Pax's short form.

    Raises:
      ValueError: no experiment or several experiments match. The message says what is wrong: the module, the class, a missing
        `@register`, or an import that fails.
    """
    found = _matches(name) or _matches_after_imports(name)
    if len(found) > 1:
        raise ValueError(f"{name!r} is the name of several experiments: {', '.join(found)}; give one full name")
    return _registry[found[0]]


def _matches(name: str) -> list[str]:
    """Returns the full names of the registered experiments that match `name`; only `name` itself if it is a full name."""
    return [name] if name in _registry else list(_full_names_by_key.get(name, []))


def _matches_after_imports(name: str) -> list[str]:
    """Imports modules until `name` matches. Returns the matches as `_matches` does; raises UserError if there is none."""
    imported = []
    for module in experiment_modules.import_for(name):
        imported.append(module)
        if found := _matches(name):
            return found
    failures = experiment_modules.import_packages()
    if found := _matches(name):
        return found
    raise experiment_modules.unknown(name, imported, _full_names_by_key, failures)


def get_all() -> Mapping[str, type]:
    return dict(_registry)


def get_registry_tags(name: str) -> list[str]:
    """Returns the tags that `register` got for the experiment whose full name equals `name`, which is not a regex."""
    return list(_tags.get(name, []))
