"""Pauses Python's garbage collector while a run starts: imports and tracing create many objects, hardly any of them garbage."""

from __future__ import annotations

import gc

_paused = False


def pause() -> None:
    """Turns automatic garbage collection off until `resume` is called. Does nothing if it is off already."""
    global _paused
    if gc.isenabled():
        gc.disable()
        _paused = True


def resume() -> None:
    """Turns automatic garbage collection on again if `pause` turned it off.

    Also freezes the existing objects (`gc.freeze`), so that later collections skip them and interrupt training steps for less
    time. The few objects among them that are garbage stay in memory.
    """
    global _paused
    if _paused:
        gc.freeze()
        gc.enable()
        _paused = False
