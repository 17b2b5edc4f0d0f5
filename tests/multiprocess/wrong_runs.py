"""Experiments in which one device of a job computes or holds wrong numbers on purpose."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from praxis import pax_fiddle
from replica_helpers import flipped

from spmd_trainer import experiment_registry
from spmd_trainer.callbacks import Callback
from spmd_trainer.experiments.lm.stdlib import StdlibBytesTiny
from spmd_trainer.step import shard_map
from spmd_trainer.watch.repeat_check import RepeatCheck

# The device's position on the mesh: it is of process 2 in a job of four.
DEVICE = 5
# After this step it holds another bit.
STEP = 5


def with_a_flipped_bit(tree):
    """The same arrays, but the device holds another bit of the logits' bias and of its moments."""

    def broken(path, x):
        name = jax.tree_util.keystr(path)
        return flipped(x, DEVICE) if "softmax" in name and "bias" in name and x.ndim else x

    return jax.tree_util.tree_map_with_path(broken, tree)


class FlipsABit(Callback):
    """Flips a bit in what the device holds, once."""

    def asks_for_pause(self, run, step):
        return step == STEP

    def on_pause(self, run, step):
        if step == STEP:
            run.state = with_a_flipped_bit(run.state)


@experiment_registry.register
class BitFlips(StdlibBytesTiny):
    """A device holds another bit after a step."""

    def task(self):
        task_p = super().task()
        task_p.train.callbacks = [pax_fiddle.Config(FlipsABit)]
        return task_p


class Unsteady:
    """A compiled step that gives another bit on the device in one call of three."""

    def __init__(self, fn):
        self._fn, self._calls = fn, 0

    def __call__(self, state, key, batch):
        self._calls += 1
        state, packed = self._fn(state, key, batch)
        return (with_a_flipped_bit(state) if self._calls % 3 == 0 else state), packed


@experiment_registry.register
class StepsDiffer(StdlibBytesTiny):
    """A device is not repeatable."""

    def task(self):
        around = RepeatCheck.around
        RepeatCheck.around = lambda self, fn, run: around(self, Unsteady(fn), run)
        return super().task()


@experiment_registry.register
class WrongReduction(StdlibBytesTiny):
    """The program of one device computes another mean of the gradients."""

    def partitioner(self):
        pmean = lax.pmean

        def wrong_on_one(x, axes):
            wrong = (lax.axis_index(axes) == DEVICE).astype(jnp.float32) * 1e-3
            return jax.tree.map(lambda y: y + wrong.astype(y.dtype) if y.ndim else y, pmean(x, axes))

        lax.pmean = wrong_on_one
        return shard_map.ShardMapPartitioner()
