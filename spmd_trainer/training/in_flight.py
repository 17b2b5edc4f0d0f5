"""Training steps whose scalars are still on the devices."""

from __future__ import annotations

import collections
from collections.abc import Callable

import jax

from spmd_trainer.metrics import clu_metrics
from spmd_trainer.metrics.packing import Packed, ScalarPacking, Scalars


class StepsInFlight:
    """Hands out the scalars of training steps late, so that the host never waits for the step it has just dispatched.

    Attributes:
      packing: unpacks the scalars of the steps added next.
      last: the scalars of the last step handed out, or None.
      is_waiting: True while the host waits for the devices. Any thread may look.
    """

    def __init__(self, keep: int, report: Callable[[int, Scalars], object]):
        """Starts empty.

        Args:
          keep: how many steps may be in flight (`task.train.max_inflight_steps`).
          report: takes the number of a step and its scalars, in order.
        """
        self.packing = ScalarPacking()
        self.last: Scalars | None = None
        self.is_waiting = False
        self._keep = keep
        self._report = report
        self._steps: collections.deque[tuple[int, Packed]] = collections.deque()

    def add(self, step: int, packed: Packed) -> None:
        """Adds a step just dispatched; reports the oldest ones until only `keep` are in flight.

        Args:
          step: its number.
          packed: its scalars, packed.
        """
        self._steps.append((step, packed))
        # The first step is waited for: a person wants to know at once that training works.
        self._report_until(self._keep if self.last is not None else 0)

    def drain(self) -> None:
        """Waits for every step in flight and reports it."""
        self._report_until(0)

    def metrics(self) -> dict[str, float]:
        """Returns the loss, the weighted scalars and the clu metrics of the last step reported; empty before the first."""
        if self.last is None:
            return {}
        loss = {} if self.last.loss is None else {"loss": self.last.loss}
        return loss | dict(self.last.means) | clu_metrics.computed(self.last.clu)

    def _report_until(self, keep: int) -> None:
        while len(self._steps) > keep:
            step, packed = self._steps.popleft()
            self.is_waiting = True
            # The one copy to the host that the steady loop is meant to make.
            with jax.transfer_guard_device_to_host("allow"):
                self.last = self.packing.unpack(packed)
            self.is_waiting = False
            self._report(step, self.last)
