"""Moves a run from one stage of its batch-size or sequence-length ramp to the next; see `ramps`."""

from __future__ import annotations

import concurrent.futures
import contextlib

from absl import logging

from spmd_trainer.callbacks import Run
from spmd_trainer.inputs.prefetch import Prefetcher
from spmd_trainer.training import same_settings
from spmd_trainer.training.job import Job
from spmd_trainer.training.start_up import CompiledTrainStep, compile_train_step, train_batches


class Stages:
    """The ramp stages of a run. While the run trains in one stage, a thread compiles the train step of the next stage."""

    def __init__(self, job: Job, run: Run, inputs: contextlib.ExitStack):
        """Begins in the stage of `run.step`, and starts to compile the train step of the next stage.

        Args:
          run: the run, whose `batch` and `input` are replaced at each change of stage.
          inputs: the exit stack that closes the training input, and nothing else.
        """
        self.job = job
        self._run = run
        self._inputs = inputs
        self._compile_next()

    def is_due(self) -> bool:
        """Returns True if the next training step is the first of the next stage. Cheap enough to call at every step."""
        return self._next is not None and self._run.step >= self._first

    def enter(self, batches: Prefetcher) -> tuple[CompiledTrainStep, Prefetcher]:
        """Enters the next stage, between two steps. Called by every process.

        Args:
          batches: the current training input. Its prefetched batches are dropped, and read again at the new batch size.

        Returns:
          The new stage's compiled train step, and its input, which begins after the last row that a training step has used.
        """
        assert self._next is not None  # it is due
        run, (self.job, compiling) = self._run, self._next
        run.begin(f"the change to {self.job.stage}", "compile")
        step = compiling.result()
        # Each process waits for the others' compilers here, as at the start.
        same_settings.check_same_code()
        run.times.begin("input")
        self._inputs.close()
        run.batch = self.job.inputs_shape_dtype
        run.input = self._inputs.enter_context(train_batches(self.job, {"state": batches.state}))
        logging.info("the run goes on with %s", self.job.stage)
        self._compile_next()
        return step, run.input

    def _compile_next(self) -> None:
        self._next: tuple[Job, concurrent.futures.Future[CompiledTrainStep]] | None = None
        run = self._run
        later = [stage for stage in self.job.stages if run.step < stage.first < run.num_steps]
        if not later or run.is_complete:
            return
        self._first = later[0].first
        logging.info("compiling ahead for %s", later[0])
        pool = concurrent.futures.ThreadPoolExecutor(1, "compile")
        following = self.job.at_step(self._first)
        self._next = following, pool.submit(compile_train_step, following)
        pool.shutdown(wait=False)
