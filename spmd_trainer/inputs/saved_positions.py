"""Saved positions of inputs other than `IndexedInput`: integers, with the settings that decide their meaning."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence


def encode(position: Sequence[int], settings: Mapping[str, object]) -> bytes:
    """Serialises a position together with the settings (JSON values) that decide the rows."""
    return json.dumps({"position": list(position), "data": dict(settings)}, sort_keys=True).encode()


def decode(state: bytes, settings: Mapping[str, object], *, count: int, error: Callable[[str], Exception]) -> list[int]:
    """Reads a position of `count` integers.

    Args:
      state: from `encode`.
      settings: the input's current settings.
      count: number of integers.
      error: makes the input's error of a message.

    Raises:
      Exception: from `error`, if `state` is malformed or was saved with other settings.
    """
    try:
        saved = json.loads(state)
        position, data = [int(number) for number in saved["position"]], dict(saved["data"])
        if len(position) != count:
            raise ValueError(f"{len(position)} numbers")
    except (ValueError, KeyError, TypeError) as cause:
        raise error(f"this is not a saved position of this input: {state[:80]!r}") from cause
    changed = [key for key in sorted({*data, *settings}) if data.get(key) != settings.get(key)]
    if changed:
        what = ", ".join(f"{key} was {data.get(key)} and is {settings.get(key)}" for key in changed)
        raise error(
            f"the saved position belongs to other batches: {what}. Put these back as they were, or start the input from its "
            "beginning with task.train.enable_input_checkpointing=False"
        )
    return position
