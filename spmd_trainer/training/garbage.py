"""Pauses Python's garbage collector while a run starts: imports and tracing create many objects, hardly any of them garbage."""

from __future__ import annotations

import gc

_resting = False


def rest() -> None:
    """Turns automatic collection off until `resume`. Does nothing if someone else has already turned it off."""
    global _resting
    if gc.isenabled():
        gc.disable()
        _resting = True


def resume() -> None:
    """Turns automatic collection on again if `rest` turned it off.

    Existing objects are frozen: later collections skip them, the few garbage objects included, and so pause the steps for less
    time.
    """
    global _resting
    if _resting:
        gc.freeze()
        gc.enable()
        _resting = False
