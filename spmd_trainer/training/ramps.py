"""Batch-size and sequence-length ramps: training in stages. All steps of a stage have the same batch shape.

`task.train.batch_ramp` sets the number of rows in the global batch from given steps on; `sequence_ramp` sets the tokens per row.
Step n takes the input's rows that follow the rows of all earlier steps, so the rows depend on n alone. Therefore a run that was
killed continues with the same batches as an uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import fiddle as fdl
import jax
from praxis import pax_fiddle

from spmd_trainer.errors import UserError
from spmd_trainer.inputs.batches import lm_input_specs
from spmd_trainer.inputs.indexed import IndexedInput
from spmd_trainer.step.partitioner import Partitioner
from spmd_trainer.step.schedules import PiecewiseByTokens
from spmd_trainer.tasks_lib import SingleTask
from spmd_trainer.train_states import PyTree

_CAN = "ArrayInput, CorpusInput, GrainInput, ImageInput, SyntheticInput, TextInput, TfdsInput, TfRecordInput and their like"


class Stage(NamedTuple):
    """A stage of a batch-size or sequence-length ramp: a part of training in which all steps have the same batch shape.

    Attributes:
      first: the number of steps taken before the stage begins.
      rows: rows of the global batch before they are cut to `length`; None: the batch size of the training dataset's config.
      length: tokens per row in a training step. The input's rows are cut into rows of this length. None: rows are not cut.
    """

    first: int
    rows: int | None
    length: int | None

    def __str__(self) -> str:
        parts = [f"{self.rows} rows" if self.rows else "", f"rows of {self.length} tokens" if self.length else ""]
        return f"{', '.join(filter(None, parts))} from step {self.first}"


def stages_of(train_p: Any) -> tuple[Stage, ...]:
    """Returns the stages of the ramps in `task.train`, in order; empty without a ramp.

    Raises:
      UserError: a ramp is not {0: value, step: value, ...}.
    """
    rows, lengths = _read("batch_ramp", train_p.batch_ramp), _read("sequence_ramp", train_p.sequence_ramp)
    firsts = sorted({*rows, *lengths})
    return tuple(Stage(first, _value_at(rows, first), _value_at(lengths, first)) for first in firsts)


def _read(name: str, ramp: Any) -> dict[int, int]:
    if not ramp:
        return {}
    found = dict(ramp) if isinstance(ramp, Mapping) else {}
    are_whole = all(isinstance(one, int) and not isinstance(one, bool) for one in (*found, *found.values()))
    if not are_whole or 0 not in found or min(found) < 0 or min(found.values()) < 1:
        raise UserError(
            f"task.train.{name}={ramp!r:.100}; give {{0: value, step: value, ...}}, e.g. {{0: 64, 1000: 128}}"
        )
    return found


def _value_at(ramp: Mapping[int, int], step: int) -> int | None:
    return ramp[max(first for first in ramp if first <= step)] if ramp else None


def stage_at(stages: Sequence[Stage], step: int) -> Stage:
    return [stage for stage in stages if stage.first <= step][-1]


def shapes_in(stage: Stage, declared: PyTree, num_processes: int) -> PyTree:
    """Returns ShapeDtypeStructs of one process's batch in a stage, given those that the experiment declares.

    Raises:
      UserError: the number of processes doesn't divide the rows; the stage's length doesn't divide the declared length; or the
        rows would be cut, and the batch is not a language model's.
    """
    if stage.rows and stage.rows % num_processes:
        raise UserError(f"task.train.batch_ramp: {num_processes} processes don't divide {stage.rows} rows")
    whole = 0
    if stage.length:
        known = set(lm_input_specs(1, 1))
        if not isinstance(declared, Mapping) or set(declared) != known:
            extra = sorted(set(declared) ^ known) if isinstance(declared, Mapping) else type(declared).__name__
            raise UserError(
                f"task.train.sequence_ramp cuts batches of language models alone; other or missing: {extra}"
            )
        whole = declared["ids"].shape[1]
        if whole % stage.length:
            raise UserError(f"task.train.sequence_ramp: {stage.length} tokens don't divide rows of {whole}")

    def of(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        rows, rest = (stage.rows or 0) // num_processes or x.shape[0], x.shape[1:]
        if stage.length:
            rows, rest = rows * (whole // stage.length), (stage.length,) * len(rest)
        return jax.ShapeDtypeStruct((rows, *rest), x.dtype)

    return jax.tree.map(of, declared)


def with_rows(input_p: Any, stage: Stage, num_processes: int) -> Any:
    """Sets the batch size in the training input's config to that of a stage. Returns the config.

    Raises:
      UserError: the input can't continue at the same row with a different batch size: it isn't an `IndexedInput`.
    """
    kind = fdl.get_callable(input_p)
    if not (isinstance(kind, type) and issubclass(kind, IndexedInput)):
        raise UserError(
            f"task.train.batch_ramp and sequence_ramp: the training input {input_p.name!r}, {kind.__name__}, can't go on with "
            f"another batch at the same row. {_CAN} can"
        )
    if stage.rows:
        input_p.batch_size = stage.rows // num_processes
    return input_p


def check_input(built: IndexedInput, stages: Sequence[Stage]) -> None:
    """Checks that a built training input supports the batch sizes and lengths of the stages.

    Raises:
      UserError: the order of the input's rows depends on the batch size; or its rows hold conversations, which can't be cut.
    """
    if len({stage.rows for stage in stages}) > 1 and not built.takes_any_batch_size:
        raise UserError(
            f"task.train.batch_ramp: the training input {built.name!r} changes at steps itself (segment_len, or "
            "change_by='steps'), which it counts in batches of one size; let it change by tokens, or leave the ramp out"
        )
    processors = [one.documents.processor for one in getattr(built, "sources", ()) if hasattr(one, "documents")]
    if any(stage.length for stage in stages) and any(processors):
        raise UserError(
            f"task.train.sequence_ramp cuts rows, and {built.name!r} has conversations, which are not cut; leave it out"
        )


def check(task: SingleTask, partitioner: Partitioner, stages: Sequence[Stage], shapes: PyTree) -> None:
    """Checks that a job's partitioner and learning-rate schedule are compatible with its ramps.

    Args:
      shapes: ShapeDtypeStructs of the global batch without ramps.

    Raises:
      UserError: the run is elastic, or a `PiecewiseByTokens` schedule has different numbers of tokens per step than the stages.
    """
    if partitioner.elastic:
        raise UserError("task.train.batch_ramp and sequence_ramp need elastic=False")
    schedule = getattr(task.learner.optimizer, "lr_schedule", None)
    schedule = pax_fiddle.build(schedule) if isinstance(schedule, fdl.Buildable) else schedule
    if not isinstance(schedule, PiecewiseByTokens) or not isinstance(shapes, Mapping) or "ids" not in shapes:
        return
    rows, length = shapes["ids"].shape
    needed = {stage.first: (stage.rows or rows) * length for stage in stages}
    if schedule.step_sizes != needed and len(set(needed.values())) > 1:
        raise UserError(
            "task.train.batch_ramp changes the tokens of a step, and PiecewiseByTokens.tokens_per_step is "
            f"{schedule.tokens_per_step}; give {needed}"
        )


def steps_left(stages: Sequence[Stage], step: int, num_steps: int) -> float:
    """Returns the number of steps from `step` to `num_steps`, converted to steps with the batch size of the next step."""
    if step >= num_steps or len({stage.rows for stage in stages}) < 2:
        return num_steps - step
    ends = [*(stage.first for stage in stages[1:]), num_steps]
    spans = [max(0, min(end, num_steps) - max(one.first, step)) for one, end in zip(stages, ends, strict=True)]
    now = stage_at(stages, step).rows or 1
    return sum(span * (one.rows or 1) for span, one in zip(spans, stages, strict=True)) / now
