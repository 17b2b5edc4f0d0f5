"""Pauses Python's garbage collector while a run starts: imports and tracing create many objects, hardly any of them garbage."""

from __future__ import annotations

import gc

_paused = False


def pause() -> None:
    """Turns automatic collection off until `resume`. Does nothing if it is off already."""
    global _paused
    if gc.isenabled():
        gc.disable()
        _paused = True


def resume() -> None:
    """Turns automatic collection on again if `pause` turned it off.

    Freezes the existing objects (`gc.freeze`): later collections skip them, including the few that are garbage, and so interrupt
    the training steps for less time.
    """
    global _paused
    if _paused:
        gc.freeze()
        gc.enable()
        _paused = False
