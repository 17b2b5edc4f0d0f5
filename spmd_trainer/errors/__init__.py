"""Errors that a user can cause and fix."""

from __future__ import annotations

import errno
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from spmd_trainer.sharding.messages import did_you_mean

__all__ = [
    "MissingCompilerError",
    "UserError",
    "did_you_mean",
    "disk_is_full",
    "first_line",
    "first_paragraph",
    "not_a_config",
    "require_one_of",
]

# fiddle's errors where an unknown field is set, given to the config's constructor, or read.
_SET = re.compile(r"No parameter named '(\w+)' exists for (.+?); valid parameter names: ([\w, ]+)")
_GIVEN = re.compile(r"Cannot bind arguments to (.+?): got an unexpected keyword argument '(\w+)'")
_READ = re.compile(r"No parameter '(\w+)' has been set on <")
# How fiddle's messages write a class or a function.
_CALLABLE = re.compile(r"<(?:class '([^']+)'|function (\S+) at 0x\w+)>")


class UserError(ValueError):
    """An error that the user can fix, in the command, the experiment or the files. The message says how.

    Attributes:
      exit_status: exit status of a process that exits because of this error.
      leaves_in_order: True if no process has collective work left. The process then waits for the others before it exits,
        instead of telling them that it failed.
    """

    exit_status = 2
    leaves_in_order = False

    def __init__(self, *args: object, exit_status: int | None = None):
        """Stores the message. If given, `exit_status` overrides the class attribute."""
        super().__init__(*args)
        if exit_status is not None:
            self.exit_status = exit_status


# No space, an exceeded quota, a file-size limit, a disk that became read-only: the user can fix it, but not in the code.
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})


def disk_is_full(error: BaseException | None) -> bool:
    """Returns True for an OSError caused by a full disk, an exceeded quota or file-size limit, or a read-only file system."""
    return isinstance(error, OSError) and error.errno in _NO_ROOM


class MissingCompilerError(UserError):
    """The compiler for a topology's chips is not installed."""


def first_paragraph(error: BaseException) -> str:
    """Returns an error's message without the configuration that fiddle appends.

    If the error is about a field that a config doesn't have, the returned message suggests fields with similar names.
    """
    text = str(error).split("Fiddle context:")[0].strip()
    if (unknown := _unknown_field(error, text)) is None:
        return text
    name, owner, known = unknown
    return f"{owner.removeprefix('spmd_trainer.')} has no field {name!r}{did_you_mean(name, known)}"


def first_line(error: BaseException) -> str:
    """Returns the first line of `first_paragraph`, or the error's class if it has no text."""
    return first_paragraph(error).partition("\n")[0] or type(error).__name__


def _unknown_field(error: BaseException, text: str) -> tuple[str, str, Sequence[str]] | None:
    """Parses fiddle's error about an unknown field of a config.

    Returns:
      (the unknown field, full name of the configured class or function, its known fields); None for any other error.
    """
    if match := _SET.match(text):
        return match[1], _name(match[2]), match[3].split(", ")
    if match := _GIVEN.match(text):
        owner = _name(match[1])
        return match[2], owner, _parameters(_imported(owner))
    if match := _READ.match(text):
        # Python notes on an AttributeError which config it is about.
        called = getattr(getattr(error, "obj", None), "__fn_or_cls__", None)
        known = _parameters(called)
        if called is not None and match[1] not in known:
            return match[1], f"{called.__module__}.{called.__qualname__}", known
    return None


def _name(described: str) -> str:
    match = _CALLABLE.fullmatch(described)
    return (match[1] or match[2]) if match else described


def _imported(name: str) -> Callable[..., Any] | None:
    """Returns the class or function with a full name such as 'praxis.layers.linears.Linear'; None if it is not imported."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:end]))
        if found is not None:
            for part in parts[end:]:
                found = getattr(found, part, None)
            return found if callable(found) else None
    return None


def _parameters(called: Callable[..., Any] | None) -> list[str]:
    if called is None:
        return []
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):  # some classes written in C have no signature
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def not_a_config(field: str, value: object) -> UserError:
    """Returns the UserError for a field that holds a class or an instance instead of a config of the class."""
    name = getattr(value, "__name__", None)  # of a class or a function
    what = name or f"{type(value).__name__}(...), already made"
    return UserError(
        f"{field} is {what}; write Config({name or type(value).__name__}, ...) with Config = praxis.pax_fiddle.Config"
    )


def require_one_of(field: str, value: object, allowed: Sequence[str]) -> None:
    """Raises UserError if `value` is not one of the allowed values of the setting `field`."""
    if value not in allowed:
        listed = " or ".join(filter(None, (", ".join(map(repr, allowed[:-1])), repr(allowed[-1]))))
        raise UserError(f"{field}={value!r}; set it to {listed}{did_you_mean(str(value), allowed, otherwise='')}")
