"""Ends training when a metric no longer improves (`task.early_stopping_fn`), and keeps the best checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from absl import logging
from praxis import base_hyperparams

from spmd_trainer import multihost
from spmd_trainer.callbacks import Callback, Run
from spmd_trainer.checkpointing import Checkpointer, steps
from spmd_trainer.checkpointing.agreement import decided_by_process_0
from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.tasks_lib import EarlyStoppingFn
from spmd_trainer.training.saving import save_state
from spmd_trainer.training.summary_writers import read_metrics

STOPPED = "early_stopping_fn ended training"


class EarlyStopping(base_hyperparams.FiddleBaseParameterizable):
    """Ends training when a metric has not improved for several evaluations. The run's `best/` has the best checkpoint.

        task_p.early_stopping_fn = pax_fiddle.Config(EarlyStopping, metric="heldout/log_pplx", patience=3)

    Attributes:
      metric: 'DATASET/metric', as logged by evaluations during training.
      mode: 'min' if lower is better, 'max' if higher is better.
      patience: number of evaluations in a row without improvement after which training ends.
      min_delta: smallest change that counts as an improvement.
    """

    metric: str = ""
    mode: str = "min"
    patience: int = 3
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if "/" not in self.metric:
            raise ValueError(f"EarlyStopping.metric={self.metric!r}; set it to 'DATASET/metric'")
        if self.mode not in ("min", "max"):
            raise ValueError(f"EarlyStopping.mode={self.mode!r}; set it to 'min' or 'max'")
        if self.patience < 1:
            raise ValueError(f"EarlyStopping.patience={self.patience}; set it to 1 or more")
        self._best: float | None = None
        self._since_best = 0

    @property
    def improved(self) -> bool:
        return self._best is not None and not self._since_best

    def dataset_among(self, names: Iterable[str]) -> str | None:
        """Returns the longest of the dataset names with which `metric` begins, or None. Names may contain slashes."""
        return max((name for name in names if self.metric.startswith(f"{name}/")), key=len, default=None)

    def __call__(self, metrics: Mapping[str, Any], running_mode: str, step: int, is_last: bool) -> bool:
        """Records an evaluation. Returns True if training should end.

        Args:
          metrics: {'DATASET/metric': value}.
          running_mode, step, is_last: unused; part of Pax's signature.

        Raises:
          UserError: `metrics` lacks the watched metric.
        """
        del running_mode, step, is_last
        if self.metric not in metrics:
            raise UserError(
                f"EarlyStopping.metric is {self.metric!r}; the evaluations give {sorted(metrics)}"
                f"{did_you_mean(self.metric, metrics)}"
            )
        value = float(metrics[self.metric]) * (1 if self.mode == "min" else -1)
        # NaN is never an improvement: comparisons with NaN are false.
        if value < (float("inf") if self._best is None else self._best - self.min_delta):
            self._best, self._since_best = value, 0
        else:
            self._since_best += 1
        return self._since_best >= self.patience


class EarlyStop(Callback):
    """Callback that calls `task.early_stopping_fn` after each evaluation during training, and stops training if it returns True.

    If the function is an `EarlyStopping`, a restarted run recovers the count of evaluations without improvement from the files
    in `summaries`. The best checkpoint so far is then kept in `job_log_dir/best`, which `--restore_checkpoint_dir` can name.
    """

    def __init__(self) -> None:
        self._best: Checkpointer | None = None
        self._has_stopped = False
        self._told_of: int | None = None
        self._watched: str | None = None

    def on_start(self, run: Run) -> None:
        """Recovers the count of evaluations without improvement. Stops the run if early stopping had ended it at this step."""
        fn = run.task.early_stopping_fn
        if not isinstance(fn, EarlyStopping):
            return
        if run.saves:
            self._best = Checkpointer(
                run.job_log_dir / "best",
                save_max_to_keep=1,
                save_keep_interval_duration=None,
                label="the best checkpoint so far, step",
            )
        self._watched = fn.dataset_among(["train", *run.eval_names])
        self._replay(run, fn)
        # Processes may see the files of summaries at different moments.
        self._has_stopped = multihost.broadcast(self._has_stopped)
        if self._best is not None:
            best = self._best.directory

            def drop_later() -> None:  # left by a run that was killed before it saved this step itself
                for step in steps.present(best):
                    if step > run.step:
                        steps.delete(best, step)

            decided_by_process_0(drop_later)
        if self._has_stopped:
            run.stop(STOPPED)

    def after_eval(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        """Calls `early_stopping_fn`, and saves the best checkpoint. All processes use the function's result on process 0.

        Doesn't call the function a second time for the same step, e.g. for one that `on_start` has replayed; or if the function
        may need the metrics of a training batch, and none was evaluated because the training input has ended.
        """
        fn = run.task.early_stopping_fn
        if fn is None:
            return
        stops = self._has_stopped
        if step != self._told_of and self._can_judge(run, fn, metrics):
            stops = bool(fn(metrics, "eval", step, step == run.num_steps))
            self._told_of = step
        self._has_stopped = multihost.broadcast(stops)
        if self._has_stopped:
            run.stop(STOPPED)
        if self._best is not None and isinstance(fn, EarlyStopping):
            found_best = fn.improved and self._told_of == step
            if multihost.broadcast(bool(found_best)):
                save_state(self._best, run)

    def on_failure(self, run: Run, error: BaseException) -> None:
        """Waits for the save in progress. If the save fails, its error is only logged."""
        del run
        if self._best is not None:
            self._best.__exit__(type(error), error, error.__traceback__)

    def on_end(self, run: Run) -> None:
        """Waits until the best checkpoint is on disk.

        Raises:
          CheckpointError: the save of the best checkpoint failed.
        """
        del run
        if self._best is not None:
            self._best.close()

    def _can_judge(self, run: Run, fn: EarlyStoppingFn, metrics: Mapping[str, float]) -> bool:
        if run.task.train.eval_skip_train or any(name.startswith("train/") for name in metrics):
            return True
        if isinstance(fn, EarlyStopping) and self._watched != "train":
            return True
        logging.warning(
            "early_stopping_fn is not asked: the training input has ended, so no training batch was evaluated"
        )
        return False

    def _replay(self, run: Run, fn: EarlyStopping) -> None:
        if self._watched is None:
            return
        key = fn.metric.removeprefix(f"{self._watched}/")
        records = read_metrics(run.job_log_dir, f"eval_{self._watched}")
        for step in sorted(step for step in records if step <= run.step and key in records[step]):
            stops = fn({fn.metric: records[step][key]}, "eval", step, False)
            self._told_of = step
            # A run that had stopped at an earlier step, and was given more patience since, continues.
            self._has_stopped = stops and step == run.step
