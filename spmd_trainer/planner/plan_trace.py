"""The traced train step of a plan's candidates: what it computes, and whether two programs are the same."""

from __future__ import annotations

import re

import jax
from jax.extend import core

from spmd_trainer.planner import jaxpr_costs, plan_prediction
from spmd_trainer.sharding.messages import short_hash
from spmd_trainer.step import step_fns
from spmd_trainer.step.partitioner import StepFn
from spmd_trainer.training.job import Job

_STEPS: tuple[tuple[StepFn, bool], ...] = ((step_fns.train_step, False), (step_fns.eval_step, True))
# What differs in the text of equal programs: the policy that gave them, and memory addresses.
_POLICY = re.compile(r"policy=[^\n]*|0x[0-9a-f]+")


def traced(job: Job) -> tuple[str, plan_prediction.Work]:
    """Returns the traced train step as text, without what differs between equal programs, and what it computes."""
    step, forward = (_jaxpr(job, fn, is_eval=is_eval) for fn, is_eval in _STEPS)
    work = plan_prediction.Work(jaxpr_costs.dot_costs(step.jaxpr), jaxpr_costs.dot_costs(forward.jaxpr))
    return _POLICY.sub("", str(step)), work


def program(job: Job, text: str) -> str:
    """Returns a hash of what is compiled: the traced step, and where its arguments live.

    Args:
      job: the job that was traced.
      text: the traced step, see `traced`.
    """
    inputs = jax.tree.leaves_with_path(job.partitioner.inputs_partition_spec(job.inputs_shape_dtype))
    layout = [(v.path, v.padded_shape, v.dtype, v.spec) for v in job.partitioner.metadata.records()]
    return short_hash(f"{text}\n{layout}\n{inputs}")


def _jaxpr(job: Job, fn: StepFn, *, is_eval: bool) -> core.ClosedJaxpr:
    """Traces a step on the job's mesh."""
    partitioner = job.partitioner
    step = partitioner.partition(fn, job.inputs_shape_dtype, is_eval=is_eval)
    state = partitioner.abstract_state(with_opt_states=not is_eval)
    return step.fn.trace(state, job.abstract_prng_key, partitioner.abstract_inputs(step)).jaxpr
