"""The directory of a sweep, and the status of its trials.

`sweep.json` describes the sweep. Trial n is a separate run in `trials/000n`. The file `trials/000n.json` has the trial's values
as soon as the trial begins, and its result once it has ended. A sweep that was killed resumes from these files alone.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from etils import epath

from spmd_trainer.errors import UserError
from spmd_trainer.storage import json_values
from spmd_trainer.storage.files import write_atomically
from spmd_trainer.storage.run_files import LOGS, names_in
from spmd_trainer.sweeps.methods import OverSpace
from spmd_trainer.sweeps.space import Values
from spmd_trainer.training.summary_writers import read_metrics

if TYPE_CHECKING:
    from spmd_trainer.sweeps.pax_search import PaxSearch

SWEEP = "sweep.json"
# A trial that has begun and not ended is UNFINISHED; a trial that has ended has one of the other statuses.
UNFINISHED, FINISHED, PRUNED, BROKEN = "unfinished", "finished", "pruned", "broken"
# A trial is pruned only if at least this number of other trials have reached the same step.
_LEAST_OTHERS = 3


@dataclasses.dataclass(frozen=True)
class Trial:
    """A trial of a sweep.

    Attributes:
      number: the trial's number, from 0.
      values: {path of a config field, or name of a class attribute: value}.
      status: 'unfinished'; 'finished'; 'pruned'; or 'broken', if it ended with an error or was never evaluated.
      value: the metric at the trial's last evaluation; NaN if training has diverged; None if there is no result.
      step: the training step of that evaluation.
      seconds: total running time in seconds, including the time before interruptions.
      flops: the model's FLOPs in training up to `step`, 6 for each parameter and token; 0 if the batches have no tokens.
      reason: why the trial was pruned or is broken.
    """

    number: int
    values: Values
    status: str = UNFINISHED
    value: float | None = None
    step: int | None = None
    seconds: float = 0.0
    flops: float = 0.0
    reason: str = ""

    @property
    def has_ended(self) -> bool:
        """True if the sweep does not start this trial again."""
        return self.status != UNFINISHED


@dataclasses.dataclass(frozen=True)
class Metric:
    """The metric by which trials are compared.

    Attributes:
      name: 'DATASET/metric' of an evaluation, or 'loss', the training loss.
      maximize: True if a higher value is better.
      folder: the folder in the run's `summaries` that has the metric.
      key: the metric's name in this folder.
    """

    name: str
    maximize: bool
    folder: str = ""
    key: str = ""

    @classmethod
    def find(cls, name: str, datasets: Sequence[str], loss: str, *, maximize: bool) -> Metric:
        """Returns the metric with this name.

        Args:
          name: as in `Metric`; '' for the loss of the first evaluation dataset, or the training loss if there are no datasets.
          datasets: names of the evaluation datasets.
          loss: name of the loss in evaluations.
          maximize: True if a higher value is better.

        Raises:
          UserError: `name` is not 'loss' and doesn't begin with the name of an evaluation dataset.
        """
        name = name or (f"{datasets[0]}/{loss}" if datasets else "loss")
        if name == "loss":
            return cls(name, maximize, "train", "loss")
        dataset = max((one for one in datasets if name.startswith(f"{one}/")), key=len, default=None)
        if dataset is None:
            raise UserError(
                f"--sweep_metric={name}: give DATASET/metric, with one of the evaluation datasets "
                f"{', '.join(datasets) or '(the experiment has none)'}, or loss, the training loss"
            )
        return cls(name, maximize, f"eval_{dataset}", name.removeprefix(f"{dataset}/"))

    def curve(self, directory: epath.Path) -> dict[int, float]:
        """Returns {training step: value of this metric} for the evaluations of the run in `directory`."""
        records = read_metrics(directory, self.folder)
        return {step: float(records[step][self.key]) for step in sorted(records) if self.key in records[step]}

    def result(self, directory: epath.Path) -> tuple[int, float] | None:
        """Returns (training step, value) of the last evaluation of the run in `directory`; None if it was never evaluated."""
        return max(self.curve(directory).items(), default=None)

    def is_better(self, value: float, other: float) -> bool:
        """Returns True if `value` is better than `other`; NaN is the worst."""
        if math.isnan(value) or math.isnan(other):
            return not math.isnan(value)
        return value > other if self.maximize else value < other


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A sweep and its directory.

    Attributes:
      method: chooses the values of the trials.
      metric: the metric by which trials are compared.
      prunes: True stops trials that are worse than the median of earlier trials. Not used with an experiment's `search()`,
        whose early-stopping policy decides.
      common: settings that all trials share, as JSON values: overrides, mesh, ...
    """

    directory: epath.Path
    experiment: str
    method: OverSpace | PaxSearch
    metric: Metric
    prunes: bool
    common: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def trial_directory(self, number: int) -> epath.Path:
        return self.directory / "trials" / f"{number:04}"

    def trial_file(self, number: int) -> epath.Path:
        return self.directory / "trials" / f"{number:04}.json"

    def open(self) -> None:
        """Writes `sweep.json`. If it exists, checks instead that it describes this sweep (with any number of trials).

        Raises:
          UserError: the directory holds a different sweep or other files, or `sweep.json` can't be read.
        """
        metric = {"metric": self.metric.name, "goal": "max" if self.metric.maximize else "min", "prune": self.prunes}
        wanted = {"experiment": self.experiment, **self.method.description(), **metric, "common": self.common}
        wanted = json.loads(json.dumps(wanted, default=repr))
        found = _read(self.directory / SWEEP)
        for name in found.keys() & wanted.keys():
            if found[name] != wanted[name]:
                raise UserError(
                    f"--job_log_dir={self.directory} holds a sweep whose {name} is {found[name]!r:.200}, not "
                    f"{wanted[name]!r:.200}; give each sweep a directory of its own"
                )
        if found:
            return
        if others := sorted(names_in(self.directory) - {LOGS, "lock"}):
            raise UserError(
                f"--job_log_dir={self.directory} is not empty and no sweep ({others[0]}); give a new or an empty directory"
            )
        write_atomically(self.directory / SWEEP, json.dumps(wanted, indent=1).splitlines())

    def trial(self, number: int) -> Trial | None:
        """Reads trial `number` from its file; returns None if it has not begun. Raises UserError if the file can't be read."""
        found = _read(self.trial_file(number))
        try:
            if found:
                values = {path: ast.literal_eval(text) for path, text in found["values"].items()}
                return Trial(number, **{**found, "values": values})
            return None
        except (TypeError, ValueError, SyntaxError, KeyError, AttributeError) as error:
            raise UserError(f"{self.trial_file(number)} is no trial of this version: {error}") from error

    def trials(self) -> list[Trial]:
        """Returns the trials that have begun, in the order of their numbers."""
        names = sorted(names_in(self.directory / "trials"))
        numbers = [int(name.removesuffix(".json")) for name in names if re.fullmatch(r"\d+\.json", name)]
        found = (self.trial(number) for number in sorted(numbers) if number < self.method.num_trials)
        return [trial for trial in found if trial is not None]

    @property
    def stops_early(self) -> bool:
        return self.prunes if isinstance(self.method, OverSpace) else self.method.stops_early

    def begin(self, number: int) -> Trial:
        """Returns trial `number`. If it has not begun, chooses its values and writes them to its file."""
        found = self.trial(number)
        if found is None:
            ended = [trial for trial in self.trials() if trial.has_ended]
            found = Trial(number, self.method.values(number, ended))
            self.write(found)
        return found

    def write(self, trial: Trial) -> None:
        # Values are written as Python literals: JSON has no tuples.
        record = {**vars(trial), "values": {path: repr(value) for path, value in trial.values.items()}}
        del record["number"]
        write_atomically(self.trial_file(trial.number), json.dumps(record, indent=1).splitlines())

    def curve(self, number: int) -> dict[int, float]:
        """Returns {training step: value of the metric} for the evaluations of trial `number`."""
        return self.metric.curve(self.trial_directory(number))

    def best(self, trials: Sequence[Trial]) -> Trial | None:
        """Returns the best finished trial among `trials`; None if no finished trial has a value."""
        best: Trial | None = None
        for trial in trials:
            if trial.status != FINISHED or trial.value is None or math.isnan(trial.value):
                continue
            if best is None or best.value is None or self.metric.is_better(trial.value, best.value):
                best = trial
        return best

    def reason_to_prune(self, number: int, step: int, value: float) -> str:
        """Returns the reason to prune a trial; '' if the trial should continue.

        Compares the trial only with finished and pruned trials that have lower numbers. A sweep that was killed and resumes
        therefore prunes the same trials as a sweep without interruption.

        Args:
          number: the trial's number.
          step: the training step of the trial's last evaluation.
          value: the metric's value at this step.
        """
        if not self.stops_early:
            return ""
        others = [trial for trial in self.trials() if trial.number < number and trial.status in (FINISHED, PRUNED)]
        if not isinstance(self.method, OverSpace):
            return self.method.reason_to_prune(self, number, others)
        # The median stopping rule (Golovin et al. 2017, section 3.2.2): a trial stops if its value at a step is worse than the
        # median of the best values that the other trials had reached by this step.
        reached = []
        for trial in others:
            values = [v for at, v in self.curve(trial.number).items() if at <= step and not math.isnan(v)]
            if values and (trial.step or 0) >= step:
                reached.append(max(values) if self.metric.maximize else min(values))
        if len(reached) < _LEAST_OTHERS or not self.metric.is_better(median := statistics.median(reached), value):
            return ""
        return (
            f"{self.metric.name} is {value:.6g} at step {step}, and {median:.6g} is the median of {len(reached)} others"
        )


def _read(path: epath.Path) -> Mapping[str, Any]:
    """Returns the JSON object in a file; {} if the file does not exist. Raises UserError if it can't be read."""
    with contextlib.suppress(FileNotFoundError):
        try:
            return json_values.parse_object(json_values.content_of(path), finite=False)
        except ValueError as error:
            raise UserError(f"{path} can't be read: {error}") from error
    return {}
