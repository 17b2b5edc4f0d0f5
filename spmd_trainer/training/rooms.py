"""Finds the installed rooms. A room is a subpackage of `spmd_trainer`; many are optional, such as `watch/` and `hf/`.

A run uses the rooms that are installed, and trains without the others.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from spmd_trainer.errors import UserError
from spmd_trainer.settings import Settings, settings_of

# Rooms that a room can't be imported without.
_NEEDED_BY = {"hf": ("decoder",)}


def missing(module: str, what: str = "this") -> str:
    """Returns an error message if the room of a module, e.g. 'watch.run', or a room that it needs is not installed; else ''.

    Args:
      what: the subject of the message, e.g. the flag that needs the room.
    """
    room, *_ = module.split(".")
    for needed in (room, *_NEEDED_BY.get(room, ())):
        if importlib.util.find_spec(f"spmd_trainer.{needed}") is None:
            return f"{what} needs spmd_trainer/{needed}/, which is not installed: install all of spmd-trainer"
    return ""


def find(module: str) -> ModuleType | None:
    """Imports and returns a module of a room. Returns None if the room is not installed."""
    return None if missing(module) else importlib.import_module(f"spmd_trainer.{module}")


def check(module: str, what: str = "this") -> None:
    """Raises UserError if the room of a module is not installed; the message says that `what` needs it."""
    if text := missing(module, what):
        raise UserError(text)


def check_settings(config: Settings) -> None:
    """Raises UserError if a setting was given whose room is not installed."""
    for name, about in settings_of(type(config)).items():
        if about.room and getattr(config, name) != about.default:
            check(about.room, f"--{about.flag}")


def need(module: str, what: str = "this") -> ModuleType:
    """Imports and returns a module of a room. `what` is the subject of the error message, see `missing`.

    Raises:
      UserError: the room is not installed.
    """
    check(module, what)
    return importlib.import_module(f"spmd_trainer.{module}")
