"""What a run was asked to do. Flags and arguments become one `RunConfig`, once; nothing changes it afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from etils import epath

from spmd_trainer.base_experiment import BaseExperiment
from spmd_trainer.callbacks import Callback
from spmd_trainer.errors import UserError
from spmd_trainer.training import experiment_config
from spmd_trainer.training.experiment_config import ResolvedExperiment
from spmd_trainer.training.xla_flags import Options

if TYPE_CHECKING:
    from spmd_trainer.lm_eval.settings import LmEvalSettings


@dataclasses.dataclass(frozen=True)
class FailurePolicy:
    """What a training run does when something goes wrong.

    Attributes:
      watchdog_seconds: if no process makes progress for longer, that is reported; 0 reports none.
      stop_on_invalid_step: end the run at a step whose loss or gradient is NaN or Inf, or that the learner would skip.
      check_replicas_every: steps between two comparisons of the devices' copies; 0 compares none.
      check_repeat_every: steps between two that are taken twice and compared; 0 for none.
      hang_seconds: if no process makes progress for longer, the run ends with status 4; 0 for never.

    Raises:
      UserError: a time is negative, or the run would end before the report.
    """

    watchdog_seconds: float = 600.0
    stop_on_invalid_step: bool = False
    check_replicas_every: int = 0
    check_repeat_every: int = 0
    hang_seconds: float = 0.0

    def __post_init__(self) -> None:
        """Checks the times."""
        for name in ("watchdog_seconds", "hang_seconds"):
            if not getattr(self, name) >= 0:
                raise UserError(f"{name}={getattr(self, name):g}; give a number of seconds, or 0 to switch it off")
        if 0 < self.hang_seconds <= self.watchdog_seconds:
            raise UserError(
                f"--hang_seconds={self.hang_seconds:g} would end the run before --watchdog_seconds={self.watchdog_seconds:g} "
                f"reports why; give a longer --hang_seconds, or --watchdog_seconds={self.hang_seconds / 3:g}"
            )


@dataclasses.dataclass(frozen=True)
class ExportSettings:
    """What `export` writes.

    Attributes:
      directory: the folder to write.
      dtype: 'float32', 'bfloat16' or 'float16'; None: that of the variables.
      use_ema: write the moving averages of the variables.
      adapter: write the adapters alone, as a folder of PEFT; False: a model that they are merged into.
    """

    directory: epath.Path
    dtype: str | None = None
    use_ema: bool = False
    adapter: bool = False


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The command line, resolved.

    Attributes:
      experiment: the experiment with the overrides applied.
      job_log_dir: where everything of this run goes.
      mode: train, eval, decode, decode_once, infer, inspect, plan, verify, replay, data, export or lm_eval.
      restore_checkpoint_dir: read checkpoints from here instead of `job_log_dir/checkpoints`.
      restore_checkpoint_step: this step instead of the newest.
      eval_on_test: evaluate during training on every evaluation dataset.
      decode_during_train: decode during training, at `decode_interval_steps`.
      enable_checkpoint_saving: False trains without saving.
      exit_after_ondemand_checkpoint: leave after the checkpoint that a signal asked for.
      verify_steps: steps that `verify` takes.
      verify_against: XLA options by name; `verify` compares with and without them. None: the mesh with one device.
      plan: `inspect` also compiles the train step and says what it needs.
      topology: the same for chips that aren't here, e.g. 'v5e:16x16' or 'h100:32x8'; see `analysis.topologies`.
      num_slices: number of slices of `topology`.
      search: what `plan` searches; see `plan_candidates.DIMENSIONS`.
      budget: seconds that `plan` searches.
      num_minibatches: replaces the partitioner's own; None: as the experiment sets it.
      writes_reports: whether `inspect` and plans write files into `job_log_dir`, besides printing.
      mesh: replaces the declared mesh, e.g. (('data', 4), ('mdl', 2)); declared axes that it leaves out get size 1.
      failure_policy: what training does when something goes wrong.
      callbacks: the caller's own, called after those of `task.train.callbacks`.
      track: names of the trackers that training tells of the run, besides those of its callbacks; see `tracking.registry`.
      jax_cache_dir: see `compile_cache.enable`.
      export: what `export` writes.
      lm_eval: what `lm_eval` judges the model with.
      replay_step: the step that `replay` takes again.
    """

    experiment: ResolvedExperiment
    job_log_dir: epath.Path
    mode: str = "train"
    restore_checkpoint_dir: epath.Path | None = None
    restore_checkpoint_step: int | None = None
    eval_on_test: bool = True
    decode_during_train: bool = False
    enable_checkpoint_saving: bool = True
    exit_after_ondemand_checkpoint: bool = True
    verify_steps: int = 5
    verify_against: Options | None = None
    plan: bool = False
    topology: str | None = None
    num_slices: int = 1
    search: Sequence[str] = ("mesh",)
    budget: float = 1200.0
    num_minibatches: int | None = None
    writes_reports: bool = True
    mesh: Sequence[tuple[str, int]] | None = None
    failure_policy: FailurePolicy = FailurePolicy()
    callbacks: Sequence[Callback] = ()
    track: Sequence[str] = ()
    jax_cache_dir: str | None = None
    export: ExportSettings | None = None
    lm_eval: LmEvalSettings | None = None
    replay_step: int | None = None

    @property
    def checkpoint_dir(self) -> epath.Path:
        """Where checkpoints are read from."""
        return self.restore_checkpoint_dir or self.job_log_dir / "checkpoints"


def make_run_config(
    exp: str | type[BaseExperiment] | BaseExperiment,
    job_log_dir: epath.PathLike,
    *,
    overrides: Iterable[str] = (),
    **settings: Any,
) -> RunConfig:
    """Resolves an experiment into a `RunConfig`.

    Args:
      exp: a registered name, an experiment class or an instance.
      job_log_dir: where everything of this run goes.
      overrides: 'path=value' each.
      **settings: further fields of `RunConfig`.

    Raises:
      UserError: see `experiment_config.resolve`.
    """
    return RunConfig(experiment_config.resolve(exp, overrides), epath.Path(job_log_dir), **settings)
