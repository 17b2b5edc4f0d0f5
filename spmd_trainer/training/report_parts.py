"""Makes the parts of a job's sharding report that aren't about variables: chosen kernels, and the sharding of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import fiddle as fdl
import jax
from absl import logging

from spmd_trainer import sharding
from spmd_trainer.errors import first_line
from spmd_trainer.inputs.batches import dataset_input_specs
from spmd_trainer.sharding.report_data import InputLayout
from spmd_trainer.step import step_fns
from spmd_trainer.step.layout import Layout
from spmd_trainer.step.pjit import PjitPartitioner
from spmd_trainer.train_states import TrainState
from spmd_trainer.training import rooms
from spmd_trainer.training.job import Job

_T = TypeVar("_T")


def traced(trace: Callable[[], _T]) -> tuple[_T, list[str]]:
    """Calls `trace`, which traces a program. Returns its result, and a line for each attention or expert kernel chosen."""
    kernels = rooms.find("kernels.kernels")
    if kernels is None:
        return trace(), []
    with kernels.recording() as recorded:
        result = trace()
    return result, kernels.choice_lines(recorded)


def log_choices(lines: Iterable[str]) -> None:
    """Logs the lines about chosen kernels that `traced` returned. Warns if a kernel isn't the device's preferred one."""
    for line in lines:
        logging.log(logging.WARNING if "(not " in line else logging.INFO, "%s", line)


def of_forward_pass(job: Job) -> list[str]:
    """Returns one line per chosen attention or expert kernel. It says why, e.g. 'attention kernel: chunked (not cudnn: ...)'.

    Traces the train step's forward pass on the job's mesh. If the partitioner has its own forward pass (`ShardMapPartitioner`),
    traces the evaluation step instead. Returns an empty list for a model without attention and expert layers.

    Raises:
      UserError: a layer requests a kernel that can't be used.
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


def of_inputs(job: Job) -> list[InputLayout]:
    """Returns the batch layouts of the training, evaluation and decode inputs, in this order.

    If an input's shapes are unknown, e.g. because its files aren't on this machine, its layout says why instead of the shapes.
    """
    config = job.config.experiment.config
    uses = {"train": config.train_datasets, "eval": config.eval_datasets, "decode": config.decode_datasets}
    return [_layout(job, use, input_p) for use, inputs in uses.items() for input_p in inputs]


def _layout(job: Job, use: str, input_p: Any) -> InputLayout:
    called = fdl.get_callable(input_p)
    class_name = f"{called.__module__}.{called.__qualname__}".removeprefix("spmd_trainer.")
    name = str(input_p.name)
    try:
        # What the experiment declares of its training batch is what the step is compiled for.
        shapes = job.inputs_shape_dtype if use == "train" else job.global_shape_dtype(dataset_input_specs(input_p))
        arrives = in_step = job.partitioner.layout.inputs_partition_spec(shapes)
        mapping = job.task.train.inputs_split_mapping
        if mapping is not None and isinstance(job.partitioner, PjitPartitioner):
            in_step = sharding.input_partition_specs(mapping, dict(job.partitioner.mesh.shape), shapes)
    except Exception as error:  # an input's own code may raise anything
        logging.warning("the report doesn't know the batches of %s input %s: %s", use, name, first_line(error))
        return InputLayout(use, name, class_name, problem=first_line(error))
    return InputLayout(
        use, name, class_name, shapes, job.partitioner.layout.pad_inputs_shape_dtype(shapes), arrives, in_step
    )
