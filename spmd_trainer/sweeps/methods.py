"""Chooses the values for each trial of a sweep: by a grid, at random, or by Optuna.

A trial's values depend on its number, the sweep's seed and the trials that have ended. So a sweep that is killed and restarted
chooses the same values as an uninterrupted sweep.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from spmd_trainer.errors import UserError
from spmd_trainer.errors.installation import imported
from spmd_trainer.sweeps import space as space_lib
from spmd_trainer.sweeps.space import Range, Space, Values

if TYPE_CHECKING:
    from spmd_trainer.base_experiment import BaseExperiment
    from spmd_trainer.sweeps.trials import Trial
    from spmd_trainer.training.run_config import Experiment


@dataclasses.dataclass(frozen=True)
class OverSpace:
    """Chooses each trial's values from a search space. `PaxSearch` has the same methods for an experiment's `search()`.

    Attributes:
      space: the settings to vary, each with its values or its range.
      num_trials: number of trials.
      seed: seed of random values.
      name: 'grid' for all combinations in order; 'random' for random values; or 'optuna' for the values that Optuna's sampler
        proposes by tree-structured Parzen estimators (Bergstra et al. 2011), which needs the pip extra `optuna`.
      maximize: True if a higher metric is better.
    """

    space: Space
    num_trials: int
    seed: int
    name: str
    maximize: bool

    def experiment(self, exp: type[BaseExperiment], values: Values) -> tuple[Experiment, list[str]]:
        """Returns the experiment to train for a trial, and config overrides ('path=value') that set the trial's values."""
        return exp, space_lib.overrides(values)

    def own_overrides(self, values: Values) -> list[str]:
        """Returns config overrides ('path=value') with which a separate run repeats a trial."""
        return space_lib.overrides(values)

    def description(self) -> dict[str, Any]:
        """Returns what distinguishes this sweep from others, as JSON values: space, method and seed."""
        return {"space": space_lib.as_json(self.space), "method": self.name, "seed": self.seed}

    def values(self, number: int, ended: Sequence[Trial]) -> Values:
        """Returns the values of a trial.

        Args:
          number: the trial's number.
          ended: the trials that have ended, in the order of their numbers. Optuna's sampler learns from their metrics.
        """
        if self.name == "grid":
            return space_lib.by_name(space_lib.grid_point(self.space, number))
        if self.name == "random":
            return space_lib.by_name(space_lib.random_point(self.space, self.seed, number))
        optuna = _optuna()
        # Seeded anew for each trial, so that a sweep that resumes after it was killed draws the same numbers.
        sampler = optuna.samplers.TPESampler(seed=self.seed * 1_000_003 + number)
        study = optuna.create_study(direction="maximize" if self.maximize else "minimize", sampler=sampler)
        for trial in ended:
            if trial.value is None:
                continue
            # NaN counts as the worst value.
            value = trial.value if trial.value == trial.value else float("-inf" if self.maximize else "inf")
            params = self._as_params(trial.values)
            study.add_trial(optuna.create_trial(params=params, distributions=self._distributions, value=value))
        params = study.ask(self._distributions).params
        # Optuna chooses the index of a value in a list, because the values may have any type.
        chosen = {path: params[path] if isinstance(x, Range) else x[params[path]] for path, x in self.space.items()}
        return space_lib.by_name(chosen)

    def _as_params(self, values: Values) -> Values:
        params: Values = {}
        for path, x in self.space.items():
            names = space_lib.names_of(path)
            value = values[path] if len(names) == 1 else [values[name] for name in names]
            if not isinstance(x, Range):
                known = list(x) if len(names) == 1 else [list(row) for row in x]
                value = known.index(value)
            params[path] = value
        return params

    @functools.cached_property
    def _distributions(self) -> dict[str, Any]:
        kinds = _optuna().distributions
        found = {}
        for path, x in self.space.items():
            if not isinstance(x, Range):
                found[path] = kinds.CategoricalDistribution(range(len(x)))
            elif x.integer:
                found[path] = kinds.IntDistribution(int(x.low), int(x.high), log=x.log)
            else:
                found[path] = kinds.FloatDistribution(x.low, x.high, log=x.log)
        return found


def _optuna() -> Any:
    needed = "--sweep_method=optuna needs the package optuna: pip install 'spmd-trainer[optuna]'"
    optuna = imported("optuna", needed)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def make(name: str, space: Space, num_trials: int | None, seed: int, *, maximize: bool) -> OverSpace:
    """Returns the object that chooses each trial's values by the method `name`.

    Args:
      name: 'grid', 'random' or 'optuna'.
      num_trials: number of trials; None for all points of a grid.
      maximize: True if a higher metric is better.

    Raises:
      UserError: the method can't be used with this space or this number of trials.
    """
    if name == "grid":
        size = space_lib.grid_size(space)
        if num_trials is not None and num_trials > size:
            raise UserError(f"--sweep_trials={num_trials}: the grid has {size} points; give at most {size}")
        num_trials = num_trials or size
    if num_trials is None:
        raise UserError(f"--sweep_method={name} needs --sweep_trials=N, the number of trials")
    return OverSpace(space, num_trials, seed, name, maximize)
