"""Steps whose numbers went wrong: counted, logged, and when asked the end of the run."""

from __future__ import annotations

import math

from absl import logging

from spmd_trainer.errors import UserError
from spmd_trainer.metrics.packing import Scalars
from spmd_trainer.optim.learner import Learner

# Each of the first ones has a line in the log; after that, one in a hundred.
_LOGGED_EACH = 20
_LOGGED_EVERY = 100
_VALID = "is_valid_step"


class NonFiniteStepError(UserError):
    """A step's loss or gradient went wrong, and the run was told to stop when that happens."""


class InvalidSteps:
    """Counts the steps with a loss that is NaN or Inf, or a gradient that the learner calls invalid.

    Attributes:
      count: how many there were since the run was started.
    """

    def __init__(self, learner: Learner, *, stop: bool):
        """Starts at 0.

        Args:
          learner: the task's; whether it skips such steps.
          stop: whether the first one ends the run.
        """
        self.count = 0
        self._stop = stop
        self._skips = learner.check_valid_step and learner.enable_skip_step_on_gradient_anomalies
        self._limit = learner.skip_step_gradient_norm_value

    def look_at(self, step: int, scalars: Scalars) -> dict[str, float]:
        """Judges one step.

        Args:
          step: its number.
          scalars: what it gave.

        Returns:
          {'invalid_steps': count} for the summaries.

        Raises:
          NonFiniteStepError: the step is invalid, and the run is to stop.
        """
        valid = all(value >= 1.0 for value in scalars.summaries_called(_VALID))
        if not valid or (scalars.loss is not None and not math.isfinite(scalars.loss)):
            self._count(step, scalars, judged_invalid=not valid)
        return {"invalid_steps": float(self.count)}

    def _count(self, step: int, scalars: Scalars, *, judged_invalid: bool) -> None:
        self.count += 1
        norms = [
            f"gradient norm {value:g}" for name, value in scalars.summaries.items() if name.endswith("raw_grad_norm")
        ]
        limit = f" (skip_step_gradient_norm_value is {self._limit:g})" if self._limit and judged_invalid else ""
        what = f"step {step} is invalid: loss {scalars.loss}, {', '.join(norms) or 'no gradient norm known'}{limit}"
        if self._stop:
            raise NonFiniteStepError(
                f"{what}. The run stops here, as --stop_on_invalid_step says, without saving. Started again it goes on from "
                "its newest checkpoint and meets the same batch: change the learning rate, the data or the clipping, or "
                "leave the flag out and let the learner skip such steps."
            )
        if self.count <= _LOGGED_EACH or self.count % _LOGGED_EVERY == 0:
            done = "was skipped" if self._skips and judged_invalid else "was taken all the same"
            logging.warning("%s. It %s; %d invalid so far.", what, done, self.count)
