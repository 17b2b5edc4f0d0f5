"""Inputs that read the same data on all processes, and end on all of them at the same batch."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import jax
from absl import logging

from spmd_trainer import multihost
from spmd_trainer.errors import UserError
from spmd_trainer.inputs.indexed import IndexedInput
from spmd_trainer.inputs.prefetch import Input, is_end

# Names of exchanges are unique in the life of a job, and a job may build an input several times.
_numbers = itertools.count()
_PREFIX = "spmd_trainer/exchange"
# How long to wait for the slowest process. Its own errors are reported sooner: they end the whole job.
DEADLINE_SECONDS = 600.0
# How soon a cancelled wait ends.
_POLL_SECONDS = 0.5


def agree_on_input(source: Any, kind: str, *, count: int, must_end_together: bool) -> Any:
    """Makes sure that an input gives the same number of batches on all processes. Called by every process, in the same order.

    An input that knows how many batches it has on each process is left as it is if the numbers are equal. Any other input is
    wrapped in an `AgreedInput`.

    Args:
      source: this process's share, at its beginning.
      kind: 'training', 'evaluation' or 'decode'.
      count: number of processes.
      must_end_together: True to refuse shares that end at different batches; False to end with the shortest.

    Raises:
      UserError: the processes read different data.
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
            return source  # endless
    number = getattr(source, "num_batches", None)
    lengths = multihost.gather(f"{name}: batches", str(number))
    is_known = isinstance(number, int) and number > 0
    if len(set(lengths)) == 1 and is_known:
        return source
    return AgreedInput(source, kind, name, must_end_together=must_end_together)


class Votes:
    """Votes, one after the other, in which every process says yes or no, and all hear who said yes.

    They go through JAX's coordination service, without touching devices: collectives there would wait for the steps in flight,
    and only one thread may call them. A vote may be held by any thread, and can be cancelled.

    Process 0 collects the votes, so a vote costs every other process one message and one answer.

    Attributes:
      count: number of processes.
    """

    def __init__(self, name: str):
        """Begins with the first vote.

        Args:
          name: what is voted on; unique in the life of the job.
        """
        self._client = multihost.client()
        self.count, self._index = multihost.joined()
        self._name = name
        self._numbers = itertools.count()
        # Seconds of the votes so far, and when the one in progress began: one attribute, for other threads.
        self._times: tuple[float, float | None] = (0.0, None)

    @property
    def seconds(self) -> float:
        """How long all votes have taken, the one in progress included. Any thread may ask."""
        ended, since = self._times
        return ended if since is None else ended + time.monotonic() - since

    def ask(self, yes: bool, *, cancelled: threading.Event) -> tuple[int, ...] | None:
        """Returns the indices of the processes that said yes. Every process calls it, the same number of times.

        Args:
          yes: this process's vote.
          cancelled: once set, ends the wait; the result is then None.

        Raises:
          UserError: a process did not vote in time.
        """
        self._times = (self.seconds, time.monotonic())
        try:
            return self._ask(yes, cancelled)
        finally:
            self._times = (self.seconds, None)

    def _ask(self, yes: bool, cancelled: threading.Event) -> tuple[int, ...] | None:
        number, client = next(self._numbers), self._client
        name, vote = f"{self._name}/{number}", "yes" if yes else "no"
        if self._index:
            client.key_value_set(f"{_PREFIX}/{name}/{self._index}", vote)
            result = _get(client, name, "result", 0, cancelled)
        else:
            votes = [vote]
            for other in range(1, self.count):
                answer = _get(client, name, str(other), other, cancelled)
                if answer is None:
                    return None
                votes.append(answer)
            result = ",".join(str(other) for other, answer in enumerate(votes) if answer == "yes")
            client.key_value_set(f"{_PREFIX}/{name}/result", result)
            if number:  # All have read the result of the vote before, or they would not have voted now.
                client.key_value_delete(f"{_PREFIX}/{self._name}/{number - 1}/")
        return None if result is None else tuple(int(other) for other in result.split(",") if other)


def _get(client: Any, name: str, key: str, process: int, cancelled: threading.Event) -> str | None:
    """Returns a value once its process has set it; None if the wait was cancelled."""
    ends = time.monotonic() + DEADLINE_SECONDS
    while not cancelled.is_set():
        try:
            return str(client.blocking_key_value_get(f"{_PREFIX}/{name}/{key}", int(_POLL_SECONDS * 1000)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            if time.monotonic() >= ends:
                raise UserError(
                    f"process {process} did not answer within {DEADLINE_SECONDS:.0f} s ({name}). It hangs, is far slower than "
                    "the others, or does something else: look at its log, then start the job again"
                ) from error
    return None


class AgreedInput:
    """Gives the batches of an input until one process's share of it ends: then all processes end.

    Without that, a process whose input ends would save while the others wait for it in the next step.

    Attributes:
      waits_for_others: True while this process has its batch and other processes don't have theirs yet.
    """

    def __init__(self, source: Input, kind: str, name: str, *, must_end_together: bool):
        """Wraps an input.

        Args:
          source: this process's share.
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
        self._votes = Votes(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    @property
    def seconds_for_others(self) -> float:
        """Seconds spent waiting for other processes' batches while this process's own was ready. Any thread may ask."""
        return self._votes.seconds

    def cancel(self) -> None:
        """Ends a vote that other processes no longer take part in; `get_next_padded` then raises StopIteration."""
        self._cancelled.set()

    def reset(self) -> None:
        """Begins again."""
        self._batches = 0
        self._source.reset()  # type: ignore[attr-defined]  # finite inputs have it

    def get_next_padded(self) -> Any:
        """Returns the next batch.

        Raises:
          StopIteration: an input has ended.
          UserError: some processes' inputs have ended, and all must end together.
        """
        batch, error = None, None
        try:
            batch = self._source.get_next_padded()
        except Exception as raised:
            if not is_end(raised):
                raise
            error = raised
        self.waits_for_others = True
        ended = self._votes.ask(error is not None, cancelled=self._cancelled)
        self.waits_for_others = False
        if ended == ():
            self._batches += 1
            return batch
        if ended is not None and len(ended) < self._votes.count:
            self._report(ended)
        raise StopIteration from error

    def _report(self, ended: tuple[int, ...]) -> None:
        who = f"process{'es' if len(ended) > 1 else ''} {', '.join(map(str, ended))}"
        text = (
            f"the {self._kind} input {self._source.name!r} has ended on {who} after {self._batches} batches, and not on the "
            "others"
        )
        if self._must_end_together:
            raise UserError(f"{text}. Give every process the same number of batches, so that no example is left out")
        logging.warning("%s; training ends there on all processes", text)
