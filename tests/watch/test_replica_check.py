"""A device with wrong numbers is named, with the variable, before its state is saved."""

import jax
import numpy as np
import pytest
import trained_helpers
from facts import raises_naming
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from replica_helpers import flipped

from spmd_trainer.callbacks import Callback
from spmd_trainer.training import train
from spmd_trainer.watch.replica_check import ReplicaError, differences


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("replica", "data", "mdl"))


@pytest.mark.parametrize("dtype", [np.float32, np.int8, jax.numpy.bfloat16])
@pytest.mark.parametrize(("spec", "holders"), [(P(), 8), (P("mdl"), 4), (P(("replica", "data")), 2)])
def test_one_flipped_bit_is_found_and_the_device_named(mesh, spec, holders, dtype):
    values = np.arange(64).reshape(8, 8).astype(dtype)
    good = jax.device_put(values, NamedSharding(mesh, spec))
    assert differences({"a": good, "b": good}) == []
    (found,) = differences({"a": good, "b": flipped(good, 5)})
    assert found.path == "b"
    if holders == 2:  # nobody knows which of two is right
        assert mesh.devices.flat[5] in found.devices
        assert len(found.devices) == 2
        assert not found.others
    else:
        assert found.devices == [mesh.devices.flat[5]]
        assert len(found.others) == holders - 1


def test_values_that_only_one_device_holds_have_nothing_to_differ_from(mesh):
    x = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, P(("replica", "data"), "mdl")))
    assert differences({"x": flipped(x, 3)}) == []


def test_negative_zero_is_another_value(mesh):
    x = jax.device_put(np.zeros(8, np.float32), NamedSharding(mesh, P()))
    devices = list(mesh.devices.flat)
    copies = [
        jax.device_put(np.full(8, -0.0 if device == devices[2] else 0.0, np.float32), device) for device in devices
    ]
    (found,) = differences({"x": jax.make_array_from_single_device_arrays(x.shape, x.sharding, copies)})
    assert found.devices == [devices[2]]


class FlipsABit(Callback):
    """Stands for a broken chip: after step 3, device 6 holds another bit of the logits' bias."""

    def asks_for_pause(self, run, step):
        return step == 3

    def on_pause(self, run, step):
        def broken(path, x):
            name = jax.tree_util.keystr(path)
            return flipped(x, 6) if "softmax" in name and "bias" in name and x.ndim else x

        if step == 3:
            run.state = jax.tree_util.tree_map_with_path(broken, run.state)


def job(tmp_path, callbacks=()):
    return trained_helpers.make_job(tmp_path, callbacks=callbacks, check_replicas_every=2)


@pytest.mark.full
def test_a_run_with_a_broken_device_ends_before_it_saves_and_says_which(tmp_path):
    with raises_naming(ReplicaError, "step 4", "softmax", "copy on device 6", "checkpoint") as raised:
        train.train(job(tmp_path, [FlipsABit()]))
    assert raised.value.exit_status == 6
    assert not (tmp_path / "checkpoints" / "4").exists()


@pytest.mark.full
def test_a_sound_run_goes_on(tmp_path):
    assert train.train(job(tmp_path)).step == trained_helpers.STEPS
