"""The parts of a step: in a real training run, and with a clock of the test's own."""

from __future__ import annotations

import statistics
import time

import jax
import jax.numpy as jnp
import pytest
from praxis import pax_fiddle

from spmd_trainer import experiment_registry
from spmd_trainer.callbacks import Callback
from spmd_trainer.experiments.lm.stdlib import StdlibBytesTiny
from spmd_trainer.inputs import text
from spmd_trainer.training import train
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import make_run_config
from spmd_trainer.watch import run as watch_run
from spmd_trainer.watch.device_watch import DeviceProbe, DeviceWatch, HostProbe
from spmd_trainer.watch.step_parts import WINDOW, Parts, StepParts, spread

SLOW_SECONDS = 0.1
STEPS = 45


class SlowInput(text.TextInput):
    """Bytes of text from a slow disk, from a point on."""

    given = 0

    def get_next(self):
        SlowInput.given += 1
        if SlowInput.given > 25:
            time.sleep(SLOW_SECONDS)
        return super().get_next()


class Spins(Callback):
    """Keeps the host busy after each dispatch."""

    def after_dispatch(self, run, step):
        until = time.monotonic() + SLOW_SECONDS
        while step > 25 and time.monotonic() < until:
            pass


@experiment_registry.register
class WithSlowInput(StdlibBytesTiny):
    """Its training input is slow."""

    def datasets(self):
        training, *others = super().datasets()
        pax_fiddle.fdl.update_callable(training, SlowInput)
        return [training, *others]


@pytest.fixture
def taken(tmp_path, monkeypatch):
    """Trains; returns the parts of the steps, and what the watch has seen."""

    def run(experiment=StdlibBytesTiny, callbacks=()):
        kept = []

        def keep(repeats):
            watch = DeviceWatch.of(jax.local_devices())
            kept.append((StepParts(repeats, watch), watch))
            return kept[0][0]

        monkeypatch.setattr(watch_run, "StepParts", keep)
        SlowInput.given = 0
        config = make_run_config(
            experiment,
            tmp_path / "run",
            overrides=(f"task.train.num_train_steps={STEPS}", "task.train.log_train_output_interval_steps=1"),
            eval_on_test=False,
            enable_checkpoint_saving=False,
            callbacks=callbacks,
        )
        train.train(Job.build(config))
        return kept[0]

    return run


def medians(parts: list[Parts]) -> Parts:
    """Returns the median of each part over the last steps."""
    return Parts(*(statistics.median(values) for values in zip(*parts[-15:], strict=True)))


@pytest.mark.full
def test_the_devices_time_is_neither_input_nor_dispatch(taken):
    parts, watch = taken()
    steps = parts.steps()
    assert [one.step for one in steps] == list(range(1, STEPS + 1))
    for one in steps:
        assert 0 <= one.input + one.dispatch <= one.whole + 1e-6
    usual = medians(steps)
    assert usual.input + usual.dispatch < 0.7 * usual.whole
    # The devices' own time fills most of a step.
    assert 0.4 * usual.whole < statistics.median(watch.steps) < 1.6 * usual.whole
    assert len(watch.probes) == len(watch.steps)
    assert not watch.dry
    window = parts.window()
    assert window["windows"][-1]["step"] == STEPS  # a multiple of 5
    assert window["windows"][-1]["whole"] == spread(one.whole for one in steps[-WINDOW:])


@pytest.mark.full
def test_a_slow_input_is_input(taken):
    parts, _ = taken(WithSlowInput)
    usual = medians(parts.steps())
    assert usual.input > 0.5 * SLOW_SECONDS
    assert usual.input > 5 * usual.dispatch


@pytest.mark.full
def test_a_callback_that_spins_is_dispatch(taken):
    parts, watch = taken(callbacks=[Spins()])
    usual = medians(parts.steps())
    assert SLOW_SECONDS <= usual.dispatch < usual.whole
    assert usual.dispatch > 5 * usual.input
    assert spread(watch.probes)[1] < SLOW_SECONDS / 5  # a busy host is no slow device


class Clock:
    """A clock that the test turns."""

    now = 0.0

    def __call__(self):
        return self.now


def test_what_the_loop_waits_for_others_is_not_its_own():
    clock, cpu = Clock(), Clock()
    parts = StepParts(clock=clock, cpu_clock=cpu)
    report = parts.reports(lambda step, scalars: setattr(clock, "now", clock.now + 0.5))
    parts.begin(0.0, 7.0)
    clock.now = 3.0
    parts.took_input(3.0, 9.0)  # 2 of the 3 seconds were other processes' input
    parts.dispatching()
    clock.now, cpu.now = 7.0, 0.25  # the call was blocked for 3.75 s
    parts.dispatched(1, None)
    clock.now = 8.0
    parts.waits()
    clock.now = 18.0
    report(0, None)
    clock.now += 0.125
    parts.end()
    parts.end()  # a pause
    assert parts.steps() == [Parts(1, 1.0, 0.25 + 1.0 + 0.5 + 0.125, 18.625)]


def test_a_step_without_a_batch_is_none():
    parts = StepParts()
    parts.begin(0.0, 0.0)
    parts.took_input(1.0, 0.0)
    parts.end()
    assert parts.steps() == []
    assert parts.window() is None


@pytest.mark.parametrize("probe", [HostProbe, lambda: DeviceProbe(jax.devices(), size=16)], ids=["host", "device"])
def test_a_watch_looks_rarely_and_does_not_hold_up_the_loop(probe):
    watch = DeviceWatch(probe())
    one, other = jnp.zeros(3), jnp.ones(3)
    began = time.monotonic()
    # The second look begins when it may not be known yet what the first one costs.
    while len(watch.probes) < 2 and time.monotonic() < began + 60:
        watch.after_dispatch(time.monotonic(), one, other, 1e-4)
        time.sleep(0.001)
    for _ in range(10):  # a probe takes a fraction of such a step, so that the next look is hundreds of steps away
        watch.after_dispatch(time.monotonic(), one, other, 1e-4)
        time.sleep(0.001)
    assert len(watch.probes) == 2
    watch.close()
    assert all(seconds > 0 for seconds in watch.probes)


def test_a_step_that_failed_ends_the_watch_quietly():
    class Failed:
        def is_ready(self):
            return True

        def block_until_ready(self):
            raise RuntimeError("a device is lost")

    watch = DeviceWatch(HostProbe())
    watch.after_dispatch(0.0, (), Failed(), 1.0)
    watch.close()
    assert not watch.steps
