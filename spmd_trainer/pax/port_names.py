"""Looks up the paxml and praxis names that an experiment file uses: finds missing names and needed packages."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import pathlib
import types
from collections.abc import Iterator
from typing import Any

from spmd_trainer.errors import UserError, did_you_mean, first_paragraph
from spmd_trainer.pax import import_table
from spmd_trainer.pax.absent_names import Absent, AbsentNameError
from spmd_trainer.pax.port_source import OURS, PAX, Source, Use

# Modules of paxml without a counterpart, and what to use instead.
INSTEAD = {
    "paxml.checkpoint_creators": "a run opens its checkpoints itself; checkpointing.Checkpointer is for your own loops",
    "paxml.experiment_utils": "the settings of a run are in JOB_LOG_DIR/config.txt",
    "paxml.ghostnorm": "gradients are those of the mean loss over the batch; differential privacy is not supported",
    "paxml.io_utils": "decoded examples are in JOB_LOG_DIR/decode_out, as .jsonl",
    "paxml.main": "the command is spmd-trainer, with Pax's flags",
    "paxml.metric_utils": "give task.metrics, a function of the step's weighted scalars",
    "paxml.profiling": "set task.train.profiler_capture_step, or give --jax_profiler_port",
    "paxml.setup_jax": "the command sets up JAX; --jax_* flags set its options",
    "paxml.summary_utils": "a callback's run.log(...) writes scalars",
    "paxml.tf_data_service_lib": "every process of a training job reads its own share of the data",
    "paxml.train": "call spmd_trainer.train(experiment, job_log_dir)",
}
# {module or package name: (extra of spmd-trainer that its use needs, package that the extra installs)}
EXTRAS = {
    "paxml.seqio_input": ("seqio", "seqio"),
    "paxml.tasks.lm.params.c4": ("seqio", "seqio"),
    "paxml.automl": ("pyglove", "pyglove"),
    "pyglove": ("pyglove", "pyglove"),
    "seqio": ("seqio", "seqio"),
    "t5": ("seqio", "t5"),
    "tensorflow_text": ("seqio", "tensorflow_text"),
    "tensorflow_datasets": ("tfds", "tensorflow_datasets"),
    "spmd_trainer.inputs.tfds_input": ("tfds", "tensorflow_datasets"),
    "grain": ("grain", "grain"),
    "spmd_trainer.inputs.grain_input": ("grain", "grain"),
    "tokenizers": ("hf", "tokenizers"),
    "sklearn": ("vision", "sklearn"),
}
# Object stores that inputs and tokenizers may read from. {beginning of a path: (extra, package)}
STORES = {"gs://": ("gcs", "gcsfs"), "s3://": ("s3", "s3fs")}
_MISSING = object()
# Only this many missing names are compared with existing names, to suggest a similar one, because that is slow.
_HINTED = 500
# An import that fails with one of these errors uses a name that is missing, or that is not what it expects.
_OF_NAMES = (ImportError, AttributeError, NameError, TypeError, UserError)
# {module: why its import failed}. A second import would fail with another error, because part of the first one remains.
_failures: dict[str, Exception] = {}


@dataclasses.dataclass(frozen=True)
class Finding:
    """An entry of the porting report: what the user should know about one line of an experiment file.

    Attributes:
      line: line number, from 1.
      name: the name or field that the line uses or sets.
      text: what the report says about the name.
      blocks: True if this prevents the file from running even after its imports are renamed.
      lacks: True if the file can't run before a package is installed or an environment setting is made.
    """

    line: int
    name: str
    text: str
    blocks: bool = True
    lacks: bool = False


def missing_names(source: Source) -> Iterator[Finding]:
    """Yields a `Finding` for each paxml or praxis name in the file that doesn't exist here. Imports the names' modules.

    If a name can't be looked up because a package or an environment setting is missing, its `Finding` has `blocks=False`.
    """
    reported: set[str] = set()
    for use in source.uses:
        if use.path.partition(".")[0] not in (PAX, "praxis", OURS):
            continue
        if any(use.path[:end] in reported for end, letter in enumerate(use.path) if letter == "."):
            continue  # below a name that is reported already
        found = _look_up(use, is_hinted=len(reported) < _HINTED)
        if found is not None:
            reported.add(found.name)
            yield found


def extras(source: Source) -> Iterator[Finding]:
    """Yields a `Finding` for the first use of each name that needs an extra of this package, e.g. `spmd-trainer[seqio]`."""
    seen: set[tuple[str, str]] = set()
    for use in source.uses:
        for prefix, (extra, package) in EXTRAS.items():
            if (use.path == prefix or use.path.startswith(f"{prefix}.")) and (extra, prefix) not in seen:
                seen.add((extra, prefix))
                yield _needs_extra(use.line, prefix, extra, package)
    for scheme, (extra, package) in STORES.items():
        lines = source.strings(scheme)
        if lines:
            yield _needs_extra(lines[0], scheme, extra, package)


def absent_packages(source: Source) -> Iterator[Finding]:
    """Yields a `Finding` for each imported package that isn't installed, and isn't in the file's or the working directory."""
    for use in source.packages():
        if use.path in (PAX, OURS) or use.path in EXTRAS or _is_installed(use.path):
            continue
        beside = source.path.parent / use.path
        if not (beside.is_dir() or beside.with_suffix(".py").is_file() or pathlib.Path(use.path).is_dir()):
            yield Finding(use.line, use.path, "is not installed", blocks=False, lacks=True)


def _needs_extra(line: int, name: str, extra: str, package: str) -> Finding:
    is_there = _is_installed(package)
    there = "installed" if is_there else f"not installed: pip install 'spmd-trainer[{extra}]'"
    return Finding(line, name, f"needs the extra {extra!r}, which is {there}", blocks=False, lacks=not is_there)


def find(path: str) -> Any:
    """Returns the object at the dotted name `path`, with a leading `paxml` read as `spmd_trainer`; None if it doesn't exist."""
    found, rest = _follow(path)
    return None if rest else found


def _look_up(use: Use, *, is_hinted: bool) -> Finding | None:
    """Returns a `Finding` if a name does not exist or can't be used, otherwise None. `is_hinted`: suggest similar names."""
    for module, instead in INSTEAD.items():
        if use.path == module or use.path.startswith(f"{module}."):
            return Finding(use.line, module, f"does not exist here: {instead}")
    try:
        found, rest = _follow(use.path)
    except Exception as error:  # a module's import may fail in any way
        return _of_failed_import(use, error)
    if isinstance(found, Absent):
        try:
            found()
        except AbsentNameError as error:
            text = str(error).partition(": ")[2]
            path = use.path.removesuffix("".join(f".{name}" for name in rest))
            return Finding(use.line, path, f"can be imported, but not used: {text}")
    if not rest:
        return None
    names = use.path.split(".")
    done = len(names) - len(rest)
    name = ".".join(names[: done + 1])
    near = did_you_mean(rest[0], _names_of(found), otherwise="") if is_hinted else ""
    return Finding(use.line, name, f"does not exist here{near}")


def _of_failed_import(use: Use, error: Exception) -> Finding:
    absent = error if isinstance(error, ImportError) else error.__cause__
    extra = EXTRAS.get(str(absent.name).partition(".")[0]) if isinstance(absent, ImportError) else None
    if extra is not None:
        return _needs_extra(use.line, use.path, *extra)
    missing = absent.name if isinstance(absent, ModuleNotFoundError) else None
    # Modules that are read from an installed paxml have an error message that says how to install it.
    if missing and (missing == PAX or not _is_installed(missing)):
        text = str(absent) if missing == PAX else f"needs the package {missing}, which is not installed"
        return Finding(use.line, use.path, text, blocks=False, lacks=True)
    what = f"{type(error).__name__}: {first_paragraph(error)}"
    if isinstance(error, _OF_NAMES):
        return Finding(use.line, use.path, f"can't be imported: {what}")
    # Modules of paxml want environment variables and files when they are imported.
    text = f"can't be looked up until the import of its module works: {what}"
    return Finding(use.line, use.path, text, blocks=False, lacks=True)


def _follow(path: str) -> tuple[Any, list[str]]:
    """Looks up the parts of a dotted name one by one. Returns the last object that exists, and the parts that are missing.

    Attributes of instances and functions are not looked up, because they may be set at run time.
    """
    first, *rest = path.split(".")
    dotted = OURS if first == PAX else first
    found: Any = importlib.import_module(dotted)
    while rest and isinstance(found, types.ModuleType | type):
        value = getattr(found, rest[0], _MISSING)
        dotted = f"{dotted}.{rest[0]}"
        if value is _MISSING and isinstance(found, types.ModuleType):
            value = _submodule(found, dotted)
        if value is _MISSING and rest[0] in getattr(found, "__dataclass_fields__", {}):
            return found, []
        if value is _MISSING:
            return found, rest
        found, rest = value, rest[1:]
    return found, rest if isinstance(found, Absent) else []


def _submodule(package: types.ModuleType, dotted: str) -> Any:
    """Imports and returns a module of a package; returns `_MISSING` if the module doesn't exist."""
    if not hasattr(package, "__path__"):
        return _MISSING
    if dotted in _failures:
        raise _failures[dotted]
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError as error:
        if error.name is not None and (dotted == error.name or dotted.startswith(f"{error.name}.")):
            return _MISSING
        _failures[dotted] = error
        raise
    except Exception as error:  # a module's import may fail in any way
        _failures[dotted] = error
        raise


def _names_of(found: Any) -> list[str]:
    names = [name for name in dir(found) if not name.startswith("_")]
    folders = [pathlib.Path(folder) for folder in getattr(found, "__path__", [])]
    names += import_table.STANDING if getattr(found, "__name__", None) == OURS else []
    return names + [file.stem for folder in folders for file in folder.glob("[a-z]*.py")]


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
