"""One tiny language model, trained once per test process, and jobs on its checkpoints."""

import atexit
import functools
import json
import math
import shutil
import tempfile

import jax
import numpy as np
from etils import epath
from praxis import base_layer

from spmd_trainer import sharding
from spmd_trainer.step import pjit
from spmd_trainer.training import checkpoints, experiment_config, train
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import config_class

TINY = "lm.stdlib.StdlibBytesTiny"
AXES = ("replica", "data", "mdl")
STEPS = 12
FIELDS = (
    f"task.train.num_train_steps={STEPS}",
    "task.train.save_interval_steps=4",
    "task.train.eval_interval_steps=0",
    "task.train.save_max_to_keep=5",
)
ONE_DEVICE = (1, 1, 1)


def make_job(
    directory, *, mesh=(1, 4, 2), exp=TINY, fields=(), customize=lambda config: None, mode="train", **settings
):
    """A job of the tiny experiment on so many of the eight devices; `customize` changes its resolved config."""
    resolved = experiment_config.resolve(exp, (*FIELDS, *fields))
    customize(resolved.config)
    axes = list(zip(AXES, mesh, strict=True))
    devices = sharding.create_device_mesh(axes, devices=jax.devices()[: math.prod(mesh)])
    resolved.experiment.partitioner = lambda: pjit.PjitPartitioner(devices)
    return Job.build(config_class(mode)(resolved, epath.Path(directory), mode, **settings))


@functools.cache
def trained():
    """Directory of a run with checkpoints of steps 0, 4, 8 and 12. To be read only."""
    directory = tempfile.mkdtemp(prefix="spmd_trainer_trained_")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    train.train(make_job(directory + "/run"))
    return epath.Path(directory) / "run"


@functools.cache
def restored(mesh=(1, 4, 2), step=None):
    """A job on the trained run's checkpoints, and the state that it restores."""
    job = make_job(trained(), mesh=mesh)
    return job, checkpoints.restore_for_inference(job, "none", step=step).state


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def logits(job, state, ids):
    """float32 [B, T, vocab_size] of the model for ids [B, T]: one segment a row, positions from 0. On one device."""
    task, (rows, length) = job.task, ids.shape
    ones = np.ones(ids.shape, np.int32)

    def run(model):
        return model.lm(
            ids, np.zeros(ids.shape, np.float32), segment_ids=ones, segment_pos=np.tile(np.arange(length), (rows, 1))
        ).logits

    with base_layer.JaxContext.new_context(hparams=base_layer.JaxContext.HParams(do_eval=True)):
        return jax.jit(lambda variables: task.model.apply(variables, method=run))(state.mdl_vars)
