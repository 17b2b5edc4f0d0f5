"""Compares the copies of the state on different devices every N steps (--check_replicas_every)."""

from __future__ import annotations

import jax
from absl import logging
from jax.sharding import NamedSharding

from spmd_trainer.callbacks.base import Callback, Run
from spmd_trainer.errors import UserError
from spmd_trainer.sharding.variables import named_leaves
from spmd_trainer.watch.replicas import differences

# Differences that the message names.
_NAMED = 5


class ReplicaError(UserError):
    """Devices that should hold the same values don't: one of them computes or stores wrong numbers."""

    exit_status = 6


class ReplicaCheck(Callback):
    """Ends the run if devices that hold the same part of a variable have other bits of it. Such a state is not saved."""

    def __init__(self, every: int):
        """Compares nothing yet.

        Args:
          every: steps between two comparisons; 0 for none.
        """
        self._every = every
        self._checked = -1

    def asks_for_pause(self, run: Run, step: int) -> bool:
        """Asks for a pause where a comparison is due."""
        del run
        return self._is_due(step)

    def before_save(self, run: Run, step: int) -> None:
        """Compares before a state is saved, if a comparison is due at this step."""
        self._check(run, step)

    def on_pause(self, run: Run, step: int) -> None:
        """Compares where it is due.

        Raises:
          ReplicaError: copies differ; names the devices and the variables.
        """
        self._check(run, step)

    def _is_due(self, step: int) -> bool:
        return bool(self._every) and step % self._every == 0 and step > 0

    def _check(self, run: Run, step: int) -> None:
        if not self._is_due(step) or step == self._checked:
            return
        self._checked = step
        run.begin(f"comparing the devices' copies at step {step}", part="other")
        leaves = {path: x for path, x in named_leaves(run.state) if isinstance(x.sharding, NamedSharding)}
        found = differences(leaves)
        if not found:
            return
        more = f"\n  and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        named = "".join(f"\n  {difference}" for difference in found[:_NAMED])
        if not jax.process_index():
            logging.error("%d variables differ between devices at step %d", len(found), step)
        raise ReplicaError(
            f"step {step}: devices that must hold the same values don't, so one of them computes or stores wrong numbers:{named}"
            f"{more}\nThe state is not saved. Take that device out, and start again: the run continues from its last checkpoint"
        )
