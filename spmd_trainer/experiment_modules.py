"""Imports the modules that may define an experiment of a given name, and explains unknown names.

The search order is: the module that the name itself contains (first the user's module of that name, then the shipped one, then
the one in Pax's `tasks`), all shipped experiments, the packages that installed distributions announce in the entry-point group
`spmd_trainer.experiments`, and the modules of `--exp_module`.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import os
import pkgutil
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence

from spmd_trainer.errors import UserError, did_you_mean, user_code
from spmd_trainer.sharding.messages import nearest_names, suggestion_text

# The package of the experiments that ship with the trainer; experiment names may be relative to it.
EXPERIMENTS_PACKAGE = "spmd_trainer.experiments"
# A distribution announces its experiments with e.g. `my_experiments = "my_pkg.experiments"` in this group of its pyproject.toml.
ENTRY_POINT_GROUP = "spmd_trainer.experiments"

# Pax's experiments: commands for Pax name them as `tasks.lm.params.lm_cloud.LmCloudSpmd2B`, below the package `paxml`.
_PACKAGE = "spmd_trainer"
_TASKS = "tasks."

_asked_for: list[str] = []


def add(modules: Iterable[str]) -> None:
    """Adds modules or packages in which `experiment_registry.get` and `--list` look for experiments.

    Raises:
      UserError: a name is not a valid module name.
    """
    modules = list(modules)
    for module in modules:
        _check_form(module, "--exp_module")
    _asked_for.extend(module for module in modules if module not in _asked_for)


def packages() -> list[str]:
    """Returns the modules and packages whose experiments `--list` shows."""
    announced = sorted(point.value for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP))
    return list(dict.fromkeys([EXPERIMENTS_PACKAGE, *announced, *_asked_for]))


def import_packages() -> list[str]:
    """Imports all of `packages()` and returns a message for each module that can't be imported."""
    failures = []
    for package in packages():
        try:
            import_package(package)
        except UserError as error:
            failures.append(str(error))
    return failures


def import_package(package: str) -> None:
    """Imports a module and, if it is a package, every module in it.

    Raises:
      UserError: there is no such module, or some modules in it can't be imported. All others are imported.
    """
    root = _import(package)
    if root is None:
        raise UserError(_no_module_text(package))
    failures = list(_import_below(root))
    if failures:
        raise UserError("\n".join(dict.fromkeys(failures)))


def _import_below(package: types.ModuleType) -> Iterator[str]:
    """Imports every module below a package and yields a message for each import that fails."""
    for found in pkgutil.iter_modules(getattr(package, "__path__", ()), f"{package.__name__}."):
        # Importing a package's __main__ would run a program.
        if found.name.endswith(".__main__"):
            continue
        try:
            module = _import(found.name)
        except UserError as error:
            yield str(error)
        else:
            if module is not None and found.ispkg:
                yield from _import_below(module)


def import_for(name: str) -> Iterator[types.ModuleType]:
    """Imports the modules that an experiment's name may refer to, one by one.

    Yields:
      Those that exist: the user's own module, the module that ships with the trainer, the one in Pax's `tasks`.

    Raises:
      UserError: the name is not of the form module.Class, or an import fails.
    """
    _check_form(name, "--exp")
    module_name = name.rpartition(".")[0]
    if not module_name:
        return
    shipped = f"{EXPERIMENTS_PACKAGE}.{module_name}"
    # Modules of the trainer may come from an installed paxml, which only an import finds.
    if _exists(module_name) or module_name.startswith(f"{_PACKAGE}.{_TASKS}"):
        try:
            module = _import(module_name)
        except UserError as error:
            hidden = f"; the shipped one is {shipped}" if _exists(shipped) else ""
            raise UserError(f"{error}{hidden}") from error
        if module is not None:
            yield module
    for found in (shipped, *([f"{_PACKAGE}.{module_name}"] if module_name.startswith(_TASKS) else [])):
        module = _import(found)
        if module is not None:
            yield module


def _exists(module_name: str) -> bool:
    """Returns True if a module can be found. Does not import the packages that contain it."""
    parts, spec = module_name.split("."), None
    for end, _ in enumerate(parts, start=1):
        parent, name = ".".join(parts[: end - 1]), ".".join(parts[:end])
        if not parent or parent in sys.modules:  # an imported package may find its modules outside its folder
            try:
                spec = importlib.util.find_spec(name)
            except (ImportError, ValueError):
                return False
        elif spec is None or spec.submodule_search_locations is None:
            return False
        else:
            spec = importlib.machinery.PathFinder.find_spec(name, spec.submodule_search_locations)
    return spec is not None


def unknown(
    name: str, imported: Sequence[types.ModuleType], known: Mapping[str, Sequence[str]], failures: Sequence[str]
) -> UserError:
    """Returns the error for an unknown experiment name. It says whether the module, the class or the registration is wrong.

    Args:
      name: the name that the user gave.
      imported: the modules that `import_for` has yielded for the name.
      known: {accepted name: full names of the registered experiments that have this name}.
      failures: the messages from `import_packages`.
    """
    module_name, _, class_name = name.rpartition(".")
    if _exists(name) or _exists(f"{EXPERIMENTS_PACKAGE}.{name}"):
        return UserError(f"{name} is a module; give a class in it, e.g. --exp={name}.MyExperiment")
    if imported:
        return UserError(_class_text(imported[0], class_name))
    keys = nearest_names(name, known, count=6)
    near = list(dict.fromkeys(short_name(full) for key in keys for full in known[key]))[:3]
    if module_name and (not near or _exists(module_name.partition(".")[0])):
        text = _no_module_text(module_name)
    else:
        hint = suggestion_text(near) or ". --list shows the registered ones."
        own = "Give an experiment of your own with its module, e.g. my_pkg.my_module.MyExperiment."
        text = f"no experiment is registered as {name!r}{hint} {_no_module_text(module_name) if module_name else own}"
    return UserError("\n".join([text, *failures]))


def short_name(name: str) -> str:
    """Returns a full name without the prefix `EXPERIMENTS_PACKAGE` of the shipped experiments."""
    return name.removeprefix(f"{EXPERIMENTS_PACKAGE}.")


def _check_form(name: str, flag: str) -> None:
    if _is_dotted_name(name):
        return
    tail, form = (".MyExperiment", "module.Class") if flag == "--exp" else ("", "package.module")
    if name.endswith(".py") or os.sep in name:
        path = os.path.abspath(os.path.expanduser(name)).removesuffix(".py")
        module = os.path.relpath(path).replace(os.sep, ".")
        if _is_dotted_name(module):
            fix = f"write its name as Python imports it: {flag}={module}{tail}"
        else:  # it lies outside the working directory
            module = os.path.basename(path)
            fix = f"run the command in {os.path.dirname(path)} and write {flag}={module}{tail}"
        if _is_dotted_name(module):
            raise UserError(f"{flag}={name} is a file or folder; {fix}")
    raise UserError(f"{flag}={name} is not of the form {form}, e.g. {flag}=my_pkg.my_module{tail}")


def _is_dotted_name(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def _import(name: str) -> types.ModuleType | None:
    """Imports a module; returns None if it does not exist.

    Raises:
      UserError: the module exists but its import fails; the message names the user's line that failed.
    """
    user_code.claim(name)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Only a missing module itself is no error; the user must see an import that fails inside it.
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            return None
        failure: BaseException = error
    except (Exception, SystemExit) as error:
        failure = error
    what = f"{type(failure).__name__}: {failure}".split("\n")[0]
    raise UserError(f"importing {name} failed: {what}{user_code.where(failure)}") from failure


def _class_text(module: types.ModuleType, class_name: str) -> str:
    """Returns the error message for a class name that isn't a registered experiment, although its module exists."""
    from spmd_trainer.base_experiment import BaseExperiment

    cls = getattr(module, class_name, None)
    if isinstance(cls, type) and issubclass(cls, BaseExperiment):
        abstract = ", ".join(sorted(getattr(cls, "__abstractmethods__", ())))
        lacks = f" It also lacks {abstract}." if abstract else ""
        return (
            f"{module.__name__}.{class_name} is not registered: put @experiment_registry.register above its class "
            f"statement.{lacks}{user_code.where_defined(cls)}"
        )
    if isinstance(cls, type):
        return (
            f"{module.__name__}.{class_name} is no experiment: derive it from base_experiment.BaseExperiment and put "
            f"@experiment_registry.register above it.{user_code.where_defined(cls)}"
        )
    classes = [
        name
        for name, value in inspect.getmembers(module, inspect.isclass)
        if issubclass(value, BaseExperiment) and value is not BaseExperiment
    ]
    near = [f"{short_name(module.__name__)}.{name}" for name in nearest_names(class_name, classes)]
    hint = suggestion_text(near) or f"; its experiments: {', '.join(classes) or 'none'}"
    return f"module {module.__name__} ({_file(module)}) has no class {class_name!r}{hint}"


def _no_module_text(module_name: str) -> str:
    """Returns the error message for a missing module: which part of the dotted name is missing, and which modules exist."""
    parts = module_name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        parent_name = ".".join(parts[:end])
        parent = _import(parent_name)
        if parent is not None:
            inside = [module.name for module in pkgutil.iter_modules(getattr(parent, "__path__", ()))]
            near = [f"{parent_name}.{name}" for name in nearest_names(parts[end], inside)]
            hint = suggestion_text(near) or f"; its modules: {', '.join(sorted(inside)) or 'none'}"
            return f"There is no module {parent_name}.{parts[end]} in {_file(parent)}{hint}"
    here = [module.name for module in pkgutil.iter_modules([os.getcwd()])]
    is_on_path = os.getcwd() in sys.path or "" in sys.path
    looked = "" if is_on_path else " (which is not on Python's path: PYTHONSAFEPATH is set)"
    return (
        f"There is no package {parts[0]!r}, neither in the working directory {os.getcwd()}{looked} nor installed"
        f"{did_you_mean(parts[0], here, otherwise='.')}"
    )


def _file(module: types.ModuleType) -> str:
    return str(getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", [])), "no file of its own"))
