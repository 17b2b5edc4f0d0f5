"""Experiments in which one process becomes slow on purpose after some steps. SLOW_PROCESS says which one."""

from __future__ import annotations

import os
import statistics
import time

import jax
from praxis import pax_fiddle

from spmd_trainer import experiment_registry
from spmd_trainer.callbacks import Callback
from spmd_trainer.experiments.lm.stdlib import StdlibBytesTiny
from spmd_trainer.inputs import text

PROCESS = "SLOW_PROCESS"
# The last step before it becomes slow. It measures its steps until then.
EVEN_STEPS = 60


def is_slow(process: int) -> bool:
    return os.environ.get(PROCESS) == str(process)


class Spins(Callback):
    """A busy loop after each dispatch, which takes 0.3 of a step."""

    def __init__(self):
        self._began = 0.0
        self._steps: list[float] = []

    def after_dispatch(self, run, step):
        now, began = time.monotonic(), self._began
        if not is_slow(jax.process_index()):
            return
        if step <= EVEN_STEPS:
            if step > EVEN_STEPS // 2:
                self._steps.append(now - began)
        else:
            until = now + 0.3 * statistics.median(self._steps)
            while time.monotonic() < until:
                pass
        self._began = time.monotonic()


@experiment_registry.register
class CallbackSpins(StdlibBytesTiny):
    """A callback of one process spins."""

    def task(self):
        task_p = super().task()
        task_p.train.callbacks = [pax_fiddle.Config(Spins)]
        return task_p


class SlowInput(text.TextInput):
    """Bytes of text, from a slow disk on one process."""

    def __post_init__(self):
        super().__post_init__()
        self._given = 0
        self._asked: list[float] = []

    def get_next(self):
        self._given += 1
        if is_slow(self.infeed_host_index):
            self._asked.append(time.monotonic())
            if self._given > EVEN_STEPS:
                # A prefetcher has two batches ready, so it asks for one a step.
                usual = statistics.median(b - a for a, b in zip(self._asked[30:50], self._asked[31:51], strict=True))
                time.sleep(1.6 * usual)
        return super().get_next()


@experiment_registry.register
class InputIsSlow(StdlibBytesTiny):
    """The training input of one process becomes slow."""

    def datasets(self):
        training, *others = super().datasets()
        pax_fiddle.fdl.update_callable(training, SlowInput)
        return [training, *others]
