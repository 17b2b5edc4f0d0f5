"""--check_repeat_every: a step that is taken twice gives the same bits, or the run ends and names what differed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trained_helpers
from facts import assert_names, raises_naming
from jax import lax
from replica_helpers import flipped

from spmd_trainer.training import train
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import make_run_config
from spmd_trainer.training.summary_writers import read_metrics
from spmd_trainer.watch import repeat_check
from spmd_trainer.watch.repeat_check import RepeatCheck, RepeatError
from spmd_trainer.watch.replica_check import ReplicaError


def job(directory, **policy):
    fields = ("task.train.num_train_steps=4", "task.train.summary_interval_steps=1")
    return trained_helpers.make_job(directory, fields=fields, **policy)


def losses(directory):
    return {step: record["loss"] for step, record in read_metrics(directory, "train").items()}


@pytest.mark.full
def test_a_sound_run_takes_the_steps_that_it_takes_without_the_check(tmp_path):
    plain = train.train(job(tmp_path / "plain"))
    checked = train.train(job(tmp_path / "checked", check_repeat_every=2))
    assert losses(tmp_path / "checked") == losses(tmp_path / "plain")
    assert len(losses(tmp_path / "plain")) == 4
    for one, other in zip(jax.tree.leaves(plain.state), jax.tree.leaves(checked.state), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


class Fails:
    """A compiled step whose results of one call hold another bit on one device."""

    def __init__(self, fn, call):
        self.fn, self.call, self.calls = fn, call, 0

    def __call__(self, state, key, batch):
        self.calls += 1
        state, packed = self.fn(state, key, batch)
        if self.calls == self.call:
            state = jax.tree_util.tree_map_with_path(
                lambda path, x: flipped(x, 5) if "softmax" in jax.tree_util.keystr(path) and x.ndim == 2 else x, state
            )
        return state, packed


@pytest.mark.full
@pytest.mark.parametrize(("call", "step"), [(2, 2), (3, 2), (5, 4)])  # the calls: steps 1, 2, 2, 3, 4, 4
def test_a_device_that_stores_another_bit_once_is_named_with_the_variable(tmp_path, monkeypatch, call, step):
    around = RepeatCheck.around
    monkeypatch.setattr(RepeatCheck, "around", lambda self, fn, run: around(self, Fails(fn, call), run))
    with pytest.raises(RepeatError, match=rf"step {step}, taken twice(?s:.*)softmax\S+: on device 5 \(") as raised:
        train.train(job(tmp_path, check_repeat_every=2))
    assert_names(raised.value, "Device 5 (cpu, process 0) computed")
    assert raised.value.exit_status == 6
    assert not (tmp_path / "checkpoints" / "4").exists()


@pytest.mark.full
def test_a_program_that_is_not_deterministic_is_found(tmp_path, monkeypatch):
    """A host callback in the step counts its calls."""
    count = iter(range(1000))
    mean = jax.value_and_grad

    def uneven(function, **kwargs):
        def with_noise(*args):
            (loss, aux), grads = mean(function, **kwargs)(*args)
            noise = jax.pure_callback(lambda: np.float32(next(count) * 1e-3), jax.ShapeDtypeStruct((), jnp.float32))
            return (loss, aux), jax.tree.map(lambda g: g + noise if g.ndim else g, grads)

        return with_noise

    monkeypatch.setattr(jax, "value_and_grad", uneven)
    with raises_naming(RepeatError, "on all 8 devices", "none can be"):
        train.train(job(tmp_path, check_repeat_every=1))


@pytest.mark.full
def test_a_wrong_reduction_in_the_program_of_one_device_is_found_by_comparing_copies(tmp_path, monkeypatch):
    """The mean over the gradients is wrong on device 3: the devices' copies part, and repeating the step can't show it."""
    pmean = lax.pmean

    def wrong_on_3(x, axes):
        wrong = (lax.axis_index(axes) == 3).astype(jnp.float32) * 1e-3
        return jax.tree.map(lambda y: y + wrong.astype(y.dtype) if y.ndim else y, pmean(x, axes))

    monkeypatch.setattr(lax, "pmean", wrong_on_3)
    config = make_run_config("synthetic.shard_map.ShardMapDataParallelTiny", tmp_path, check_replicas_every=1)
    with raises_naming(ReplicaError, "step 1: devices", "copy on device 3 ("):
        train.train(Job.build(config))


def test_nothing_is_compared_when_it_is_off(monkeypatch):
    monkeypatch.setattr(repeat_check, "device_checksums", None)
    step = len
    assert RepeatCheck(0).around(step, None) is step


def compared(differing):
    """The error for devices with another checksum, by variable."""
    first = {path: dict.fromkeys(jax.devices(), (1, 1)) for path in differing}
    second = {path: {d: (2, 2) if d.id in ids else (1, 1) for d in jax.devices()} for path, ids in differing.items()}
    with pytest.raises(RepeatError) as raised:
        repeat_check._compare(first, second, 3)
    return str(raised.value)


def test_only_a_device_that_is_alone_with_a_difference_is_named():
    """Collectives bring a difference to sound devices, in some variables to fewer of them than in others."""
    assert_names(compared({"a": {7}, "b": {7}}), "Device 7 (cpu, process 0) computed")
    assert_names(compared({"a": set(range(8)), "b": {0, 2, 4, 6}}), "none can be")
    assert_names(compared({"a": {1, 3}, "b": {3}}), "One of", "devices 1 (cpu, process 0), 3 (cpu, process 0) computed")
