"""The settings of a run: one frozen dataclass for each mode. Each setting is declared once; see `spmd_trainer.settings`."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from spmd_trainer.errors import UserError
from spmd_trainer.inputs.text_settings import TokeniseConfig, TokenizerConfig
from spmd_trainer.settings import Settings, names, seconds, setting, size, texts
from spmd_trainer.training import rooms

# The functions that read settings are imported when they are called, so that flags can be parsed before JAX is imported.
if TYPE_CHECKING:
    from etils import epath

    from spmd_trainer.base_experiment import BaseExperiment
    from spmd_trainer.callbacks import Callback
    from spmd_trainer.training.experiment_config import ResolvedExperiment
    from spmd_trainer.training.xla_flags import Options

    Experiment: TypeAlias = str | type[BaseExperiment] | BaseExperiment

_what = functools.partial(setting, group="What to run")
_checkpoints = functools.partial(setting, group="Checkpoints")
_training = functools.partial(setting, group="During training")
_planning = functools.partial(setting, group="Checking and planning")
# Settings of training that other modes ignore.
_of_training = functools.partial(_training, carried=True, noted=True)
_of_watch = functools.partial(_of_training, room="watch")


def _reader(module: str, function: str) -> Callable[[str, Any], Any]:
    return lambda flag, value: getattr(importlib.import_module(f"spmd_trainer.{module}"), function)(flag, value)


read_directory, _mesh = _reader("storage", "directory"), _reader("step.mesh_choice", "read_mesh")
_xla_options, _averages = _reader("training.xla_flags", "read"), _reader("training.averages", "read")


@dataclasses.dataclass(frozen=True)
class RunConfig(Settings):
    """The resolved settings of a run. `--mode=eval`, `decode`, `decode_once`, `infer` and `data` have no further settings.

    Attributes:
      mode: one of `cli.modes.MODES`.
      writes_reports: whether `inspect` and plans also write their reports to files in `job_log_dir`.
    """

    experiment: ResolvedExperiment
    job_log_dir: epath.Path = _what(
        dataclasses.MISSING,
        "Directory of the run: checkpoints, summaries, decoded outputs, config.txt.",
        value="DIR",
        read=read_directory,
    )
    mode: str = "eval"
    mesh: Sequence[tuple[str, int]] | None = _what(
        None,
        "Use this mesh instead of the experiment's, e.g. data:4,mdl:2. One size may be -1; declared axes that it leaves out get "
        "size 1.",
        value="AXIS:SIZE,...",
        read=_mesh,
    )
    restore_checkpoint_dir: epath.Path | None = _checkpoints(
        None, "Read checkpoints from DIR instead of JOB_LOG_DIR/checkpoints.", value="DIR", read=read_directory
    )
    restore_checkpoint_step: int | None = _checkpoints(None, "Restore step N, not the newest.", value="N", at_least=0)
    eval_averages: str | None = _checkpoints(
        None,
        "Evaluate, decode and export ema, schedule_free (such an optimizer's default), last:K (mean of K checkpoints), or none.",
        value="AVERAGES",
        read=_averages,
    )
    jax_profiler_port: int | None = _training(
        None, "Serve JAX's profiler on this port.", value="PORT", at_least=1, compared=False
    )
    jax_cache_dir: str | None = _training(
        None,
        "Directory of JAX's persistent compilation cache; an empty value disables the cache. Default: JAX_COMPILATION_CACHE_DIR "
        "if set, otherwise spmd-trainer/jax in the user's cache directory. --topology disables the cache.",
        value="DIR",
        compared=False,
        empty=True,
    )
    data_cache_dir: str | None = _training(
        None,
        "Tokenise text, conversations and pairs once, all processes together, into DIR, which all can read; later runs find it.",
        value="DIR",
        compared=False,
    )
    data_cache_limit: int | None = _training(
        None,
        "Remove token stores that no run uses from a local --data_cache_dir until they have at most SIZE, e.g. 500GB.",
        value="SIZE",
        read=size,
        compared=False,
    )
    writes_reports: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data_cache_limit is not None and not self.data_cache_dir:
            raise UserError("--data_cache_limit goes with --data_cache_dir=DIR")

    def resolved(self, exp: Experiment, overrides: Sequence[str], join: Callable[[], int] | None) -> RunConfig:
        """Returns a copy of these settings with the resolved experiment; see `experiment_config.resolve`."""
        from spmd_trainer.training import experiment_config

        return dataclasses.replace(self, experiment=experiment_config.resolve(exp, overrides, self.mesh, join))

    @property
    def checkpoint_dir(self) -> epath.Path:
        return self.restore_checkpoint_dir or self.job_log_dir / "checkpoints"


@dataclasses.dataclass(frozen=True)
class StepConfig(RunConfig):
    """Settings of the modes that take or compile training steps."""

    num_minibatches: int | None = _training(
        None,
        "Parts that training divides its batch into, one after the other, instead of the partitioner's num_minibatches.",
        value="N",
        at_least=1,
    )


@dataclasses.dataclass(frozen=True)
class TrainConfig(StepConfig):
    """Settings of `--mode=train`.

    Attributes:
      callbacks: the caller's own callbacks, called after those of `task.train.callbacks`.
      step_inputs: {path: value} of hyperparameters to pass to the compiled step as inputs; see `training.step_inputs`.
    """

    mode: str = "train"
    enable_checkpoint_saving: bool = _of_training(
        True, "Save checkpoints during training.", group="Checkpoints", off="Don't save checkpoints."
    )
    exit_after_ondemand_checkpoint: bool = _of_training(
        True,
        "Exit after saving the checkpoint that SIGTERM or SIGHUP requests. Ctrl-C always exits.",
        group="Checkpoints",
        off="Continue training after saving the checkpoint that SIGTERM requests.",
    )
    eval_on_test: bool = _of_training(
        True, "Evaluate during training, every task.train.eval_interval_steps.", off="Don't evaluate during training."
    )
    decode_during_train: bool = _of_training(False, "Decode during training, every task.train.decode_interval_steps.")
    stop_on_invalid_step: bool = _of_training(
        False,
        "Stop the run at a step whose loss or gradient norm is NaN or Inf, or whose gradient norm reaches "
        "skip_step_gradient_norm_value, instead of skipping the step.",
    )
    check_replicas_every: int = _of_watch(
        0,
        "Every N training steps, and before such a step is saved, compare the bits of all values that several devices hold; a "
        "difference ends the run with status 6, and names the device and the variable. 0 compares nothing.",
        value="N",
        at_least=0,
    )
    check_repeat_every: int = _of_watch(
        0,
        "Every N training steps, take the step twice from the same state and batch, and compare the bits; a difference ends the "
        "run with status 6. Such a step takes twice the time, and memory for one more state. 0 repeats nothing.",
        value="N",
        at_least=0,
    )
    watchdog_seconds: float = _of_watch(
        600.0,
        "When no process makes progress for this many seconds, log who is behind, in which phase, with stacks; 0 reports none.",
        value="SECONDS",
        at_least=0,
    )
    hang_seconds: float = _of_watch(
        0.0,
        "When no process makes progress for this many seconds, end the run with status 4, so that a supervisor starts it again. "
        "Longer than the longest compilation, restore and save. 0 never ends it.",
        value="SECONDS",
        at_least=0,
    )
    track: tuple[str, ...] = _training(
        (),
        "Also tell these trackers of a training run, e.g. --track=wandb,mlflow; there are wandb, mlflow, trackio and "
        "tensorboard. May be repeated.",
        value="NAME,...",
        read=names,
        compared=False,
        room="watch",
    )
    callbacks: Sequence[Callback] = ()
    step_inputs: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.callbacks, Sequence):
            raise UserError(f"callbacks={self.callbacks!r:.100}: give a list")
        if 0 < self.hang_seconds <= self.watchdog_seconds:
            raise UserError(
                f"--hang_seconds={self.hang_seconds:g} would end the run before --watchdog_seconds={self.watchdog_seconds:g} "
                f"reports why; give a longer --hang_seconds, or --watchdog_seconds={self.hang_seconds / 3:g}"
            )


@dataclasses.dataclass(frozen=True)
class ChipsConfig(StepConfig):
    """Settings of `--mode=inspect` and `--mode=plan`, which can compile for chips that aren't on this machine (`--topology`)."""

    topology: str | None = _planning(
        None,
        "Chips that need not be here, e.g. v5e:16x16, a TPU slice, or h100:32x8, 32 hosts with 8 GPUs each. --mode=inspect also "
        "compiles the train step for them and prints the plan: memory, time, collectives, FLOPs. --mode=plan searches for them.",
        value="CHIP:SHAPE",
    )
    num_slices: int = _planning(1, "Slices of --topology; for GPUs, times as many hosts.", value="N", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_slices > 1 and not self.topology:
            raise UserError("--num_slices goes with --topology")


@dataclasses.dataclass(frozen=True)
class InspectConfig(ChipsConfig):
    """Settings of `--mode=inspect`."""

    mode: str = "inspect"
    plan: bool = _planning(
        False,
        "With --mode=inspect: also compile the train step for the available devices and print the plan.",
        instead="--mode=plan searches for a topology",
    )


@dataclasses.dataclass(frozen=True)
class PlanConfig(ChipsConfig):
    """Settings of `--mode=plan`."""

    mode: str = "plan"
    search: tuple[str, ...] = _planning(
        ("mesh",),
        "With --mode=plan: what to search, of mesh, remat, minibatches and batch; or memory, for what makes the experiment fit.",
        value="mesh,remat,...",
        read=names,
        choices=("mesh", "remat", "minibatches", "batch", "memory"),
    )
    budget: float = _planning(
        "20m", "With --mode=plan: how long to compile candidates, e.g. 90s, 20m or 1h.", value="20m", read=seconds
    )


@dataclasses.dataclass(frozen=True)
class VerifyConfig(StepConfig):
    """Settings of `--mode=verify`."""

    mode: str = "verify"
    verify_steps: int = _planning(5, "Training steps that --mode=verify compares.", value="N", at_least=1, carried=True)
    verify_against: Options | None = _planning(
        None,
        "XLA options, e.g. 'xla_cpu_enable_fast_math=true': --mode=verify compares with and without them, not with one device.",
        value="'XLA_OPTION=VALUE ...'",
        read=_xla_options,
    )


@dataclasses.dataclass(frozen=True)
class CoordCheckConfig(RunConfig):
    """Settings of `--mode=coord_check`, which checks muP: it trains models of several widths for a few steps."""

    mode: str = "coord_check"
    widths: tuple[str, ...] = _planning(
        ("1", "2", "4", "8"),
        "With --mode=coord_check: the widths, as multiples of task.mup.base.",
        value="1,2,...",
        read=names,
    )
    coord_steps: int = _planning(4, "With --mode=coord_check: number of training steps.", value="N", at_least=1)
    without_mup: bool = _planning(False, "With --mode=coord_check: leave muP's multipliers out, to compare.")

    @property
    def multiples(self) -> list[int]:
        """The values of `--widths`, multiples of the base model's width, as integers in ascending order.

        Raises:
          UserError: the widths are not two or more different whole numbers.
        """
        found = sorted({int(width) for width in self.widths if width.isdecimal() and int(width)})
        if len(found) < 2 or len(found) < len(self.widths):
            raise UserError(f"--widths={','.join(self.widths)}: give two or more different whole numbers, e.g. 1,2,4,8")
        return found


@dataclasses.dataclass(frozen=True)
class ReplayConfig(StepConfig):
    """Settings of `--mode=replay`."""

    mode: str = "replay"
    replay_step: int = _planning(
        None,
        "With --mode=replay: the step to take again.",
        flag="step",
        value="N",
        at_least=1,
        required="--mode=replay needs --step=N, the step to look into",
    )


# Settings classes by mode. Those of further modes are in `mode_configs`; modes without their own class use `RunConfig`.
_CONFIGS: dict[str, type[Settings]] = {
    "train": TrainConfig,
    "inspect": InspectConfig,
    "plan": PlanConfig,
    "verify": VerifyConfig,
    "coord_check": CoordCheckConfig,
    "replay": ReplayConfig,
    "tokenise": TokeniseConfig,
    "tokenizer": TokenizerConfig,
}


@functools.cache
def config_class(mode: str) -> type[Settings]:
    if mode == "sweep" and (sweeps := rooms.find("sweeps.settings")):
        of_sweep: type[Settings] = sweeps.SweepConfig
        return of_sweep
    from spmd_trainer.training import mode_configs

    if mode in mode_configs.CONFIGS:
        return mode_configs.CONFIGS[mode]
    if mode not in ("lm_eval", "chat") or rooms.missing("lm_eval"):
        return _CONFIGS.get(mode, RunConfig)
    from spmd_trainer.lm_eval.settings import ChatSettings, LmEvalSettings

    bases = (LmEvalSettings if mode == "lm_eval" else ChatSettings, RunConfig)
    return dataclasses.make_dataclass(f"{mode}_config", [("mode", str, mode)], bases=bases, frozen=True)


def make_run_config(
    exp: Experiment,
    job_log_dir: str | os.PathLike[str],
    *,
    mode: str = "train",
    overrides: Iterable[str] = (),
    join: Callable[[], int] = lambda: 1,
    **settings: Any,
) -> RunConfig:
    """Checks a mode's settings, then resolves the experiment. Touches no device.

    Args:
      exp: a registered name, an experiment class or an instance.
      job_log_dir: the directory for all outputs of this run.
      mode: a mode that runs an experiment.
      overrides: overrides of the experiment, each as 'path=value'.
      join: connects the job's processes and returns their number.
      **settings: further fields of the mode's settings class.

    Raises:
      UserError: a value is invalid, or needs a room (subpackage) that is not installed; see also `experiment_config.resolve`.
    """
    overrides = texts("overrides", overrides)
    # The settings are checked first, without an experiment, because resolving the experiment takes long.
    asked = cast(type[RunConfig], config_class(mode))(
        cast(Any, None), read_directory("--job_log_dir", job_log_dir), mode, **settings
    )
    rooms.check_settings(asked)
    return asked.resolved(exp, overrides, join)
