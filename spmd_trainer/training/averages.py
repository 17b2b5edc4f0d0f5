"""`--eval_averages`: evaluates, decodes and exports averages of the variables instead of their current values."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from absl import logging
from praxis import base_layer

from spmd_trainer.checkpointing import Restored
from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.sharding.messages import named_text
from spmd_trainer.step import masks
from spmd_trainer.step.learner import has_ema
from spmd_trainer.step.optax_bridge import extract_ema, extract_schedule_free, keeps_schedule_free
from spmd_trainer.train_states import TrainState
from spmd_trainer.training.job import Job

NONE, EMA, SCHEDULE_FREE, LAST = "none", "ema", "schedule_free", "last:"


class TooFewCheckpointsError(UserError):
    """There are fewer checkpoints than `--eval_averages=last:K` needs."""


def read(flag: str, value: object) -> str:
    """Parses the value of `--eval_averages`: 'none', 'ema', 'schedule_free' or 'last:K'.

    Raises:
      UserError: the value is none of these.
    """
    if value in (NONE, EMA, SCHEDULE_FREE) or re.fullmatch(rf"{LAST}[1-9]\d*", str(value)):
        return str(value)
    near = did_you_mean(str(value), (NONE, EMA, SCHEDULE_FREE), otherwise="")
    raise UserError(f"{flag}={value}: give {EMA}, {SCHEDULE_FREE}, {NONE}, or {LAST}5 for the last 5 checkpoints{near}")


def last_count(averages: str) -> int:
    """Returns K of 'last:K'; 0 for other averages."""
    return int(averages.removeprefix(LAST)) if averages.startswith(LAST) else 0


def of(job: Job, *, decodes: bool = False) -> str:
    """Returns which averages a job evaluates: the value of `--eval_averages`, if it is given.

    Otherwise returns 'ema' if the task's `train.eval_use_ema_states` is set; or 'schedule_free' for a schedule-free optimizer,
    whose average is what its authors evaluate (Defazio et al. 2024, arXiv:2405.15682); or else 'none', i.e. no averages.

    Args:
      decodes: True to read the task's `train.decode_use_ema_states` instead of `train.eval_use_ema_states`.

    Raises:
      UserError: the run doesn't keep these averages (the message lists those that it keeps); or schedule-free averages are
        combined with muP, which scales the variables.
    """
    train_p, asked = job.task.train, job.config.eval_averages
    kept = [EMA] if has_ema(job.task.learner) else []
    kept += [SCHEDULE_FREE] if keeps_schedule_free(job.partitioner.layout.variables.opt_states) else []
    if asked is None and (train_p.decode_use_ema_states if decodes else train_p.eval_use_ema_states):
        asked = EMA
    if SCHEDULE_FREE in kept and asked in (None, SCHEDULE_FREE) and job.task.mup is not None:
        raise UserError(
            "task.mup with optax.contrib.schedule_free: its average x is one of scaled variables, at which the model can't be "
            "evaluated; give --eval_averages=none, or another optimizer"
        )
    if asked is None:
        return SCHEDULE_FREE if SCHEDULE_FREE in kept else NONE
    if asked in (EMA, SCHEDULE_FREE) and asked not in kept:
        why = {
            EMA: "EMA variables were asked for, but the learner's optimizer has no ema_decay; set one",
            SCHEDULE_FREE: "the learner's optimizer is not optax.contrib.schedule_free",
        }
        there = [*kept, NONE, *([] if job.config.mode == "train" else [f"{LAST}K"])]
        raise UserError(f"--eval_averages={asked}: {why[asked]}. This run has {', '.join(there)}")
    return asked


def evaluated(state: TrainState, averages: str) -> TrainState:
    """Returns a train state without optimizer states, in which averages replace the variables.

    Args:
      state: the whole train state, padded.
      averages: 'ema' or 'schedule_free'. Any other value keeps the variables.
    """
    take = {EMA: extract_ema, SCHEDULE_FREE: extract_schedule_free}.get(averages)
    mdl_vars = state.mdl_vars if take is None else take(state.opt_states, state.mdl_vars)
    return dataclasses.replace(state.to_eval_state(), mdl_vars=mdl_vars)


def mean(job: Job, steps: Sequence[int], restore: Callable[[int], Restored]) -> Restored:
    """Returns the newest of several checkpoints, after replacing each trainable variable by its mean over all of them.

    Other variables, such as counts and batch-normalization statistics, stay those of the newest checkpoint. Sums are float32
    or wider, from the newest checkpoint to the oldest. Device memory contains the sums and one checkpoint's variables.

    Args:
      steps: the steps of the checkpoints, ascending.
      restore: restores the checkpoint of a step, without optimizer states. The restored arrays may be donated.
    """
    hparams = job.partitioner.layout.var_weight_hparams
    learns = jax.tree.map(
        lambda p, has_no_gradient: not (has_no_gradient or base_layer.var_overwrite_with_gradient(p)),
        hparams,
        masks.get_excluded_var_mask_for_grad(hparams, job.task.learner),
    )
    newest = restore(steps[-1])
    dtypes = jax.tree.map(lambda x: x.dtype, newest.state.mdl_vars)
    sums = jax.tree.map(
        lambda does, x: x.astype(jnp.promote_types(x.dtype, jnp.float32)) if does else x, learns, newest.state.mdl_vars
    )
    newest = dataclasses.replace(newest, state=dataclasses.replace(newest.state, mdl_vars=()))
    for step in reversed(steps[:-1]):
        # The restored state has no name, so that it is freed before the next one is restored.
        sums = jax.tree.map(
            lambda does, total, x: _added(total, x) if does else total, learns, sums, restore(step).state.mdl_vars
        )

    def divided(total: jax.Array) -> jax.Array:
        # Divides by an array: instead of dividing by a scalar, XLA would multiply by its reciprocal, which rounds twice.
        return jax.lax.div(total, jnp.full_like(total, len(steps), device=total.sharding))

    means = jax.tree.map(
        lambda does, total, dtype: divided(total).astype(dtype) if does else total, learns, sums, dtypes
    )
    stay = sum(not does for does in jax.tree.leaves(learns))
    logging.info(
        "the variables are the mean of %s; %d that don't learn are those of step %d",
        *(named_text(steps, "step", "steps"), stay, steps[-1]),
    )
    return dataclasses.replace(newest, state=dataclasses.replace(newest.state, mdl_vars=means))


@functools.partial(jax.jit, donate_argnums=0)
def _added(total: jax.Array, x: jax.Array) -> jax.Array:
    return total + x.astype(total.dtype)
