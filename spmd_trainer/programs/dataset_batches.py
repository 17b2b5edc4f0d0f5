"""The batches of a finite dataset, as evaluation and decode go through them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spmd_trainer.programs import first_batch
from spmd_trainer.programs.job import Job


def all_batches(job: Job, data: Any, declared: Any) -> Iterator[Any]:
    """Yields the batches of a built input until it ends.

    Args:
      job: the job; `task.train.enforce_input_specs` says whether the first batch is compared with `declared`.
      data: the input, at its beginning.
      declared: ShapeDtypeStructs of one process's batch.

    Raises:
      UserError: the first batch is not what is declared.
    """
    unchecked = job.task.train.enforce_input_specs
    while True:
        try:
            batch = data.get_next_padded()
        except StopIteration:
            return
        if unchecked:
            first_batch.check(data.name, batch, declared)
            unchecked = False
        yield batch


def num_batches(data: Any) -> int | None:
    """Returns how many batches a built input has, or None where it can't tell."""
    number = getattr(data, "num_batches", None)
    return number if isinstance(number, int) else None
