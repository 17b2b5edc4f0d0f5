"""Pauses Python's garbage collector while a run starts: imports and tracing create many objects, hardly any of them garbage."""

from __future__ import annotations

import gc

_paused = False


def pause() -> None:
    """Turns automatic collection off until `resume`. Does nothing if someone else has already turned it off."""
    global _paused
    if gc.isenabled():
        gc.disable()
        _paused = True


def resume() -> None:
    """Turns automatic collection on again if `pause` turned it off.

    Existing objects are frozen: later collections skip them, the few garbage objects included, and so pause the steps for less
    time.
    """
    global _paused
    if _paused:
        gc.freeze()
        gc.enable()
        _paused = False
