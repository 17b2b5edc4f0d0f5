"""Finds the installed rooms. A room is a subpackage of `spmd_trainer`. Many are optional, such as `watch/` and `hf/`.

A training run uses the rooms that are installed, and works without the others.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from spmd_trainer.errors import UserError
from spmd_trainer.settings import Settings, settings_of

# {room: the rooms without which it can't be imported}
_NEEDED_BY = {"hf": ("decoder",)}


def missing(module: str, what: str = "this") -> str:
    """Returns an error message if a module's room (subpackage), or a room that it needs, isn't installed; otherwise ''.

    Args:
      module: the module's name below `spmd_trainer`, e.g. 'watch.run', which is in the room `watch`.
      what: the subject of the message, e.g. the flag that needs the module.
    """
    room, *_ = module.split(".")
    for needed in (room, *_NEEDED_BY.get(room, ())):
        if importlib.util.find_spec(f"spmd_trainer.{needed}") is None:
            return f"{what} needs spmd_trainer/{needed}/, which is not installed: install all of spmd-trainer"
    return ""


def find(module: str) -> ModuleType | None:
    """Imports and returns `spmd_trainer.MODULE`. Returns None if its room (subpackage) is not installed."""
    return None if missing(module) else importlib.import_module(f"spmd_trainer.{module}")


def check(module: str, what: str = "this") -> None:
    """Raises UserError if the room (subpackage) of `module` isn't installed. `what`: the feature that needs it, for the error."""
    if text := missing(module, what):
        raise UserError(text)


def check_settings(config: Settings) -> None:
    """Raises UserError if a setting was given that needs a room (optional subpackage) which is not installed."""
    for name, about in settings_of(type(config)).items():
        if about.room and getattr(config, name) != about.default:
            check(about.room, f"--{about.flag}")


def need(module: str, what: str = "this") -> ModuleType:
    """Imports and returns `spmd_trainer.MODULE`. `what` is the subject of the error message, e.g. a flag.

    Raises:
      UserError: the module's room (subpackage) is not installed.
    """
    check(module, what)
    return importlib.import_module(f"spmd_trainer.{module}")
