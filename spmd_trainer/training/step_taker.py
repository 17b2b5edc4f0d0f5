"""Takes the training steps: a batch, the dispatch, and the scalars of an older step."""

from __future__ import annotations

import functools

from absl import logging

from spmd_trainer.callbacks.base import CallbackList, Run
from spmd_trainer.inputs.prefetch import Prefetcher
from spmd_trainer.train_states import PyTree
from spmd_trainer.training.in_flight import StepsInFlight
from spmd_trainer.training.job import Job
from spmd_trainer.training.start_up import CompiledTrainStep

INPUT_ENDED = "the training input has ended"


class StepTaker:
    """Takes the steps of a run, on whatever devices it is.

    Attributes:
      in_flight: the steps whose scalars are still on the devices.
    """

    def __init__(self, job: Job, run: Run, callbacks: CallbackList):
        """Takes no step yet.

        Args:
          job: the job, on the devices that the run begins on.
          run: its state and its step follow the steps.
          callbacks: told of each step.
        """
        self._run = run
        self._callbacks = callbacks
        self._key = job.prng_key
        self._watch = run.step_watch
        report = self._watch.reports(functools.partial(callbacks.call, "after_step", run))
        self.in_flight = StepsInFlight(job.task.train.max_inflight_steps, report)
        run.waits_for_devices = lambda: self.in_flight.is_waiting

    def use(self, compiled: CompiledTrainStep) -> None:
        """Takes the next steps with this program."""
        self._compiled = compiled
        self.in_flight.packing = compiled.packing

    def take(self, batches: Prefetcher) -> PyTree | None:
        """Hands one training step to the devices. If there is no batch for it, training stops.

        Args:
          batches: the training input.

        Returns:
          The batch; None if the input has ended.
        """
        run, watch = self._run, self._watch
        run.begin(f"training step {run.step + 1}", "input")
        watch.begin(run.activity[1], batches.seconds_for_others)
        prefetched = next(batches, None)
        watch.took_input(run.times.begin("step"), batches.seconds_for_others)
        if prefetched is None:
            logging.warning("%s after step %d of %d", INPUT_ENDED, run.step, run.num_steps)
            run.stop(INPUT_ENDED)
            return None
        run.state, packed = watch.take(self._compiled.fn, run, self._key, prefetched.batch)
        run.step += 1
        run.dispatched = prefetched.batch
        self._callbacks.call("after_dispatch", run, run.step)
        watch.waits()
        # The host waits for an older step, never for the one it just dispatched.
        self.in_flight.add(run.step, packed)
        return prefetched.batch

    def drain(self) -> None:
        """Waits for every step in flight."""
        self._watch.end()
        self.in_flight.drain()
