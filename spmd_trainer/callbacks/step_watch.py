"""`StepWatch`: what follows each training step from inside the loop, at moments that are too many for callbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import jax

from spmd_trainer.metrics.packing import Packed, Scalars

if TYPE_CHECKING:
    from spmd_trainer.callbacks.base import Run
    from spmd_trainer.train_states import PyTree, TrainState

# (state, key, batch) -> (new state, packed scalars). Donates the state.
StepFn: TypeAlias = "Callable[[TrainState, jax.Array, PyTree], tuple[TrainState, Packed]]"


class StepWatch:
    """Watches nothing. A callback may put a subclass into `run.step_watch` in its `on_open`.

    The loop calls `begin`, `took_input`, `dispatching`, `dispatched` and `waits` in this order for each step, and hands out
    scalars through what `reports` returns. Times are those of `time.monotonic`.
    """

    def begin(self, began: float, for_others: float) -> None:
        """Called when the step before has ended, and the loop asks for the next batch.

        Args:
          began: when, in seconds.
          for_others: how long this process's input has waited for other processes' since the run began, in seconds.
        """

    def took_input(self, now: float, for_others: float) -> None:
        """Called when the batch is there. Arguments as in `begin`."""

    def around(self, fn: StepFn, run: Run) -> StepFn:
        """Returns what the loop calls as the compiled train step `fn`. It may take the step after `run.step` in another way."""
        return fn

    def dispatching(self) -> None:
        """Called when the loop is about to hand a step to the devices."""

    def dispatched(self, step: int, packed: Packed) -> None:
        """Called when it has; `packed` are the step's scalars, which aren't donated to the next one."""

    def waits(self) -> None:
        """Called when the loop is about to wait for the scalars of an older step."""

    def reports(self, report: Callable[[int, Scalars], object]) -> Callable[[int, Scalars], object]:
        """Returns a function to call with a step and its scalars when the wait for them has ended; it calls `report`."""
        return report

    def end(self) -> None:
        """Called when the step has ended, before a pause for instance. What follows until `begin` belongs to no step."""
