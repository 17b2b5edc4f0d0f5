"""Takes the training steps: for each, gets a batch, dispatches the step to the devices, and reads an older step's scalars."""

from __future__ import annotations

import collections
import functools

import jax
from absl import logging

from spmd_trainer.callbacks import Run
from spmd_trainer.inputs.prefetch import Prefetcher
from spmd_trainer.step.packing import Packed, Scalars, computed_clu
from spmd_trainer.train_states import PyTree
from spmd_trainer.training.callback_list import CallbackList
from spmd_trainer.training.job import Job
from spmd_trainer.training.start_up import CompiledTrainStep

INPUT_ENDED = "the training input has ended"


class StepTaker:
    """Takes the training steps of a run. Remains in use when the run's devices change.

    Reports a step's scalars some steps later, so that after the first step the host never waits for the step just dispatched.
    """

    def __init__(self, job: Job, run: Run, callbacks: CallbackList):
        self._run = run
        self._callbacks = callbacks
        self._key = job.prng_key
        self._watch = run.step_watch
        self._report = self._watch.reports(functools.partial(callbacks.call, "after_step", run))
        self._keep = job.task.train.max_inflight_steps
        self._in_flight: collections.deque[tuple[int, Packed]] = collections.deque()
        self._last: Scalars | None = None
        self._is_waiting = False
        run.waits_for_devices = lambda: self._is_waiting

    def use(self, compiled: CompiledTrainStep) -> None:
        self._fn = self._watch.around(compiled.fn, self._run)
        self._packing = compiled.packing

    def take(self, batches: Prefetcher) -> PyTree | None:
        """Dispatches one training step to the devices. If the input has ended, stops training instead.

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
        watch.dispatching()
        run.state, packed = self._fn(run.state, self._key, prefetched.batch)
        watch.dispatched(run.step + 1, packed)
        run.step += 1
        run.dispatched = prefetched.batch
        self._callbacks.call("after_dispatch", run, run.step)
        watch.waits()
        self._in_flight.append((run.step, packed))
        # The first step is waited for: a person wants to know at once that training works.
        self._report_until(self._keep if self._last is not None else 0)
        return prefetched.batch

    def drain(self) -> None:
        """Waits for every dispatched step, and reports the scalars that are not reported yet."""
        self._watch.end()
        self._report_until(0)

    def metrics(self) -> dict[str, float]:
        """Returns the loss, weighted scalars and clu metrics of the last step that was reported; {} before the first."""
        if self._last is None:
            return {}
        loss = {} if self._last.loss is None else {"loss": self._last.loss}
        return loss | dict(self._last.means) | computed_clu(self._last.clu)

    def _report_until(self, keep: int) -> None:
        while len(self._in_flight) > keep:
            step, packed = self._in_flight.popleft()
            self._is_waiting = True
            # The only copy to the host that an ordinary training step makes.
            with jax.transfer_guard_device_to_host("allow"):
                self._last = self._packing.unpack(packed)
            self._is_waiting = False
            self._report(step, self._last)
