"""Rooms outside of the core. A run uses those that are there, and trains without the others."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from spmd_trainer.errors import UserError


def find(module: str) -> ModuleType | None:
    """Imports a module of a room, e.g. 'watch.run'. Returns None if its whole room is absent."""
    room, *_ = module.split(".")
    if importlib.util.find_spec(f"spmd_trainer.{room}") is None:
        return None
    return importlib.import_module(f"spmd_trainer.{module}")


def need(module: str) -> ModuleType:
    """Imports a module of a room that was asked for.

    Raises:
      UserError: its room is absent.
    """
    found = find(module)
    if found is None:
        raise UserError(
            f"this needs spmd_trainer/{module.split('.')[0]}/, which is not installed: install all of spmd-trainer"
        )
    return found
