"""Distinguishes the user's code from libraries, to choose the traceback frames to name and the log lines to show."""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import pathlib
import sys
import sysconfig
import traceback
import types

_TRAINER = pathlib.Path(__file__).resolve().parents[1]
# Shipped experiments count as the user's code: users run, copy and change them.
_SHIPPED = _TRAINER / "experiments"
# site-packages may be below the standard library's folder, so it comes first. `scripts` holds installed commands.
_LIBRARIES = tuple(
    pathlib.Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib", "scripts")
)
# A word in the note that JAX adds to errors.
_JAX_NOTICE = "JAX_TRACEBACK_FILTERING"
# Users' top-level packages, which may be installed among the libraries.
_claimed: set[str] = set()


def claim(module: str) -> None:
    """Marks the top-level package of `module` as the user's, wherever it is installed."""
    package = module.partition(".")[0]
    if package not in ("__main__", "spmd_trainer", *_claimed):
        _claimed.add(package)
        is_users.cache_clear()


@functools.cache
def is_users(filename: str) -> bool:
    """Returns True if a source file is the user's, i.e. neither a library's nor the trainer's.

    Args:
      filename: the name in a traceback or log record; may be the generated name of a notebook cell.
    """
    if filename.startswith("<"):
        # `<ipython-input-3-...>` is a cell; `<frozen importlib>`, `<string>` and `<fiddle_...>` are generated.
        return filename.startswith("<ipython")
    path = pathlib.Path(filename).resolve()
    if path.is_relative_to(_TRAINER):
        return path.is_relative_to(_SHIPPED)
    for library in _LIBRARIES:
        if path.is_relative_to(library):
            return path.relative_to(library).parts[0].removesuffix(".py") in _claimed
    return not {"site-packages", "dist-packages"} & set(path.parts)


def is_library(filename: str) -> bool:
    """Returns True if a source file is neither the user's nor the trainer's."""
    return not (is_users(filename) or pathlib.Path(filename).resolve().is_relative_to(_TRAINER))


def frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Returns the user's frames in an error's traceback, innermost last; if none, those of the nearest cause that has some."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    for link in chain:
        found = [frame for frame in traceback.extract_tb(link.__traceback__) if is_users(frame.filename)]
        if found:
            return found
    return []


def keep_own(error: BaseException) -> None:
    """Removes all frames but the user's from the tracebacks of an error and its causes. Drops causes without user frames.

    Also removes JAX's note about hidden frames, which Python would print after the message.
    """
    own, entry = [], error.__traceback__
    while entry is not None:
        own += [entry] if is_users(entry.tb_frame.f_code.co_filename) else []
        entry = entry.tb_next
    kept = None
    for entry in reversed(own):
        kept = types.TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    error.__traceback__ = kept
    if hasattr(error, "__notes__"):
        error.__notes__ = [note for note in error.__notes__ if _JAX_NOTICE not in note]
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        keep_own(cause)
        error.__cause__ = cause if cause.__traceback__ or cause.__cause__ else None


def lines(error: BaseException) -> list[str]:
    """Returns 'FILE:LINE, in FUNCTION: CODE' for each of the user's frames of an error, innermost first."""
    return [f"{frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}" for frame in reversed(frames(error))]


def library_line(error: BaseException) -> str | None:
    """Returns the library line that raised an error, e.g. 'praxis/layers/linears.py:76: CODE'; None if no library raised it."""
    innermost = traceback.extract_tb(error.__traceback__)[-1:]
    if not innermost or not is_library(innermost[0].filename):
        return None
    path = pathlib.Path(innermost[0].filename).resolve()
    below = next((path.relative_to(library) for library in _LIBRARIES if path.is_relative_to(library)), path)
    return f"{below}:{innermost[0].lineno}: {innermost[0].line}"


def hidden_package(error: ImportError) -> str | None:
    """Returns the file in the working directory that shadows an installed package, so that an import failed; else None."""
    top = (error.name or "").partition(".")[0]
    module = sys.modules.get(top)
    file = getattr(module, "__file__", None)
    if file is None or not pathlib.Path(file).resolve().is_relative_to(pathlib.Path.cwd()):
        return None
    return file if top in importlib.metadata.packages_distributions() else None


def where(error: BaseException, fallback: type | None = None) -> str:
    """Returns ' (FILE:LINE)' for the innermost line of the user's code in an error's traceback, to append to a message.

    Args:
      fallback: the class to name if no frame is the user's, e.g. the experiment.

    Returns:
      The text, or '' if no line is known.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    own = frames(error)
    if own:
        return f" ({own[-1].filename}:{own[-1].lineno})"
    return "" if fallback is None else where_defined(fallback)


def where_defined(cls: type) -> str:
    """Returns ' (FILE:LINE)' of a class's definition, to append to a message; '' if the class has no source file."""
    try:
        file, (_, line) = inspect.getsourcefile(cls), inspect.getsourcelines(cls)
    except (TypeError, OSError):
        return ""
    return f" ({file}:{line})"
