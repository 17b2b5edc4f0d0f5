"""Host devices run one program with collectives at a time: XLA deadlocks if several independent ones are in flight.

All host devices of a process share one pool of threads, as many as there are devices. In a program, the thread of each device
waits at a collective for those of the other devices. If a thread of the pool runs a later program meanwhile, a device of the
earlier one may never get a thread (jaxlib 0.10.2). Training steps are safe, because each needs the state of the one before.
"""

from __future__ import annotations

from typing import TypeVar

import jax

_Arrays = TypeVar("_Arrays")


def finish_on_host_devices(arrays: _Arrays) -> _Arrays:
    """Waits for a program's outputs if they are on several host devices of this process. Accelerators go on.

    Call it between programs that don't depend on each other.

    Args:
      arrays: outputs of the program, a tree of jax.Arrays.

    Returns:
      The same outputs.
    """
    leaves = jax.tree.leaves(arrays)
    if leaves:
        devices = leaves[0].sharding.addressable_devices
        if len(devices) > 1 and next(iter(devices)).platform == "cpu":
            jax.block_until_ready(leaves)
    return arrays
