"""Measures now and then how long the devices take for a training step, and for a small program without collectives.

In a synchronous job the devices of all processes finish a step together, because they wait for each other in its collectives. So
a step's time shows how fast the slowest device is, but not which device that is. A small program that every process runs alone
shows this: the program takes longer on a device that is throttled, shared or damaged. MegaScale (Jiang et al., 2024, section 5)
compares the times of forward computations of all machines in the same way.
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

# Number of measurements that a `DeviceWatch` keeps: the last ones.
KEPT = 20
# All measurements together may take this share of the training time.
_SHARE = 0.002
_CLOSE_SECONDS = 2.0
_MATRIX, _PRODUCTS = 2048, 8
_HASHED = bytes(1 << 16)

Clock = Callable[[], float]


class DeviceProbe:
    """Probe for accelerators: a chain of bfloat16 matrix products on each device, 0.14 TFLOP (0.5 ms on a current device)."""

    def __init__(self, devices: Sequence[jax.Device], size: int = _MATRIX):
        matrix = jnp.eye(size, dtype=jnp.bfloat16)
        self._matrices = [jax.device_put(matrix, device) for device in devices]
        self._programs = [jax.jit(_products).lower(one).compile() for one in self._matrices]

    def dispatch(self) -> list[jax.Array]:
        """Dispatches the probe to the devices, which run it after all programs that were dispatched earlier."""
        return [program(matrix) for program, matrix in zip(self._programs, self._matrices, strict=True)]

    def finish(self, arrays: Sequence[jax.Array]) -> None:
        """Waits until all devices are done."""
        jax.block_until_ready(arrays)


class HostProbe:
    """Probe for host (CPU) devices: hashes 64 KiB on the calling thread.

    Host devices run their programs on the host's cores, in threads that independent programs would share with the training step.
    So nothing is dispatched to the devices.
    """

    def dispatch(self) -> list[jax.Array]:
        return []

    def finish(self, arrays: Sequence[jax.Array]) -> None:
        """Hashes 64 KiB, without holding the GIL."""
        del arrays
        hashlib.sha256(_HASHED)


def _products(matrix: jax.Array) -> jax.Array:
    product = matrix
    for _ in range(_PRODUCTS):
        product = product @ matrix
    return product[0, 0]


class DeviceWatch:
    """Measures some training steps in a separate thread. This takes 0.2% of the time, and the training loop never waits for it.

    Attributes:
      steps: device seconds of each of the last measured steps. A step's time begins when its dispatch begins or the previous
        step is done, whichever is later, and ends when its result is ready.
      probes: seconds that the probe took after each of these steps.
      dry: for each of these steps, 1.0 if the devices were idle when the step was dispatched, else 0.0. Empty for host (CPU)
        devices, whose work never hides the host's own work, because both share the cores.
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
        """Measures the step that has just been dispatched, if a measurement is due.

        Args:
          began: the time at which the step's dispatch began, in seconds of the clock.
          before: an output of the previous step: a pytree of arrays.
          packed: an output of this step: a pytree of arrays.
          step_seconds: approximate duration of a step in seconds.
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
        """Ends the thread. If the devices hang, stops waiting for the thread after 2 seconds."""
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
