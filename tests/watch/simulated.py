"""Simulated processes of a synchronous job: what each one's `StepParts.window` would tell."""

from __future__ import annotations

import collections
from collections.abc import Mapping

import numpy as np

from spmd_trainer.watch.device_watch import KEPT
from spmd_trainer.watch.step_parts import Parts, StepParts, spread


class Processes:
    """Takes steps whose parts are drawn at random, around 20 ms of input, 10 ms of dispatch and 100 ms of devices.

    Attributes:
      parts: by process, its `StepParts`.
    """

    MEDIANS: Mapping[str, float] = {"input": 0.02, "dispatch": 0.01, "device": 0.1, "probe": 0.0005}

    def __init__(self, count: int, seed: int, noise: float, medians: Mapping[str, float] = MEDIANS):
        """`noise` is the standard deviation of the logarithm of each time."""
        self.random = np.random.default_rng(seed)
        self.count, self.noise, self.medians = count, noise, medians
        self.parts = [StepParts() for _ in range(count)]
        self.step = 0
        self._device = [collections.deque(maxlen=KEPT) for _ in range(count)]
        self._probe = [collections.deque(maxlen=KEPT) for _ in range(count)]

    def take(
        self, factors: Mapping[tuple[int, str], float], more: Mapping[tuple[int, str], float] | None = None
    ) -> None:
        """Takes a step. {(process, part): factor} and {(process, part): seconds more} slow it down."""
        self.step += 1
        load = 3.0 if self.random.random() < 0.05 else 1.0  # a burst of load on all of them
        times = {}
        for name, median in self.medians.items():
            drawn = median * load * np.exp(self.noise * self.random.standard_normal(self.count))
            pauses = self.random.random(self.count) < 0.03  # a garbage collection, a slow disk
            drawn += pauses * self.random.exponential(0.1, self.count)
            for index in range(self.count):
                drawn[index] *= factors.get((index, name), 1.0)
                drawn[index] += (more or {}).get((index, name), 0.0)
            times[name] = drawn
        # Devices wait for the slowest host, and for the slowest of them.
        arrived = times["input"] + times["dispatch"]
        finished = (arrived + times["device"]).max()
        for index in range(self.count):
            one = Parts(self.step, times["input"][index], times["dispatch"][index], finished)
            self.parts[index]._steps.append(one)
            self._device[index].append(finished - arrived[index])
            self._probe[index].append(times["probe"][index])

    def window(self, process: int) -> dict[str, object] | None:
        """Returns what a process tells now."""
        told = self.parts[process].window()
        return told and told | {
            "host": f"h{process}",
            "device": spread(self._device[process]),
            "probe": spread(self._probe[process]),
            "dry": 1.0,
        }

    def windows(self) -> dict[int, dict[str, object] | None]:
        """Returns what all of them tell now."""
        return {index: self.window(index) for index in range(self.count)}
