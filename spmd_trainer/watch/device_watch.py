"""Looks now and then at how long the devices take: for a training step, and for a small program without collectives.

In a synchronous job the devices of all processes finish a step together, because they wait for each other in its collectives. So
a step's time says how fast the slowest is, not which one. A small program that every process runs alone does: its time grows
where a device is throttled, shared or damaged. MegaScale (Jiang et al., 2024, section 5) compares the times of forward
computations of all machines in the same way.
"""

from __future__ import annotations

import collections
import hashlib
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

# How many of its last looks a watch keeps.
KEPT = 20
# All looks together may take this share of the steps' time.
_SHARE = 0.002
_CLOSE_SECONDS = 2.0
_MATRIX, _PRODUCTS = 2048, 8
_HASHED = bytes(1 << 16)

Clock = Callable[[], float]


class DeviceProbe:
    """A chain of matrix products, 0.14 TFLOP in bfloat16, on each of some accelerators: half a millisecond on a current one."""

    def __init__(self, devices: Sequence[jax.Device], size: int = _MATRIX):
        matrix = jnp.eye(size, dtype=jnp.bfloat16)
        self._matrices = [jax.device_put(matrix, device) for device in devices]
        self._programs = [jax.jit(_products).lower(one).compile() for one in self._matrices]

    def dispatch(self) -> list[jax.Array]:
        """Hands the program to the devices, which begin it when they have finished what they were handed before."""
        return [program(matrix) for program, matrix in zip(self._programs, self._matrices, strict=True)]

    def finish(self, arrays: Sequence[jax.Array]) -> None:
        """Waits until the slowest device is done."""
        jax.block_until_ready(arrays)


class HostProbe:
    """Hashes 64 KiB on the calling thread: what a core of this host takes for the same work.

    Host devices run their programs on the host's cores, in threads that independent programs would share with the training step.
    So nothing is handed to the devices.
    """

    def dispatch(self) -> list[jax.Array]:
        return []

    def finish(self, arrays: Sequence[jax.Array]) -> None:
        """Does the work, without Python's lock."""
        del arrays
        hashlib.sha256(_HASHED)


def _products(matrix: jax.Array) -> jax.Array:
    product = matrix
    for _ in range(_PRODUCTS):
        product = product @ matrix
    return product[0, 0]


class DeviceWatch:
    """Looks at some of the steps from a thread of its own, so rarely that it takes 0.2% of the time. The loop never waits for it.

    Attributes:
      steps: seconds that the devices took for each of the last steps looked at, from when they could begin to the result.
      probes: seconds of the small program after each of them.
      dry: 1.0 for each of them that was dispatched when the devices had finished the step before, else 0.0. Empty for host
        devices: what the host does takes cores from them, so they hide nothing.
    """

    def __init__(self, probe: DeviceProbe | HostProbe, clock: Clock = time.monotonic):
        self.steps: collections.deque[float] = collections.deque(maxlen=KEPT)
        self.probes: collections.deque[float] = collections.deque(maxlen=KEPT)
        self.dry: collections.deque[float] = collections.deque(maxlen=KEPT)
        self._probe = probe
        self._clock = clock
        self._every = self._left = 1
        self._is_looking = False
        self._looks: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="device-watch", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, devices: Sequence[jax.Device]) -> DeviceWatch:
        return cls(HostProbe() if devices[0].platform == "cpu" else DeviceProbe(devices))

    def after_dispatch(self, began: float, before: Any, packed: Any, step_seconds: float) -> None:
        """Looks at a step that has just been dispatched, if it is time to.

        Args:
          began: when its dispatch began, by the clock.
          before: an output of the step before, a tree of arrays.
          packed: an output of this step.
          step_seconds: about how long a step takes.
        """
        self._left -= 1
        if self._left > 0 or self._is_looking:
            return
        entered = self._clock()
        self._left = self._every
        self._is_looking = True
        is_dry = all(leaf.is_ready() for leaf in jax.tree.leaves(before))
        probes = self._probe.dispatch()
        self._looks.put((began, None if is_dry else before, packed, probes, step_seconds, self._clock() - entered))

    def close(self) -> None:
        """Ends the thread, unless the devices hang."""
        self._looks.put(())
        self._thread.join(_CLOSE_SECONDS)

    def _work(self) -> None:
        while look := self._looks.get():
            try:
                self._look(*look)
            except Exception:  # the step has failed, and the loop, which waits for the same arrays, says so
                return
            del look  # its arrays
            self._is_looking = False

    def _look(self, began: float, before: Any, packed: Any, probes: Any, step_seconds: float, spent: float) -> None:
        cpu_began = time.thread_time()
        if before is not None:
            jax.block_until_ready(before)
            began = max(began, self._clock())
        jax.block_until_ready(packed)
        done = self._clock()
        self._probe.finish(probes)
        probe_seconds = self._clock() - done
        self.steps.append(done - began)
        self.probes.append(probe_seconds)
        if probes:
            self.dry.append(float(before is None))
        # On host devices, the probe is among the thread's own work.
        cost = spent + time.thread_time() - cpu_began + (probe_seconds if probes else 0.0)
        self._every = max(1, math.ceil(cost / max(_SHARE * step_seconds, 1e-9)))
