"""Finds the rooms that are there. Rooms are the package's folders; many are optional, such as `watch/` and `hf/`.

A run uses those that are there, and trains without the others.
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
    """Returns a message if the whole room of a module, e.g. 'watch.run', or one that it needs, is absent; '' if not."""
    room, *_ = module.split(".")
    for needed in (room, *_NEEDED_BY.get(room, ())):
        if importlib.util.find_spec(f"spmd_trainer.{needed}") is None:
            return f"{what} needs spmd_trainer/{needed}/, which is not installed: install all of spmd-trainer"
    return ""


def find(module: str) -> ModuleType | None:
    """Imports a module of a room. Returns None if its whole room is absent."""
    return None if missing(module) else importlib.import_module(f"spmd_trainer.{module}")


def check(module: str, what: str = "this") -> None:
    """Raises UserError if the room of a module is absent, which `what` was given for."""
    if text := missing(module, what):
        raise UserError(text)


def check_settings(config: Settings) -> None:
    """Raises UserError if the room of a setting that was given is absent."""
    for name, about in settings_of(type(config)).items():
        if about.room and getattr(config, name) != about.default:
            check(about.room, f"--{about.flag}")


def need(module: str, what: str = "this") -> ModuleType:
    """Imports a module of a room that `what` needs.

    Raises:
      UserError: its room is absent.
    """
    check(module, what)
    return importlib.import_module(f"spmd_trainer.{module}")
