"""What processes agree on: process 0's value, the first problem that any of them has, and being at the same place.

With one process all of it is free.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.experimental import multihost_utils

_MESSAGE_BYTES = 512


def from_process_0(value: int) -> int:
    """Returns process 0's value on every process."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def first_problem(found: str | None) -> str | None:
    """Returns the same problem on every process: that of the lowest process that has one, or None when none has."""
    if jax.process_count() == 1:
        return found
    message = np.zeros(_MESSAGE_BYTES, np.uint8)
    encoded = (found or "").encode()[:_MESSAGE_BYTES]
    message[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    for row in multihost_utils.process_allgather(message):
        text = bytes(row).rstrip(b"\0").decode(errors="replace")
        if text:
            return text
    return None


def barrier(name: str) -> None:
    """Waits until every process is here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
