"""Host devices run one program with collectives at a time: XLA deadlocks if several independent ones are in flight.

All host devices of a process share one pool with a thread per device. At a collective, each device's thread waits for the
others. If a thread runs a later program meanwhile, a device of the earlier program may never get a thread (jaxlib 0.10.2).
Training steps are safe, because each needs the state of the one before.
"""

from __future__ import annotations

from typing import TypeVar

import jax

_Arrays = TypeVar("_Arrays")


def finish_on_host_devices(arrays: _Arrays) -> _Arrays:
    """Waits for a program's outputs if they are on several host devices of this process. Does not wait for accelerators.

    Call it between programs that don't depend on each other.

    Returns the same tree of jax.Arrays.
    """
    leaves = jax.tree.leaves(arrays)
    if leaves:
        devices = leaves[0].sharding.addressable_devices
        if len(devices) > 1 and next(iter(devices)).platform == "cpu":
            jax.block_until_ready(leaves)
    return arrays
