"""Counts and logs training steps with an invalid loss or gradient. Ends a run on request, or when it no longer learns."""

from __future__ import annotations

import math

from absl import logging

from spmd_trainer.callbacks import Callback, Run
from spmd_trainer.errors import UserError
from spmd_trainer.step.packing import Scalars

# Each of the first invalid steps is logged; after that, one in a hundred.
_LOGGED_EACH = 20
_LOGGED_EVERY = 100
_VALID = "is_valid_step"
# The last part of the summary names of gradient norms before clipping.
GRAD_NORM = "raw_grad_norm"
# The run ends after this many steps in a row from which nothing was learned, because it would only waste device time.
MAX_IDLE_STEPS = 100


class NonFiniteStepError(UserError):
    """A step's loss or gradient is invalid, and `--stop_on_invalid_step` is set."""


class NothingLearntError(UserError):
    """Many consecutive steps taught the model nothing: each batch's weights were all 0, or its loss or gradient was invalid."""


def is_accepted(scalars: Scalars) -> bool:
    """Returns False if the learner rejects the step's gradient as invalid (its summary `is_valid_step` is below 1)."""
    return all(value >= 1.0 for value in scalars.summaries_called(_VALID))


def is_valid(scalars: Scalars) -> bool:
    """Returns False if the loss is NaN or Inf, or the learner rejects the gradient as invalid."""
    return is_accepted(scalars) and (scalars.loss is None or math.isfinite(scalars.loss))


def is_finite(scalars: Scalars) -> bool:
    """Returns False if the loss or a gradient norm is NaN or Inf."""
    return all(math.isfinite(value) for value in (scalars.loss or 0.0, *scalars.summaries_called(GRAD_NORM)))


def learns(scalars: Scalars, loss_name: str) -> bool:
    """Returns False if a step can't have improved the model.

    This is so if the loss is NaN or Inf, if every optimizer of the learner rejects the gradient, or if the loss has weight 0.

    Args:
      loss_name: the name of the loss among the weighted scalars.
    """
    accepted = scalars.summaries_called(_VALID)
    if accepted and all(value < 1.0 for value in accepted):
        return False
    return math.isfinite(scalars.loss or 0.0) and scalars.weights.get(loss_name) != 0


class InvalidSteps(Callback):
    """Counts invalid steps, and ends a run that no longer learns.

    A step is invalid if its loss is NaN or Inf, or if the learner rejects its gradient (see `is_valid`). The count is in the
    summaries as `invalid_steps`. The run ends after `MAX_IDLE_STEPS` consecutive steps without an update that could improve the
    model: the loss is NaN or Inf, every optimizer rejects the gradient, or the loss has weight 0 (see `learns`).

    Attributes:
      count: number of invalid steps since this process started.
    """

    def __init__(self, *, stop: bool = False):
        """Sets the count to 0. If `stop` is True, the first invalid step ends the run."""
        self.count = 0
        self._stop = stop
        self._idle_steps = 0
        self._loss_name = ""

    def on_open(self, run: Run) -> None:
        # Reading a field of a config costs as much as waking a thread, so it isn't done at every step.
        self._loss_name = str(run.task.learner.loss_name)

    def after_step(self, run: Run, step: int, scalars: Scalars) -> None:
        """Counts the step if it is invalid, and logs the count.

        Raises:
          NonFiniteStepError: the step is invalid, and `stop` was set.
          NothingLearntError: nothing was learned from the last `MAX_IDLE_STEPS` steps.
        """
        if not is_valid(scalars):
            self._count(run, step, scalars)
        run.log({"invalid_steps": float(self.count)})
        if learns(scalars, self._loss_name):
            self._idle_steps = 0
        else:
            self._count_idle(step, scalars)

    def _count_idle(self, step: int, scalars: Scalars) -> None:
        self._idle_steps += 1
        has_weight = scalars.weights.get(self._loss_name) != 0
        if not has_weight and self._idle_steps == 1:
            logging.warning("step %d learnt nothing: all weights of its batch are 0", step)
        if self._idle_steps < MAX_IDLE_STEPS:
            return
        why = (
            f"the last one is invalid (loss {scalars.loss}). Change the learning rate, the clipping or "
            "skip_step_gradient_norm_value, or look for NaN in the data"
            if has_weight
            else "all weights of the last batch are 0. Correct the input: weights say which rows and tokens count"
        )
        raise NothingLearntError(
            f"nothing was learnt from {self._idle_steps} steps in a row, {step - self._idle_steps + 1} to {step}: {why}. The "
            "run ends here; its checkpoints stay"
        )

    def _count(self, run: Run, step: int, scalars: Scalars) -> None:
        self.count += 1
        learner, rejected = run.task.learner, not is_accepted(scalars)
        norms = [f"gradient norm {value:g}" for value in scalars.summaries_called(GRAD_NORM)]
        threshold = learner.skip_step_gradient_norm_value
        limit = f" (skip_step_gradient_norm_value is {threshold:g})" if threshold and rejected else ""
        what = f"step {step} is invalid: loss {scalars.loss}, {', '.join(norms) or 'no gradient norm known'}{limit}"
        if self._stop:
            raise NonFiniteStepError(
                f"{what}. The run stops here without saving, because of --stop_on_invalid_step. If you start it again, it "
                "continues from its newest checkpoint and meets the same batch: change the learning rate, the data or the "
                "clipping, or leave the flag out and let the learner skip invalid steps."
            )
        if self.count <= _LOGGED_EACH or self.count % _LOGGED_EVERY == 0:
            skips = learner.check_valid_step and learner.enable_skip_step_on_gradient_anomalies
            done = "was skipped" if skips and rejected else "was applied all the same"
            logging.warning("%s. It %s; %d invalid so far.", what, done, self.count)
