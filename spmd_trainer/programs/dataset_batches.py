"""The batches of a finite dataset, as evaluation and decode go through them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from spmd_trainer.programs import first_batch
from spmd_trainer.programs.job import Job


def all_batches(job: Job, data: Any, declared: Any) -> Iterator[Any]:
    """Yields the batches of a built input until it ends.

    Args:
      job: the job; `task.train.enforce_input_specs` says whether the first batch is compared with `declared`.
      data: the input, at its beginning.
      declared: ShapeDtypeStructs of one process's batch, without the rows that the input's `batch_padding_size` adds.

    Raises:
      UserError: the first batch is not what is declared.
    """
    unchecked = job.task.train.enforce_input_specs
    added_rows = getattr(data, "batch_padding_size", 0)
    while True:
        try:
            batch = data.get_next_padded()
        except StopIteration:
            return
        if unchecked:
            first_batch.check(data.name, batch, _with_rows(declared, added_rows))
            unchecked = False
        yield batch


def num_batches(data: Any) -> int | None:
    """Returns how many batches a built input has, or None where it can't tell."""
    number = getattr(data, "num_batches", None)
    # In praxis' LingvoInputAdaptor, 0 and below mean no limit.
    return number if isinstance(number, int) and number > 0 else None


def go_on() -> None:
    """Does nothing: what evaluation and decode call between two batches where nothing can interrupt them."""


def _with_rows(declared: Any, added: int) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0] + added, *x.shape[1:]), x.dtype), declared)
