"""Sweeps of experiments with Pax's `search()`, whose search space consists of PyGlove's `pg.oneof`, `pg.floatv` and the like.

Such a PyGlove value is called a choice. Choices may be in class attributes, and in methods such as `task()` and `datasets()`,
where each choice needs a `name`. In a trial, each choice is replaced by one of its values. While the search space is collected,
and in the process that runs the sweep, each choice is replaced by its first value.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from praxis import pax_fiddle

from spmd_trainer.base_experiment import BaseExperiment, swept_attributes
from spmd_trainer.errors import UserError
from spmd_trainer.errors.installation import imported
from spmd_trainer.pax.task_fields import metrics_prefix
from spmd_trainer.sweeps import space
from spmd_trainer.sweeps.space import Values, is_literal
from spmd_trainer.sweeps.trials import PRUNED, Metric, Sweep, Trial
from spmd_trainer.training.class_overrides import with_attributes
from spmd_trainer.training.summary_writers import read_metrics

if TYPE_CHECKING:
    from etils import epath

    from spmd_trainer.training.run_config import Experiment

# The class attribute that holds the rows of `automl.parameter_sweep`; a trial gets one row of values.
_ROW = "PARAMETER_SWEEP_COMBINATION"
# Methods of an experiment in which choices may occur.
_METHODS = ("task", "datasets", "train_datasets", "eval_datasets", "decode_datasets", "decoder_datasets", "partitioner")


def has_search(cls: type[BaseExperiment]) -> bool:
    return cls.search is not BaseExperiment.search


class PaxSearch:
    """Chooses each trial's values by an experiment's `search()`. It has the same methods as `OverSpace`."""

    def __init__(self, cls: type[BaseExperiment], datasets: Sequence[str], num_trials: int | None):
        """Collects the search space of an experiment.

        Args:
          cls: the experiment.
          datasets: names of the experiment's evaluation datasets.
          num_trials: maximum number of trials; None for the maximum in `search()`.

        Raises:
          UserError: the experiment has no choices, or a `search()` that a sweep doesn't support.
        """
        pg = _pyglove()
        search = cls().search()  # Pax's automl.SearchHParams
        if search.search_algorithm is None:
            raise UserError(f"{cls.__name__}.search() has no search_algorithm; e.g. pax_fiddle.Config(automl.Sweeping)")
        self._cls = cls
        self._row = swept_attributes(cls)
        self._search = search
        self._context = pg.hyper.DynamicEvaluationContext(require_hyper_name=True)
        try:
            with self._context.collect():
                experiment = with_named_choices(cls)()
                experiment.task()
                if search.enable_dataset_tuning:
                    experiment.datasets()
                    experiment.decode_datasets()
        except ValueError as error:
            raise UserError(f"the search space of {cls.__name__}: {error}") from error
        self._hypers: Mapping[str, Any] = dict(self._context.hyper_dict)
        if not self._hypers:
            raise UserError(f"{cls.__name__} has a search(), and nothing to choose: no pg.oneof(...), pg.floatv(...)")
        for name, hyper in self._hypers.items():
            if isinstance(hyper, pg.hyper.Choices) and any(
                pg.contains(c, type=pg.hyper.HyperPrimitive) for c in hyper.candidates
            ):
                raise UserError(
                    f"{cls.__name__}: {name} has candidates with choices of their own, which a sweep can't try"
                )
        size = self._context.dna_spec.space_size
        if size == -1 and isinstance(pax_fiddle.build(search.search_algorithm)(), pg.geno.Sweeping):
            ranges = [name for name, hyper in self._hypers.items() if not isinstance(hyper, pg.hyper.Choices)]
            raise UserError(
                f"{cls.__name__}.search() sweeps all combinations, and {ranges[0]} is a range; give it pg.oneof([...]), or set "
                "search_algorithm=pax_fiddle.Config(automl.RandomSearch)"
            )
        most = num_trials or search.max_num_trials
        self.num_trials: int = most if size == -1 else min(most, size)
        self._reward = None if search.search_reward is None else pax_fiddle.build(search.search_reward)
        self._datasets = datasets

    def metric(self, loss: str) -> Metric:
        """Returns the metric by which trials are compared: the reward of `search()` or, without a reward, the metric `loss`."""
        if self._reward is None:
            return Metric.find("", self._datasets, loss, maximize=False)
        aggregator = self._search.cross_step_metric_aggregator
        aggregator = None if aggregator is None else pax_fiddle.build(aggregator)
        return _Reward("reward", True, reward=self._reward, datasets=self._datasets, aggregator=aggregator)

    def values(self, number: int, ended: Sequence[Trial]) -> Values:
        """Returns the values that the search algorithm proposes for trial `number`, given the trials that have ended.

        A new instance of the algorithm first proposes all earlier trials again, to get back into the same state.
        """
        learns_from_all = self._search.treats_early_stopped_trials_as_done
        learnt_from = {
            trial.number: trial
            for trial in ended
            if (learns_from_all or trial.status != PRUNED) and trial.value is not None and not math.isnan(trial.value)
        }
        before = random.getstate()
        random.seed(0)  # algorithms without a seed of their own draw the same numbers again
        try:
            generator = pax_fiddle.build(self._search.search_algorithm)()
            generator.setup(self._context.dna_spec)
            for earlier in range(number):
                dna, trial = generator.propose(), learnt_from.get(earlier)
                if trial is not None and self._values_of(dna) == trial.values:
                    generator.feedback(dna, trial.value)
            return self._values_of(generator.propose())
        finally:
            random.setstate(before)

    def experiment(self, exp: type[BaseExperiment], values: Values) -> tuple[Experiment, list[str]]:
        """Returns the experiment with its choices replaced by a trial's values, and no config overrides: an empty list."""
        decide = functools.partial(self._decide, values)

        def under(method: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(method)
            def call(*args: Any) -> Any:
                with _pyglove().hyper.dynamic_evaluate(decide):
                    return method(*args)

            return call

        cls = with_named_choices(exp)
        return with_attributes(cls, {name: under(getattr(cls, name)) for name in _METHODS}), []

    def description(self) -> dict[str, Any]:
        choices = {name: str(hyper) for name, hyper in self._hypers.items()}
        return {"space": choices, "method": type(pax_fiddle.build(self._search.search_algorithm)).__name__, "seed": 0}

    @property
    def stops_early(self) -> bool:
        return self._search.early_stopping is not None

    def reason_to_prune(self, sweep: Sweep, number: int, others: Sequence[Trial]) -> str:
        """Returns why the early-stopping policy of `search()` stops trial `number`; '' if it doesn't stop the trial.

        `others` are the finished and pruned trials, from which the policy learns.
        """
        policy = pax_fiddle.build(self._search.early_stopping)()
        policy.setup(self._context.dna_spec)
        policy.recover([self._as_pyglove(sweep, trial.number, trial.values, trial.status) for trial in others])
        own = self._as_pyglove(sweep, number, sweep.begin(number).values, "")
        if not own.measurements or not policy.should_stop_early(own):
            return ""
        last = own.measurements[-1]
        return f"the policy of search() stops it at step {last.step}, where the reward is {last.reward:.6g}"

    def _as_pyglove(self, sweep: Sweep, number: int, values: Values, status: str) -> Any:
        tuning = _pyglove().tuning
        metrics = _metrics_by_step(sweep.trial_directory(number), self._datasets)
        measured = [
            tuning.Measurement(step=step, elapse_secs=0.0, reward=value, metrics=dict(metrics.get(step, {})))
            for step, value in sweep.curve(number).items()
        ]
        return tuning.Trial(
            id=number + 1,
            dna=self._dna_of(values),
            created_time=0,
            status="COMPLETED" if status else "PENDING",
            infeasible=status == PRUNED,
            measurements=measured,
        )

    def own_overrides(self, values: Values) -> list[str] | None:
        """Returns overrides ('NAME=value') that set a trial's values; None if a choice is not in a class attribute."""
        are_attributes = all(hasattr(self._cls, name) for name in values)
        return space.overrides(values) if are_attributes else None

    def _decide(self, values: Values, hyper: Any) -> Any:
        pg, values = _pyglove(), self._by_choice(values)
        if hyper.name not in values:
            raise UserError(f"{self._cls.__name__}: {hyper.name!r} is a choice that search() did not find in task()")
        value = values[hyper.name]
        if not isinstance(hyper, pg.hyper.Choices):
            return value
        if hyper.num_choices > 1:
            return [hyper.candidates[at] for at in self._decision(hyper, value)]
        # A value that isn't a candidate comes from `_numbers_that_vary`, which tries other values.
        known = value in [_shown(candidate) for candidate in hyper.candidates]
        return hyper.candidates[self._decision(hyper, value)] if known else value

    def _decision(self, hyper: Any, value: Any) -> Any:
        """Converts the value that a trial has for the choice `hyper` to PyGlove's form.

        The form is the index of a candidate, a list of indices if several candidates are chosen, or the value of a range.
        """
        pg = _pyglove()
        if not isinstance(hyper, pg.hyper.Choices):
            return value
        shown = [_shown(candidate) for candidate in hyper.candidates]
        return shown.index(value) if hyper.num_choices == 1 else [shown.index(one) for one in value]

    def _values_of(self, dna: Any) -> Values:
        pg, decisions = _pyglove(), dna.to_dict(key_type="name_or_id", multi_choice_key="parent")
        values: Values = {}
        for name, hyper in self._hypers.items():
            at = decisions[name]
            if isinstance(hyper, pg.hyper.Choices):
                chosen = [_shown(hyper.candidates[i]) for i in (at if isinstance(at, list) else [at])]
                at = chosen if isinstance(at, list) else chosen[0]
            values |= dict(zip(self._row, at, strict=True)) if name == _ROW else {name: at}
        return values

    def _by_choice(self, values: Values) -> Values:
        """Returns {name of a choice: value}. With `automl.parameter_sweep`, the only choice is the tuple of all `values`."""
        return {_ROW: tuple(values[name] for name in self._row)} if self._row else values

    def _dna_of(self, values: Values) -> Any:
        values = self._by_choice(values)
        decisions = {name: self._decision(hyper, values[name]) for name, hyper in self._hypers.items()}
        return _pyglove().DNA.from_dict(decisions, self._context.dna_spec)


@dataclasses.dataclass(frozen=True)
class _Reward(Metric):
    """The reward that an experiment's `search()` computes from the metrics of an evaluation. Higher is better."""

    reward: Any = None
    datasets: Sequence[str] = ()
    aggregator: Any = None

    def curve(self, directory: epath.Path) -> dict[int, float]:
        """Returns {step: reward} for the evaluations of a run, whose directory is `directory`."""
        by_step = _metrics_by_step(directory, self.datasets)
        return {step: float(self.reward(found, step)) for step, found in by_step.items()}

    def result(self, directory: epath.Path) -> tuple[int, float] | None:
        """Returns the last evaluated step of a run, and the run's reward; None if the run was never evaluated.

        If `search()` has an aggregator, the reward is computed from the metrics that it aggregates over all evaluated steps.
        Otherwise the reward is computed from the metrics of the last step.
        """
        found = _metrics_by_step(directory, self.datasets)
        if self.aggregator is None or not found:
            return super().result(directory)
        steps = [(step, {**metrics, "reward": float(self.reward(metrics, step))}) for step, metrics in found.items()]
        return max(found), float(self.reward(self.aggregator(steps), max(found)))


def _metrics_by_step(directory: epath.Path, datasets: Sequence[str]) -> dict[int, dict[str, float]]:
    """Returns {step: {Pax's name of a metric: value}} for the steps at which a run was evaluated.

    If there are no evaluation datasets, returns the steps with training summaries.
    """
    folders = {f"eval_{name}": metrics_prefix(name) for name in (*datasets, "train")} | {"train": "train/"}
    found: dict[int, dict[str, float]] = {}
    for folder, prefix in folders.items():
        for step, record in read_metrics(directory, folder).items():
            # A run writes training summaries at more steps than it is evaluated.
            if folder != "train" or step in found or not datasets:
                numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
                found.setdefault(step, {}).update({prefix + name: float(value) for name, value in numbers.items()})
    return dict(sorted(found.items()))


def first_values() -> contextlib.AbstractContextManager[object]:
    """Returns a context manager in which each choice (`pg.oneof`, ...) of an experiment is replaced by its first value."""
    context: contextlib.AbstractContextManager[object] = _pyglove().hyper.DynamicEvaluationContext().collect()
    return context


def with_named_choices(cls: type[BaseExperiment]) -> type[BaseExperiment]:
    """Returns a subclass of an experiment in which all choices (`pg.oneof`, ...) in class attributes have names.

    A choice without a name is named after its attribute. Reading the attribute gives the choice's current value.
    """
    primitive = _pyglove().hyper.HyperPrimitive
    names = [name for name in dir(cls) if isinstance(inspect.getattr_static(cls, name), primitive)]

    def reader(name: str, hyper: Any) -> property:
        arguments = {**hyper.sym_init_args, "name": hyper.name or name}
        return property(lambda self: type(hyper)(**arguments))

    body = {name: reader(name, inspect.getattr_static(cls, name)) for name in names}
    body |= {name: _Decided(functools.partial(_of_row, at)) for at, name in enumerate(swept_attributes(cls))}
    return with_attributes(cls, body)


class _Decided(property):
    """A swept attribute that has a trial's value. `refuse_search_space` refuses plain properties, but not this subclass."""


def _of_row(at: int, experiment: BaseExperiment) -> object:
    """Returns item `at` of the row of values that `automl.parameter_sweep` gives an experiment."""
    return getattr(experiment, _ROW)[at]


def _shown(candidate: Any) -> Any:
    """Returns a candidate of a choice if it is a Python literal, otherwise its repr."""
    return candidate if is_literal(candidate) else repr(candidate)


def _pyglove() -> Any:
    return imported("pyglove", "search() needs the package pyglove: pip install 'spmd-trainer[pyglove]'")
