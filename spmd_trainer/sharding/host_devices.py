"""Prevents deadlocks on host (CPU) devices, where independent programs with collectives must not run at the same time.

All host devices of a process share a thread pool with one thread per device. At a collective, each device's thread waits for
the other devices. If some threads run a later program meanwhile, a device of the earlier program may never get a thread
(jaxlib 0.10.2). Training steps are safe, because each step needs the state from the previous step.

Within a program, independent collectives can deadlock too, because they start in any order: see `hold_until_known`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

_Arrays = TypeVar("_Arrays")


def finish_on_host_devices(arrays: _Arrays) -> _Arrays:
    """Waits for a program's outputs if they are on several host (CPU) devices of this process. Never waits for accelerators.

    To prevent deadlocks, call it between programs that don't depend on each other.

    Args:
      arrays: a pytree of jax.Arrays.

    Returns:
      `arrays` itself.
    """
    leaves = jax.tree.leaves(arrays)
    if leaves:
        devices = leaves[0].sharding.addressable_devices
        if len(devices) > 1 and next(iter(devices)).platform == "cpu":
            jax.block_until_ready(leaves)
    return arrays


def hold_until_known(earlier: Sequence[jax.Array], *later: jax.Array) -> tuple[jax.Array, ...]:
    """On host (CPU) devices, makes computations on `later` wait until all of `earlier` are computed. Returns `later`.

    Use it under jit. XLA's CPU runtime starts a collective as soon as the loops before it have started, and independent
    collectives in any order. Some devices may then wait in one collective and other devices in another, forever, unless the
    later collective depends on results of the earlier one. See `docs/partitioner_faults.md`.
    """
    if not _on_host_devices():
        return later
    known = sum(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(()).astype(jnp.float32) for x in earlier)
    never = jnp.less(lax.stop_gradient(known), -jnp.inf)  # XLA doesn't know that it is False
    return tuple(known_after(never, x) for x in later)


def known_after(never: jax.Array, array: jax.Array) -> jax.Array:
    """Returns `array` unchanged, but makes XLA compute the bool scalar `never` first. It is False, but XLA can't infer this."""
    return lax.select(never, jnp.zeros_like(array), array)


def _on_host_devices() -> bool:
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    return bool(device.platform == "cpu")
