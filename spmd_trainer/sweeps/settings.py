"""Settings of `--mode=sweep`. With `--trial=N` they become the training settings of one trial."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from spmd_trainer import multihost
from spmd_trainer.errors import UserError
from spmd_trainer.settings import setting, settings_of, texts
from spmd_trainer.training.run_config import RunConfig, TrainConfig

if TYPE_CHECKING:
    from spmd_trainer.base_experiment import BaseExperiment
    from spmd_trainer.sweeps.space import Values
    from spmd_trainer.sweeps.trials import Sweep
    from spmd_trainer.training.experiment_config import ResolvedExperiment
    from spmd_trainer.training.run_config import Experiment

# Settings that change the results of trials. They must be the same for all trials of a sweep.
_OF_ALL_TRIALS = ("mesh", "num_minibatches", "restore_checkpoint_dir", "restore_checkpoint_step", "eval_averages")
_sweep = functools.partial(setting, group="Sweeps (--mode=sweep)")


def _texts(flag: str, value: object) -> tuple[str, ...]:
    if isinstance(value, Mapping):
        return tuple(f"{path}={json.dumps(values)}" for path, values in value.items())
    return texts(flag.removeprefix("--"), value)


@dataclasses.dataclass(frozen=True)
class SweepConfig(TrainConfig):
    """Settings of `--mode=sweep`. The training settings that it inherits apply to all trials."""

    mode: str = "sweep"
    sweep: tuple[str, ...] = _sweep(
        (),
        'What to vary: a JSON file with {path: [values]}, or PATH=[VALUE, ...], or PATH={"low": X, "high": Y, "log": true}. '
        "PATH as for --fdl.set. May be repeated. Default: the experiment's `sweep`, or its `search()`.",
        value="FILE",
        read=_texts,
    )
    sweep_method: str = _sweep(
        "grid",
        "How to choose the values: all combinations, random ones, or what Optuna proposes (extra `optuna`).",
        value="METHOD",
        choices=("grid", "random", "optuna"),
    )
    sweep_trials: int | None = _sweep(None, "Number of trials. Default: all of a grid.", value="N", at_least=1)
    sweep_metric: str = _sweep(
        "",
        "DATASET/metric of an evaluation during training, or loss, the training loss. Default: the loss of the first "
        "evaluation dataset.",
        value="NAME",
    )
    sweep_goal: str = _sweep("min", "Whether a low or a high metric is good.", value="GOAL", choices=("min", "max"))
    sweep_prune: bool = _sweep(
        False, "Stop a trial at an evaluation at which it is worse than the median of the trials before it."
    )
    sweep_seed: int = _sweep(0, "Seed of random values.", value="N", at_least=0)
    trial: int | None = _sweep(
        None,
        "Run trial N, from 0, in this process: for array jobs, with one task for each trial.",
        value="N",
        at_least=0,
    )

    def resolved(self, exp: Experiment, overrides: Sequence[str], join: Callable[[], int] | None) -> RunConfig:
        """Returns these settings with the experiment filled in; with `--trial`, the settings of that trial's training run.

        `overrides` are config overrides ('path=value'). With `--trial`, `join()` makes this process join a multi-process job.

        Raises:
          UserError: there is nothing to vary; the directory holds a different sweep; or settings of the experiment conflict.
        """
        if not self.writes_reports:
            raise UserError("--job_log_dir=DIR is required: the directory of the sweep, with a run for each trial")
        from spmd_trainer import experiment_registry
        from spmd_trainer.sweeps import pax_search

        cls: type[BaseExperiment] = experiment_registry.find(exp).cls
        has_choices = not (self.sweep or cls.sweep) and pax_search.has_search(cls)
        with pax_search.first_values() if has_choices else contextlib.nullcontext():
            named = pax_search.with_named_choices(cls) if has_choices else exp
            # `None` for `join`: this process must not take the devices, which the trials use.
            base = cast("SweepConfig", super().resolved(named, overrides, None))
        if (last := base.made.method.num_trials - 1) < (self.trial or 0):
            raise UserError(f"--trial={self.trial}: the sweep has trials 0 to {last}")
        return base if self.trial is None else _of_trial(base, base.made, self.trial, join)

    @functools.cached_property
    def made(self) -> Sweep:
        """The sweep that these settings describe. Raises UserError if they are incomplete or don't fit together."""
        from spmd_trainer.sweeps import methods, pax_search, space, trials

        experiment = self.experiment.experiment
        datasets = [str(input_p.name) for input_p in self.experiment.config.eval_datasets]
        loss, asked = self.experiment.task_p.train.learner.loss_name or "loss", self.given()
        if self.sweep or experiment.sweep:
            given = space.read_space(space.read_texts(self.sweep) if self.sweep else experiment.sweep)
            maximize = self.sweep_goal == "max"
            method: methods.OverSpace | pax_search.PaxSearch = methods.make(
                self.sweep_method, given, self.sweep_trials, self.sweep_seed, maximize=maximize
            )
            metric = trials.Metric.find(self.sweep_metric, datasets, loss, maximize=maximize)
        elif pax_search.has_search(type(experiment)):
            decided = sorted({"sweep_method", "sweep_metric", "sweep_goal", "sweep_prune", "sweep_seed"} & asked.keys())
            if decided:
                raise UserError(
                    f"--{decided[0]} goes with --sweep; here search() of {self.experiment.label} decides it"
                )
            search = pax_search.PaxSearch(type(experiment), datasets, self.sweep_trials)
            method, metric = search, search.metric(loss)
        else:
            raise UserError(
                f"experiment {self.experiment.label} has no sweep: give --sweep='LEARNING_RATE=[1e-3, 1e-2]', a JSON file, or "
                "set sweep = {'LEARNING_RATE': [1e-3, 1e-2]} in the experiment"
            )
        if self.sweep_prune and "/" not in metric.name:
            raise UserError(
                "--sweep_prune needs --sweep_metric=DATASET/metric, the metric of an evaluation during training"
            )
        common = {name: asked[name] for name in _OF_ALL_TRIALS if name in asked}
        common["overrides"] = list(self.experiment.overrides)
        return trials.Sweep(self.job_log_dir, self.experiment.name, method, metric, self.sweep_prune, common)


def _of_trial(base: SweepConfig, sweep: Sweep, number: int, join: Callable[[], int] | None) -> TrainConfig:
    from spmd_trainer.sweeps.callback import TrialCallback

    if join is not None:
        join()
    values = _agreed_values(sweep, number)
    settings = {name: getattr(base, name) for name in settings_of(TrainConfig) if name != "job_log_dir"}
    resolved = _with_values(base, sweep, values, join)
    return TrainConfig(
        resolved,
        sweep.trial_directory(number),
        callbacks=[*base.callbacks, TrialCallback(sweep, number)],
        step_inputs=_numbers_that_vary(base, sweep, values, resolved),
        **settings,
    )


def _agreed_values(sweep: Sweep, number: int) -> Values:
    """Returns the values of trial `number`, the same in all processes of the trial.

    Process 0 chooses them for all processes, which may see different sets of ended trials. Raises UserError if the sweep's
    directory holds a different sweep or other files, or can't be read.
    """
    found: dict[str, Any] = {}
    count, index = multihost.joined()
    if index == 0:
        try:
            sweep.open()
            found = {"values": {path: repr(value) for path, value in sweep.begin(number).values.items()}}
        except UserError as error:
            found = {"problem": str(error)}
    if count > 1:  # for a single process, `broadcast` would initialize the devices too early
        found = multihost.broadcast(found, name="the values of the trial")
    if "problem" in found:
        raise UserError(found["problem"])
    return {path: ast.literal_eval(text) for path, text in found["values"].items()}


def _with_values(
    base: SweepConfig, sweep: Sweep, values: Values, join: Callable[[], int] | None = None
) -> ResolvedExperiment:
    from spmd_trainer.training import experiment_config

    exp, assigned = sweep.method.experiment(type(base.experiment.experiment), values)
    kept = experiment_config.without_replaced(base.experiment.overrides, assigned)
    return experiment_config.resolve(exp, [*kept, *assigned], base.mesh, join)


def _numbers_that_vary(
    base: SweepConfig, sweep: Sweep, values: Values, resolved: ResolvedExperiment
) -> dict[str, float]:
    """Returns {path in the learner's config: value} for the learner's floats that depend on float values of the trial.

    Finds them by changing one float value of the trial at a time and comparing the learners. `resolved` is the experiment
    with the trial's values.
    """
    from spmd_trainer.training import step_inputs

    own = resolved.task_p.train.learner
    found: dict[str, float] = {}
    for path, value in values.items():
        if isinstance(value, float):
            # If the experiment refuses the changed value, the original value stays a constant of the compiled step.
            with contextlib.suppress(UserError):
                other = _with_values(base, sweep, {**values, path: 0.75 * value if value else 0.5})
                found |= step_inputs.differing(own, other.task_p.train.learner)
    return found
