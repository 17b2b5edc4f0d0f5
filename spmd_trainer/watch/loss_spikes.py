"""Finds loss spikes: steps whose loss is far above that of the steps before them."""

from __future__ import annotations

import collections
import statistics

from absl import logging

from spmd_trainer.callbacks import Callback, Run
from spmd_trainer.step.packing import Scalars
from spmd_trainer.training.invalid_steps import is_valid

# A step's loss is compared with the losses of at most the first, and at least the second number of earlier valid steps.
_WINDOW = 100
_WARM_UP = 30
# A spike begins when the loss is above the median by this many deviations, and ends when it is above by less than the second.
_BEGINS = 8.0
_ENDS = 3.0
# Standard deviation of a normal distribution, divided by its median absolute deviation.
_OF_MAD = 1.4826
# The least deviation, as a part of the median: a loss that hardly varies would make a spike of every step.
_LEAST = 0.01
# A spike is this many times as far above the median as this quantile of the losses: one batch in ten may be harder than others.
_USUAL, _ABOVE_USUAL = 0.95, 3.0
# Each of the first spikes is warned of; after that, one in a hundred.
_LOGGED_EACH = 20
_LOGGED_EVERY = 100


class LossSpikes(Callback):
    """Counts loss spikes, logs warnings about them, and adds the count to the summaries as `loss_spikes`.

    A step is a spike if its loss is more than 8 deviations above the median of the last 100 valid losses. Here a deviation is
    1.4826 times the median absolute deviation, but at least 1% of the median. Unlike mean and standard deviation, these measures
    hardly change with earlier spikes. The loss must also be more than three times as far above the median as the 95th percentile
    of these losses, so that there are no spikes if one batch in ten is harder than the others. A loss that stays high counts as
    a single spike.

    Attributes:
      count: number of spikes since the run was last started.
    """

    def __init__(self) -> None:
        self.count = 0
        self._losses: collections.deque[float] = collections.deque(maxlen=_WINDOW)
        self._is_up = False

    def after_step(self, run: Run, step: int, scalars: Scalars) -> None:
        """Checks whether the step's loss is a spike. Skips steps without a valid loss, which `InvalidSteps` handles."""
        if scalars.loss is not None and is_valid(scalars):
            self._judge(step, scalars.loss)
            self._losses.append(scalars.loss)
        run.log({"loss_spikes": float(self.count)})

    def _judge(self, step: int, loss: float) -> None:
        if len(self._losses) < _WARM_UP:
            return
        middle = statistics.median(self._losses)
        least = _LEAST * abs(middle)
        limit = _ENDS if self._is_up else _BEGINS
        if loss <= middle + limit * least:  # spares most steps the deviation
            self._is_up = False
            return
        deviation = max(least, _OF_MAD * statistics.median(abs(x - middle) for x in self._losses))
        was_up, self._is_up = self._is_up, loss > middle + limit * deviation
        usual = sorted(self._losses)[int(_USUAL * (len(self._losses) - 1))] - middle
        if self._is_up and not was_up and loss <= middle + _ABOVE_USUAL * usual:
            self._is_up = False
        if self._is_up and not was_up:
            self.count += 1
            self._say(step, loss, middle, deviation)

    def _say(self, step: int, loss: float, middle: float, deviation: float) -> None:
        if self.count <= _LOGGED_EACH or self.count % _LOGGED_EVERY == 0:
            logging.warning(
                "loss spike: step %d has loss %g; the median of the %d steps before it is %g, their deviation %g. %s so far",
                step,
                loss,
                len(self._losses),
                middle,
                deviation,
                f"{self.count} spikes" if self.count > 1 else "1 spike",
            )
