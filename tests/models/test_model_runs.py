"""Whole runs of the experiments in Flax: resumed, on other meshes, on fewer devices."""

import signal
import subprocess
import sys

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from facts import assert_names
from flax import nnx

import spmd_trainer as st
from spmd_trainer import experiment_registry
from spmd_trainer.experiments.vision import digits, digits_nets
from spmd_trainer.step.pjit import PjitPartitioner
from spmd_trainer.training.summary_writers import read_metrics

EXPERIMENTS = ["vision.digits.DigitsNnxTiny", "vision.digits.DigitsLinenTiny", "lm.nnx.StdlibNnxTiny"]
STEPS = 6
# One worker an experiment: what its runs share is made once.
EACH = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in EXPERIMENTS]
# `make test` runs the first.
FIRST = EACH[:1] + [
    pytest.param(name, marks=[pytest.mark.xdist_group(name), pytest.mark.full]) for name in EXPERIMENTS[1:]
]
_runs = {}


def overrides(steps, *more):
    fields = (f"num_train_steps={steps}", "summary_interval_steps=1", "eval_interval_steps=0", "save_interval_steps=3")
    return [*(f"task.train.{field}" for field in fields), *more]


def losses(directory):
    return {step: record["loss"] for step, record in read_metrics(directory, "train").items()}


def uninterrupted(name, tmp_path_factory):
    if name not in _runs:
        _runs[name] = tmp_path_factory.mktemp("run") / "run"
        st.train(name, _runs[name], overrides=overrides(STEPS))
    return _runs[name]


@pytest.mark.parametrize("name", FIRST)
def test_a_resumed_run_has_the_same_numbers(name, tmp_path, tmp_path_factory):
    whole = uninterrupted(name, tmp_path_factory)
    st.train(name, tmp_path / "run", overrides=overrides(3))
    st.train(name, tmp_path / "run", overrides=overrides(STEPS))
    assert losses(tmp_path / "run") == losses(whole)
    assert len(losses(whole)) == STEPS


KILLED = """
import os, signal, sys
import spmd_trainer as st
from spmd_trainer.callbacks import Callback

class Kill(Callback):
    def after_step(self, run, step, scalars):
        if step == 5:
            os.kill(os.getpid(), signal.SIGKILL)

st.train(sys.argv[1], sys.argv[2], overrides=sys.argv[3:], callbacks=[Kill()])
"""


@pytest.mark.full
@pytest.mark.parametrize("name", EACH)
def test_a_killed_run_has_the_same_numbers(name, tmp_path, tmp_path_factory):
    whole = uninterrupted(name, tmp_path_factory)
    command = [sys.executable, "-c", KILLED, name, str(tmp_path / "run"), *overrides(STEPS)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert not (tmp_path / "run" / "checkpoints" / str(STEPS)).exists()
    st.train(name, tmp_path / "run", overrides=overrides(STEPS))
    assert losses(tmp_path / "run") == losses(whole)


@pytest.mark.parametrize("name", FIRST)
def test_a_checkpoint_on_other_meshes(name, tmp_path, tmp_path_factory):
    directory = uninterrupted(name, tmp_path_factory) / "checkpoints"
    found = [
        # A directory for each: results that are there already would be read instead.
        st.evaluate(name, tmp_path / str(i), mesh=mesh, restore_checkpoint_dir=directory).metrics["heldout/loss"]
        for i, mesh in enumerate(("replica:1,data:4,mdl:2", "replica:2,data:2,mdl:2", "replica:1,data:1,mdl:8"))
    ]
    tolerance = 1e-2 if "Stdlib" in name else 1e-5  # bfloat16
    np.testing.assert_allclose(found[1:], [found[0]] * 2, rtol=tolerance)


def nnx_logits(tree, images, experiment):
    """The net with the restored variables, as Flax' own documentation puts it together."""
    net = nnx.eval_shape(lambda: digits_nets.ConvNet(experiment.FEATURES, 10, 0.0, rngs=nnx.Rngs(0)))
    graphdef, params, stats, rest = nnx.split(net, nnx.Param, nnx.BatchStat, ...)
    nnx.replace_by_pure_dict(params, tree["params"])
    nnx.replace_by_pure_dict(stats, tree["non_trainable"])
    net = nnx.merge(graphdef, params, stats, rest)
    net.eval()
    return net(images)


def linen_logits(tree, images, experiment):
    net = digits_nets.LinenConvNet(experiment.FEATURES, 10, 0.0)
    return net.apply({"params": tree["params"], **tree["non_trainable"]}, images, train=False)


@pytest.mark.parametrize(
    ("name", "logits"),
    [
        pytest.param(EXPERIMENTS[0], nnx_logits, marks=pytest.mark.xdist_group(EXPERIMENTS[0])),
        pytest.param(EXPERIMENTS[1], linen_logits, marks=[pytest.mark.xdist_group(EXPERIMENTS[1]), pytest.mark.full]),
    ],
)
@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.full
def test_plain_flax_restores_a_checkpoint(name, logits, tmp_path, tmp_path_factory):
    """The mesh pads these nets; plain Orbax and Flax get the logical arrays, and the trainer's numbers from them."""
    directory = uninterrupted(name, tmp_path_factory) / "checkpoints"
    tree = ocp.PyTreeCheckpointer().restore(directory / str(STEPS) / "state")["mdl_vars"]
    digits_on_disk = digits.heldout_digits()
    found = logits(tree, digits_on_disk["images"], experiment_registry.get(name))
    xent = optax.softmax_cross_entropy_with_integer_labels(found, digits_on_disk["labels"])
    ours = st.evaluate(name, tmp_path / "eval", restore_checkpoint_dir=directory).metrics["heldout/loss"]
    np.testing.assert_allclose(np.mean(xent), ours, rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("name", EACH)
def test_from_8_devices_to_4_to_8(name, tmp_path, tmp_path_factory):
    class LosesDevices(experiment_registry.get(name)):
        def partitioner(self):
            return PjitPartitioner(elastic=True)

        def available_devices(self, step):
            return jax.devices()[: {2: 4, 4: 8}[step]] if step in (2, 4) else None

    whole = uninterrupted(name, tmp_path_factory)
    st.train(LosesDevices, tmp_path / "run", overrides=overrides(STEPS))
    tolerance = 1e-2 if "Stdlib" in name else 1e-5
    np.testing.assert_allclose(list(losses(tmp_path / "run").values()), list(losses(whole).values()), rtol=tolerance)


WRITTEN_OUT = """
from spmd_trainer.experiments.lm.nnx import StdlibNnxTiny
from spmd_trainer import experiment_registry
from spmd_trainer.shard_map_partitioning import ShardMapPartitioner


@experiment_registry.register
class Dp(StdlibNnxTiny):
    def partitioner(self):
        return ShardMapPartitioner("dp")


@experiment_registry.register
class Fsdp(StdlibNnxTiny):
    def partitioner(self):
        return ShardMapPartitioner("fsdp", min_weight_size=1)
"""


# Batch norm and dropout are those of each device's rows with written-out collectives, so the digits' nets differ there.
@pytest.mark.full
@pytest.mark.parametrize("name", [*EACH, "mine.Dp", "mine.Fsdp"])
def test_verify_finds_the_same_numbers(name, tmp_path):
    (tmp_path / "mine.py").write_text(WRITTEN_OUT)
    command = [sys.executable, "-m", "spmd_trainer.main", f"--exp={name}", "--mode=verify", "--verify_steps=3"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert_names(result.stdout, "same numbers", "one device", "replica=1, data=4, mdl=2")
