"""Which kernels a job's attention layers use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from spmd_trainer.step import step_fns
from spmd_trainer.step.layout import Layout
from spmd_trainer.train_states import TrainState
from spmd_trainer.training import rooms
from spmd_trainer.training.job import Job

_T = TypeVar("_T")


def traced(trace: Callable[[], _T]) -> tuple[_T, list[str]]:
    """Returns what `trace` returns, and a line for each choice of a kernel while it traced a program."""
    kernels = rooms.find("kernels.kernels")
    if kernels is None:
        return trace(), []
    with kernels.recording() as recorded:
        result = trace()
    return result, kernels.choice_lines(recorded)


def of_forward_pass(job: Job) -> list[str]:
    """Returns one line for each choice of a kernel, such as 'attention kernel: chunked; not cudnn: ...', with the reasons.

    Traces the forward pass of the train step on the job's mesh, or that of evaluation with a partitioner that brings its own
    (`ShardMapPartitioner`). A model without attention layers gives no lines.

    Raises:
      UserError: a layer asks for a kernel that can't be used.
    """

    def forward(
        layout: Layout, state: TrainState, prng_key: Any, inputs: Any, *own: Any
    ) -> tuple[None, jax.Array | None]:
        if own:
            return None, step_fns.eval_step(layout, state, prng_key, inputs, *own)[1].loss
        return None, step_fns.forward(layout, state.mdl_vars, prng_key, inputs, do_eval=False)[0].loss

    def trace() -> None:
        job.partitioner.partition(forward, job.inputs_shape_dtype, is_eval=True).lower(job.abstract_prng_key)

    return traced(trace)[1]
