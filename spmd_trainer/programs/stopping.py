"""Ending training by a metric, and keeping the best checkpoint."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import jax
from absl import logging

from spmd_trainer import multihost
from spmd_trainer.checkpointing import Checkpointer
from spmd_trainer.metrics.early_stopping import EarlyStopping
from spmd_trainer.metrics.writers import read_metrics
from spmd_trainer.programs.job import Job


class Stopping:
    """Asks `task.early_stopping_fn` after each evaluation during training.

    Where that is an `EarlyStopping`, a run that is started again takes up its count from the evaluations in `summaries`,
    and the best checkpoint so far is kept in `job_log_dir/best`, a directory for `--restore_checkpoint_dir`.

    Attributes:
      has_stopped: whether training has ended early.
      found_best: whether the last evaluation was the best so far, and its checkpoint is to be kept.
      best_checkpoints: where the best one is kept.
    """

    def __init__(self, job: Job, step: int):
        """Takes up where the run has been at `step`, the one that it starts from."""
        self._fn = job.task.early_stopping_fn
        self._num_steps = int(job.task.train.num_train_steps)
        self._expects_train = not job.task.train.eval_skip_train
        self._keeps = isinstance(self._fn, EarlyStopping) and job.settings.enable_checkpoint_saving
        self.best_checkpoints = Checkpointer(
            job.settings.job_log_dir / "best",
            save_max_to_keep=1,
            save_keep_interval_duration=None,
            label="the best checkpoint so far, step",
        )
        self.has_stopped = False
        self.found_best = False
        self._told_of: int | None = None
        self._watched: str | None = None
        if isinstance(self._fn, EarlyStopping):
            names = ["train", *(input_p.name for input_p in job.resolved.config.eval_datasets)]
            self._watched = self._fn.dataset_among(names)
            self._replay(job, self._fn, step)
            # Processes may see the files of summaries at different moments.
            self.has_stopped = bool(multihost.from_process_0(int(self.has_stopped)))
            self._drop_later(step)

    def __enter__(self) -> Stopping:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.best_checkpoints.__exit__(exc_type, exc, traceback)

    def stops(self, metrics: dict[str, float], step: int) -> bool:
        """Returns whether training is to end after this evaluation, as process 0 decides.

        A run that is started again where it had ended evaluates nothing anew; the function is not told twice. Nor is it told
        of an evaluation that lacks what it may read, because there was no training batch left to evaluate.
        """
        if self._fn is None:
            return False
        told = self.has_stopped
        if step != self._told_of and self._can_judge(self._fn, metrics):
            told = bool(self._fn(metrics, "eval", step, step == self._num_steps))
            self._told_of = step
        self.has_stopped = bool(multihost.from_process_0(int(told)))
        if self._keeps and isinstance(self._fn, EarlyStopping):
            found = self._fn.improved and self._told_of == step
            self.found_best = bool(multihost.from_process_0(int(found)))
        return self.has_stopped

    def _can_judge(self, fn: Any, metrics: dict[str, float]) -> bool:
        if not self._expects_train or any(name.startswith("train/") for name in metrics):
            return True
        if isinstance(fn, EarlyStopping) and self._watched != "train":
            return True
        logging.warning(
            "early_stopping_fn is not asked: the training input has ended, so no training batch was evaluated"
        )
        return False

    def _replay(self, job: Job, fn: EarlyStopping, start: int) -> None:
        if self._watched is None:
            return
        key = fn.metric.removeprefix(f"{self._watched}/")
        records = read_metrics(job.settings.job_log_dir, f"eval_{self._watched}")
        for step in sorted(step for step in records if step <= start and key in records[step]):
            told = fn({fn.metric: records[step][key]}, "eval", step, False)
            self._told_of = step
            # A run that had stopped here, and was given more patience since, goes on.
            self.has_stopped = told and step == start

    def _drop_later(self, start: int) -> None:
        """A best checkpoint that the run has not come to yet (it was killed before its own was saved) is made again."""
        for step in self.best_checkpoints.all_steps():
            if step > start and jax.process_index() == 0:
                (self.best_checkpoints.directory / str(step)).rmtree()
        multihost.barrier("spmd_trainer:drop_later_best")
