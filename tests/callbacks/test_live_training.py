"""What a training run tells a live display, and the memory of its devices."""

import types

import jax
import numpy as np
import pytest

from spmd_trainer.step.packing import Scalars
from spmd_trainer.training.live_status import Memory, live
from spmd_trainer.training.periodic import Schedule
from spmd_trainer.watch.progress import ProgressLines

SCHEDULE = Schedule(
    num_steps=20,
    saves=True,
    save_interval=8,
    eval_interval=5,
    evaluates_at_end=True,
    decode_interval=3,
    decodes_at_end=True,
    decode_start=7,
)


def test_what_is_due_next():
    assert SCHEDULE.upcoming(0) == {"save": 8, "eval": 5, "decode": 9}
    assert SCHEDULE.upcoming(9) == {"save": 16, "eval": 10, "decode": 12}
    assert SCHEDULE.upcoming(16) == {"save": 20, "eval": 20, "decode": 18}


def device(**stats):
    return types.SimpleNamespace(device_kind="cpu", memory_stats=lambda: stats or None)


class Run:
    """A run on two devices, as far as the progress lines look at it."""

    def __init__(self, *devices):
        self.num_steps, self.num_rows, self.began = 20, 4, 0.0
        self.batch = {"ids": jax.ShapeDtypeStruct((4, 8), np.int32)}
        self.mesh = types.SimpleNamespace(devices=np.array(devices), local_devices=devices)
        metadata = types.SimpleNamespace(
            num_params=lambda *, per_token=False: 10, num_frozen_params=lambda per_token=False: 0
        )
        self.partitioner = types.SimpleNamespace(metadata=metadata)
        self.task = types.SimpleNamespace(
            model=None,
            train=types.SimpleNamespace(
                log_train_output_interval_steps=2, summary_interval_steps=2, batch_ramp=None, sequence_ramp=None
            ),
        )
        self.activity = ("training step 1", 0.0)
        self.logged = {}
        self.log = self.logged.update


@pytest.fixture(autouse=True)
def no_run_stays():
    yield
    live.training = None


def trained(run):
    """The callback after two steps of a run."""
    lines = ProgressLines(SCHEDULE.upcoming)
    lines.on_open(run)
    assert live.training() is None
    lines.after_pause(run, 0)
    for step in (1, 2):
        lines.after_step(run, step, Scalars(1.5))
    return lines


def test_the_fullest_device_counts():
    run = Run(
        device(bytes_in_use=70, peak_bytes_in_use=75, bytes_limit=100),
        device(bytes_in_use=60, peak_bytes_in_use=90, bytes_limit=100),
    )
    trained(run)
    assert (run.logged["device_bytes_in_use"], run.logged["device_peak_bytes"]) == (70.0, 90.0)
    assert live.training().memory == Memory(70, 90, 100)


def test_a_backend_that_does_not_say_adds_nothing():
    run = Run(device(), device())
    trained(run)
    assert set(run.logged) == {"steps_per_sec", "tokens_per_sec"}
    assert live.training().memory is None


def test_a_display_sees_the_step_what_is_due_and_what_else_the_run_does():
    run = Run(device())
    lines = trained(run)
    status = live.training()
    assert (status.step, status.loss, status.activity) == (2, 1.5, "")
    assert status.due == {"save": 8, "eval": 5, "decode": 9}
    run.activity = ("saving step 2", 0.0)
    assert live.training().activity == "saving step 2"
    lines.on_end(run)
    assert live.training is None


def test_a_run_that_fails_leaves_nothing_behind():
    run = Run(device())
    trained(run).on_failure(run, RuntimeError())
    assert live.training is None
