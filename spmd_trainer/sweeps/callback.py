"""The callback of a sweep's trial: writes the trial's result, and stops the trial if it is pruned or its sweep has died."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Mapping
from typing import ClassVar

import jax

from spmd_trainer import multihost
from spmd_trainer.callbacks import Callback, Run, Turn
from spmd_trainer.errors import UserError, did_you_mean, first_paragraph
from spmd_trainer.step.packing import Scalars
from spmd_trainer.sweeps import trials
from spmd_trainer.sweeps.trials import Sweep
from spmd_trainer.training import ramps
from spmd_trainer.watch import progress

# Environment variable of a trial's process: the process id of its sweep.
PARENT = "SPMD_TRAINER_SWEEP_PROCESS"


class TrialCallback(Callback):
    """Connects a trial's run to its sweep: writes the result, and stops the run when the sweep prunes it."""

    turn: ClassVar[Turn] = Turn.LAST

    def __init__(self, sweep: Sweep, number: int):
        """Stores the sweep and the number of the trial that this process trains. Writes no file."""
        self._sweep = sweep
        self._number = number
        self._pruned = ""
        self._began = time.monotonic()
        self._parent = int(os.environ.get(PARENT, "0"))

    def after_step(self, run: Run, step: int, scalars: Scalars) -> None:
        """If the sweep's process has died, sends this process SIGTERM, so that it saves a checkpoint and exits.

        A restarted sweep can't run this trial until this process has exited.
        """
        del run, step, scalars
        if self._parent and os.getppid() != self._parent:
            self._parent = 0
            os.kill(os.getpid(), signal.SIGTERM)

    def on_start(self, run: Run) -> None:
        """Stops a resumed trial at once if the sweep prunes it because of its evaluation at the current step."""
        self._prune(run, run.step)

    def after_eval(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        """Stops the trial if the sweep prunes it. Raises UserError if the evaluation doesn't have the sweep's metric."""
        name = self._sweep.metric.name
        if "/" in name and name not in metrics:
            raise UserError(
                f"--sweep_metric={name}: the evaluations give {sorted(metrics)}{did_you_mean(name, metrics)}"
            )
        run.summaries.flush()
        self._prune(run, step)

    def _prune(self, run: Run, step: int) -> None:
        """Stops the run if the sweep prunes its trial at `step`. Process 0, which has the metrics, decides for all others."""
        if not self._sweep.stops_early:
            return
        value = None if jax.process_index() else self._sweep.curve(self._number).get(step)
        self._pruned = multihost.broadcast(
            "" if value is None else self._sweep.reason_to_prune(self._number, step, value)
        )
        if self._pruned:
            run.stop(f"pruned: {self._pruned}")

    def on_end(self, run: Run) -> None:
        """Writes the trial's result if the run is complete. Otherwise writes only its running time; the trial resumes later."""
        run.summaries.flush()
        result = self._sweep.metric.result(run.job_log_dir)
        if not run.is_complete:
            self._write()
        elif result is None:
            self._write(status=trials.BROKEN, reason=f"it has no {self._sweep.metric.name}: it was never evaluated")
        else:
            (step, value), status = result, trials.PRUNED if self._pruned else trials.FINISHED
            self._write(status=status, value=value, step=step, flops=training_flops(run, step), reason=self._pruned)

    def on_failure(self, run: Run, error: BaseException) -> None:
        del run
        if isinstance(error, Exception):
            text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_paragraph(error)}"
            self._write(status=trials.BROKEN, reason=text)
        else:
            self._write()

    def _write(self, **ended: object) -> None:
        """On process 0, writes the trial's file with the given fields, and adds this run's time to `Trial.seconds`."""
        if jax.process_index():
            return
        before = self._sweep.begin(self._number)
        seconds = before.seconds + time.monotonic() - self._began
        self._sweep.write(dataclasses.replace(before, seconds=round(seconds, 1), **ended))  # type: ignore[arg-type]


def training_flops(run: Run, steps: int) -> float:
    """Returns the model's FLOPs in a run's first `steps` training steps; 0 if the run's batches have no tokens."""
    per_token = progress.flops_per_item(run).get("mfu_6n", 0.0)
    stages, like_the_last = ramps.stages_of(run.task.train), float(steps)
    if stages and (rows := ramps.stage_at(stages, max(steps - 1, 0)).rows):
        like_the_last = ramps.steps_left(stages, 0, steps) * (stages[0].rows or rows) / rows
    return per_token * progress.items_per_step(run)[0] * like_the_last
