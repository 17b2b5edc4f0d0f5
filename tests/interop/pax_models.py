"""The experiments whose checkpoints paxml wrote (`data/README.md`), and jobs on them."""

from __future__ import annotations

import functools
import math
import typing

import jax
import numpy as np
from etils import epath
from praxis import base_input, optimizers, pax_fiddle, py_utils

from spmd_trainer import experiment_registry, learners, pax, sharding
from spmd_trainer.checkpointing import restore
from spmd_trainer.step import pjit
from spmd_trainer.tasks.lm import model_params
from spmd_trainer.training import experiment_config
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import TrainConfig

AXES = ("replica", "data", "mdl")
MESHES = [(1, 1, 1), (1, 4, 2), (2, 2, 2), (1, 8, 1)]


class CountingRows(base_input.BaseInput):
    """Rows that each count on from the number of the batch. Its position is that number as text."""

    seq_len: int = 32
    vocab_size: int = 256
    num_batches: int = -1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._taken = 0

    def get_next(self) -> py_utils.NestedMap:
        if 0 <= self.num_batches <= self._taken:
            raise StopIteration
        shape = (self.batch_size, self.seq_len)
        ids = (self._taken + np.arange(math.prod(shape)).reshape(shape)) % self.vocab_size
        self._taken += 1
        positions = np.tile(np.arange(self.seq_len, dtype=np.int32), (self.batch_size, 1))
        return py_utils.NestedMap(
            ids=ids.astype(np.int32),
            labels=((ids + 1) % self.vocab_size).astype(np.int32),
            paddings=np.zeros(shape, np.float32),
            weights=np.ones(shape, np.float32),
            segment_ids=np.ones(shape, np.int32),
            segment_pos=positions,
        )

    def reset(self) -> None:
        super().reset()
        self._taken = 0

    def ids_to_strings(self, ids, lengths, key=None):
        return [" ".join(map(str, row[:length])) for row, length in zip(ids, lengths, strict=True)]

    def _get_state_internal(self) -> bytes:
        return str(self._taken).encode()

    def _set_state_internal(self, state: bytes) -> None:
        self._taken = int(state)


class _Tiny(model_params.TransformerLmSpmdAdafactor):
    NUM_LAYERS = 2
    PACKED_INPUT = True
    FPROP_DTYPE = np.float32
    LEARNING_RATE = 1e-2
    ICI_MESH_SHAPE: typing.ClassVar = [1, 4, 2]
    EMA_DECAY = 0.0
    USE_ADAFACTOR = False

    def adapt_mesh(self, mesh_shape, num_devices):
        return sharding.fit_mesh_shape(mesh_shape, num_devices, grow="data")

    def _rows(self, name, **fields):
        return pax_fiddle.Config(CountingRows, name=name, batch_size=16, vocab_size=self.VOCAB_SIZE, **fields)

    def datasets(self):
        held_out = {"num_batches": 2, "reset_for_eval": True}
        return [self._rows("train", is_training=True), self._rows("held_out", is_training=False, **held_out)]

    def decode_datasets(self):
        return [self._rows("prompts", is_training=False, num_batches=1, reset_for_eval=True)]

    def task(self):
        task_p = super().task()
        optimizer = model_params.set_default_adafactor if self.USE_ADAFACTOR else model_params.set_default_adam
        optimizer(task_p, self.LEARNING_RATE, 0.0, warmup_steps=20, decay_start=21, decay_end=100000)
        if self.EMA_DECAY:
            task_p.train.learner.optimizer.ema_decay = self.EMA_DECAY
        task_p.train.num_train_steps = 22
        task_p.train.variable_norm_summary = False
        task_p.train.summary_interval_steps = 1
        task_p.train.eval_interval_steps = 0
        task_p.train.enable_input_checkpointing = True
        decoder_p = task_p.model.decoder_tpl
        decoder_p.seqlen, decoder_p.max_decode_steps, decoder_p.eos_id = 34, 2, 300
        decoder_p.fprop_for_prefix = True
        return task_p


@experiment_registry.register
class UnevenRepeatedAdam(_Tiny):
    """Two repeated layers whose sizes no mesh of 8 devices divides."""

    VOCAB_SIZE = 257
    MODEL_DIMS = 15
    HIDDEN_DIMS = 33
    NUM_HEADS = 3
    DIMS_PER_HEAD = 5
    USE_REPEATED_LAYER = True


@experiment_registry.register
class UnevenRepeatedAdafactor(UnevenRepeatedAdam):
    """The same with Adafactor, whose momentum is int8."""

    USE_ADAFACTOR = True


@experiment_registry.register
class PlainAdamEma(_Tiny):
    """Two plain layers of even sizes, with moving averages of the variables."""

    VOCAB_SIZE = 256
    MODEL_DIMS = 32
    HIDDEN_DIMS = 64
    NUM_HEADS = 4
    DIMS_PER_HEAD = 8
    USE_REPEATED_LAYER = False
    EMA_DECAY = 0.99


@experiment_registry.register
class MultiOptimizer(UnevenRepeatedAdam):
    """Adam, and SGD with momentum for the softmax."""

    def task(self):
        task_p = super().task()
        optimizer_p = task_p.train.learner.optimizer
        task_p.train.learner = pax_fiddle.Config(
            learners.MultiOptimizerLearner,
            loss_name=task_p.train.learner.loss_name,
            optimizer=optimizer_p,
            auxiliary_optimizers=[
                pax_fiddle.Config(
                    optimizers.ShardedSgd, momentum=0.9, learning_rate=0.01, lr_schedule=optimizer_p.lr_schedule
                )
            ],
            auxiliary_regex=[".*softmax.*"],
            auxiliary_names=["softmax"],
        )
        return task_p


EXPERIMENTS = {cls.__name__: cls for cls in (UnevenRepeatedAdam, UnevenRepeatedAdafactor, PlainAdamEma, MultiOptimizer)}


@functools.cache
def job_on(name: str, mesh: tuple[int, ...]) -> Job:
    """A job of an experiment on the first of the eight devices."""
    resolved = experiment_config.resolve(EXPERIMENTS[name], ())
    devices = sharding.create_device_mesh(list(zip(AXES, mesh, strict=True)), devices=jax.devices()[: math.prod(mesh)])
    resolved.experiment.partitioner = lambda: pjit.PjitPartitioner(devices)
    return Job.build(TrainConfig(resolved, epath.Path("unused")))


def restored(directory, job, *, step=None, **settings):
    """What a job restores of a Pax checkpoint, with optimizer states."""
    metadata = job.partitioner.metadata
    source = pax.open_source(epath.Path(directory), step, metadata.variables)
    return restore(source, metadata, **settings)


def assert_holds(state, variables, expected):
    """Every leaf has these bits in its logical region, and zeros in the padding."""
    for array, spec in zip(jax.tree.leaves(state), jax.tree.leaves(variables), strict=True):
        assert array.shape == spec.padded_shape
        host = np.array(array)
        logical = tuple(slice(0, size) for size in spec.logical_shape)
        value = expected[f"state/{spec.path}"]
        assert host.dtype == value.dtype, spec.path
        assert host[logical].tobytes() == value.tobytes(), spec.path
        if spec.is_padded:
            host[logical] = 0
            assert not host.any(), spec.path


def snapshot(directory):
    """Names, sizes and times of everything below a directory."""
    return {
        str(path.relative_to(directory)): (path.stat().st_mtime_ns, path.stat().st_size)
        for path in (directory, *sorted(directory.rglob("*")))
    }
