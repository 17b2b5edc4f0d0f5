"""Checks that all processes read the same dataset, and ends an input after the same batch on all of them."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any

from absl import logging

from spmd_trainer import multihost
from spmd_trainer.errors import UserError
from spmd_trainer.inputs.indexed import IndexedInput
from spmd_trainer.inputs.prefetch import Input, is_end
from spmd_trainer.sharding.messages import named_text

# Numbers the exchanges between processes. Their names must be unique in a job, which may build an input several times.
_numbers = itertools.count()


def agree_on_input(source: Any, kind: str, *, count: int, must_end_together: bool) -> Any:
    """Makes sure that an input gives the same number of batches on all processes. Called by every process, in the same order.

    If the number of batches is known and the same on all processes, returns the input unchanged. Wraps an endless `IndexedInput`
    so that an unexpected end raises an error. Wraps any other input in an `AgreedInput`.

    Args:
      source: this process's share of the input, at its beginning.
      kind: 'training', 'evaluation' or 'decode'.
      count: the number of processes.
      must_end_together: if the shares have different lengths, True raises an error, and False ends all with the shortest.

    Raises:
      UserError: an `IndexedInput` has different files or settings on two processes.
    """
    if count == 1:
        return source
    name = f"{kind} input {source.name} {next(_numbers)}"
    if isinstance(source, IndexedInput):
        states = multihost.gather(f"{name}: data", source.get_state().decode())
        other = next((index for index, state in enumerate(states) if state != states[0]), None)
        if other is not None:
            raise UserError(
                f"the {kind} input {source.name!r} reads other data on process {other} than on process 0: {states[other]} there, "
                f"{states[0]} on process 0. Give all processes the same files and settings"
            )
        if source.num_batches is None:
            return _Endless(source, kind)
    number = getattr(source, "num_batches", None)
    lengths = multihost.gather(f"{name}: batches", str(number))
    is_known = isinstance(number, int) and number > 0
    if len(set(lengths)) == 1 and is_known:
        return source
    return AgreedInput(source, kind, name, must_end_together=must_end_together)


class _Endless:
    """Wraps an input that is declared endless. Raises an error if it ends, because other processes expect its batches."""

    def __init__(self, source: IndexedInput, kind: str):
        self._source = source
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def get_next_padded(self) -> Any:
        """Returns the next batch.

        Raises:
          UserError: the input has ended.
        """
        try:
            return self._source.get_next_padded()
        except Exception as error:
            if not is_end(error):
                raise
            raise UserError(
                f"the {self._kind} input {self._source.name!r} has ended on process {multihost.joined()[1]}, although its "
                "num_batches is None, for endless. Let it say how many batches it has"
            ) from error


class AgreedInput:
    """An input that ends on all processes as soon as one process's share of the data ends.

    Without this class, a process whose share has ended would save while the other processes wait for it in the next step.

    Attributes:
      waits_for_others: True while this process has its batch and waits for other processes to get theirs.
    """

    def __init__(self, source: Input, kind: str, name: str, *, must_end_together: bool):
        """Wraps an input.

        Args:
          source: this process's share of the input.
          kind: 'training', 'evaluation' or 'decode'.
          name: identifies this input when the processes vote on whether it has ended; never reused within the job.
          must_end_together: see `agree_on_input`.
        """
        self._source = source
        self._kind = kind
        self._must_end_together = must_end_together
        self.waits_for_others = False
        self._batches = 0
        self._cancelled = threading.Event()
        self._name = name
        # (seconds of finished votes, start of the vote in progress). One attribute, so that other threads see a consistent pair.
        self._times: tuple[float, float | None] = (0.0, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    @property
    def seconds_for_others(self) -> float:
        """Seconds spent waiting for other processes' batches while this process's batch was ready. Any thread may read it."""
        ended, since = self._times
        return ended if since is None else ended + time.monotonic() - since

    def cancel(self) -> None:
        """Stops waiting for other processes' votes on whether the input has ended, because they no longer answer.

        `get_next_padded` then raises StopIteration.
        """
        self._cancelled.set()

    def reset(self) -> None:
        self._batches = 0
        self._source.reset()  # type: ignore[attr-defined]  # finite inputs have it

    def get_next_padded(self) -> Any:
        """Returns the next batch.

        Raises:
          StopIteration: the input has ended on this or another process.
          UserError: the input has ended on some processes only, and `must_end_together` is True.
        """
        batch, error = None, None
        try:
            batch = self._source.get_next_padded()
        except Exception as raised:
            if not is_end(raised):
                raise
            error = raised
        ended = self._ended(error is not None)
        if not any(ended):
            self._batches += 1
            return batch
        if not all(ended):
            self._report([process for process, has_ended in enumerate(ended) if has_ended])
        raise StopIteration from error

    def _ended(self, here: bool) -> list[bool]:
        """Returns one bool per process: whether its input has ended. Returns [True] if `cancel` stopped the exchange.

        Args:
          here: whether this process's input has ended.
        """
        self.waits_for_others = True
        self._times = (self.seconds_for_others, time.monotonic())
        try:
            return multihost.gather(self._name, here, cancelled=self._cancelled)
        except multihost.Cancelled:
            return [True]
        finally:
            self._times = (self.seconds_for_others, None)
            self.waits_for_others = False

    def _report(self, ended: Sequence[int]) -> None:
        who = named_text(ended, "process", "processes")
        text = (
            f"the {self._kind} input {self._source.name!r} has ended on {who} after {self._batches} batches, and not on the "
            "others"
        )
        if self._must_end_together:
            raise UserError(f"{text}. Give every process the same number of batches, so that no example is left out")
        logging.warning("%s; training ends there on all processes", text)
