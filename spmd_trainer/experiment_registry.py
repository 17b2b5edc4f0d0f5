"""The registry of experiments: `@register` on a class, `get(name)` from the command line.

An experiment is known by its full name `module.Class`, by any unambiguous tail of it, and by Pax's short form that drops
`.params.` (`lm.params.lm_cloud.X` is `lm.lm_cloud.X`). Nothing is printed at import.
"""

from __future__ import annotations

import collections
import difflib
import importlib
import pkgutil
import sys
from collections.abc import Iterable, Mapping
from typing import Any

# The package that ships with the trainer; `import_all` walks it, and names may be given relative to it.
EXPERIMENTS_PACKAGE = "experiments"

_registry: dict[str, type] = {}
_tags: dict[str, list[str]] = {}
_full_names_by_key: dict[str, list[str]] = collections.defaultdict(list)


def register(
    experiment_class: type | None = None, *, tags: Iterable[str] | None = None, allow_overwrite: bool = False
) -> Any:
    """Registers an experiment class; usable bare or with arguments, as a decorator.

    Args:
      experiment_class: a `BaseExperiment` subclass.
      tags: free words kept with the experiment, see `get_registry_tags`.
      allow_overwrite: whether a class of the same full name may be replaced (notebooks, reloads).

    Returns:
      The class itself, or a decorator when called with keyword arguments only.

    Raises:
      ValueError: another class of the same full name is registered and `allow_overwrite` is False.
    """
    if experiment_class is None:
        return lambda cls: register(cls, tags=tags, allow_overwrite=allow_overwrite)
    name = f"{experiment_class.__module__}.{experiment_class.__qualname__}"
    known = _registry.get(name)
    if known is not None and not allow_overwrite and not _is_reload_of(known, experiment_class):
        raise ValueError(
            f"experiment {name} is registered already; rename one, or use register(allow_overwrite=True) to replace it"
        )
    if known is None:
        for key in _keys(name):
            _full_names_by_key[key].append(name)
    _registry[name] = experiment_class
    _tags[name] = list(tags or [])
    return experiment_class


def _is_reload_of(known: type, new: type) -> bool:
    """Whether `new` comes from the same line of the same module: importlib.reload, or a module run twice."""
    module = sys.modules.get(new.__module__)
    spec = getattr(module, "__spec__", None)
    return getattr(spec, "_initializing", False) and known.__qualname__ == new.__qualname__


def _keys(name: str) -> set[str]:
    parts = name.split(".")
    keys = {".".join(parts[i:]) for i in range(len(parts))}
    if "params" in parts[1:]:
        at = parts.index("params", 1)
        short = parts[:at] + parts[at + 1 :]
        keys |= {".".join(short[i:]) for i in range(at)}
    return keys


def get(name: str) -> type:
    """Returns the experiment class of this name, importing its module if that was not done yet.

    Args:
      name: the full name, an unambiguous tail of it, or Pax's short form.

    Raises:
      ValueError: no such experiment (with the nearest names), or several of that name.
    """
    if name not in _full_names_by_key:
        _import_module_of(name)
    if name not in _full_names_by_key:
        import_all()
    matches = _full_names_by_key.get(name, [])
    if not matches:
        near = difflib.get_close_matches(name, list(_full_names_by_key), n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "--list shows those that are registered."
        raise ValueError(f"no experiment is registered as {name!r}; {hint}")
    if len(matches) > 1:
        raise ValueError(f"{name!r} names several experiments: {', '.join(matches)}; give one of these in full")
    return _registry[matches[0]]


def _import_module_of(name: str) -> None:
    """Imports `a.b` for 'a.b.Class', or the same below the experiments package; a missing module is no error here."""
    module = name.rpartition(".")[0]
    for candidate in filter(None, (f"{EXPERIMENTS_PACKAGE}.{module}" if module else "", module)):
        try:
            importlib.import_module(candidate)
            return
        except ModuleNotFoundError as error:
            # Only "that module is not there" is forgiven; an import that fails inside it is the user's to see.
            if error.name is None or not (candidate == error.name or candidate.startswith(error.name + ".")):
                raise


def import_all(package: str = EXPERIMENTS_PACKAGE) -> None:
    """Imports every module of `package`, so that `get_all` knows all that ships with the trainer."""
    try:
        root = importlib.import_module(package)
    except ModuleNotFoundError:
        return
    for module in pkgutil.walk_packages(root.__path__, prefix=f"{package}."):
        importlib.import_module(module.name)


def get_all() -> Mapping[str, type]:
    """Returns the registered experiments by full name."""
    return dict(_registry)


def get_registry_tags(name: str) -> list[str]:
    """Returns the tags given to `register` for the experiment of this full name."""
    return list(_tags.get(name, []))


def short_name(name: str) -> str:
    """Returns the shortest tail of a full name that says where an experiment lives: without the package it ships in."""
    return name.removeprefix(f"{EXPERIMENTS_PACKAGE}.")
