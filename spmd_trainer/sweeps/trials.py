"""The directory of a sweep, and the status of its trials.

`sweep.json` describes the sweep. Trial n is a separate run in `trials/000n`. Beside it, `trials/000n.json` has the trial's values
from its first start on, and its result once it has ended. A sweep that was killed resumes from these files alone.
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
# The status of a trial that has begun and not ended, and those of trials that have ended.
UNFINISHED, FINISHED, PRUNED, BROKEN = "unfinished", "finished", "pruned", "broken"
# A trial is pruned only beside as many others that have come as far.
_LEAST_OTHERS = 3


@dataclasses.dataclass(frozen=True)
class Trial:
    """A trial of a sweep.

    Attributes:
      number: its number, from 0.
      values: {path of a config field, or name of a class attribute: value}.
      status: 'unfinished', 'finished', 'pruned', or 'broken': it ended with an error, which says nothing about its values.
      value: the metric at its last evaluation; NaN if training has diverged; None if it has none.
      step: the training step of `value`.
      seconds: how long it ran, over all its starts.
      flops: the model's FLOPs of its steps, 6 for each parameter and token; 0 if its batches have no tokens.
      reason: why it was pruned or is broken.
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
        """True if the sweep does not start it again."""
        return self.status != UNFINISHED


@dataclasses.dataclass(frozen=True)
class Metric:
    """The metric by which trials are compared.

    Attributes:
      name: 'DATASET/metric' of an evaluation, or 'loss', the training loss.
      maximize: whether a higher value is better.
      folder: the folder in `summaries` that has the metric.
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
          name: as in `Metric`; '' for the loss of the first evaluation dataset, or of training if there is none.
          datasets: names of the evaluation datasets.
          loss: name of the loss in evaluations.
          maximize: whether a higher value is better.

        Raises:
          UserError: no evaluation has such a metric.
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
        """Returns {step: value} of the evaluations of a run."""
        records = read_metrics(directory, self.folder)
        return {step: float(records[step][self.key]) for step in sorted(records) if self.key in records[step]}

    def result(self, directory: epath.Path) -> tuple[int, float] | None:
        """Returns the result of a run, (step, value) of its last evaluation; None if it has none."""
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
      method: chooses the values of its trials.
      metric: the metric by which trials are compared.
      prunes: whether trials that fall behind are stopped. An experiment's `search()` decides this itself.
      common: settings that all trials share, as JSON: overrides, mesh, ...
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
        """Writes `sweep.json`, or checks that the directory's sweep is this one. Its number of trials may differ.

        Raises:
          UserError: the directory holds another sweep or other files, or `sweep.json` can't be read.
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
        """Returns a trial from its file; None if it has not begun.

        Raises:
          UserError: the file can't be read.
        """
        found = _read(self.trial_file(number))
        try:
            if found:
                values = {path: ast.literal_eval(text) for path, text in found["values"].items()}
                return Trial(number, **{**found, "values": values})
            return None
        except (TypeError, ValueError, SyntaxError, KeyError, AttributeError) as error:
            raise UserError(f"{self.trial_file(number)} is no trial of this version: {error}") from error

    def trials(self) -> list[Trial]:
        """Returns the trials that have begun, by number."""
        names = sorted(names_in(self.directory / "trials"))
        numbers = [int(name.removesuffix(".json")) for name in names if re.fullmatch(r"\d+\.json", name)]
        found = (self.trial(number) for number in sorted(numbers) if number < self.method.num_trials)
        return [trial for trial in found if trial is not None]

    @property
    def stops_early(self) -> bool:
        return self.prunes if isinstance(self.method, OverSpace) else self.method.stops_early

    def begin(self, number: int) -> Trial:
        """Returns a trial. When it begins for the first time, its values are chosen and written to its file."""
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
        """Returns {step: value of the metric} of a trial's evaluations."""
        return self.metric.curve(self.trial_directory(number))

    def best(self, trials: Sequence[Trial]) -> Trial | None:
        """Returns the best of the finished trials; None if none has a value."""
        best: Trial | None = None
        for trial in trials:
            if trial.status != FINISHED or trial.value is None or math.isnan(trial.value):
                continue
            if best is None or best.value is None or self.metric.is_better(trial.value, best.value):
                best = trial
        return best

    def reason_to_prune(self, number: int, step: int, value: float) -> str:
        """Returns the reason to prune a trial; '' if the trial should continue.

        Compares the trial only with finished and pruned trials of lower numbers. A sweep that resumes after a kill therefore
        prunes the same trials as a sweep without interruption.

        Args:
          number: the trial's number.
          step: the step of the trial's last evaluation.
          value: the metric's value at this step.
        """
        if not self.stops_early:
            return ""
        others = [trial for trial in self.trials() if trial.number < number and trial.status in (FINISHED, PRUNED)]
        if not isinstance(self.method, OverSpace):
            return self.method.reason_to_prune(self, number, others)
        # The median stopping rule (Golovin et al. 2017, section 3.2.2): a trial stops whose value at a step is worse than the
        # median of the best values that the others had reached by this step.
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
    """Returns the object in a file; {} if there is none.

    Raises:
      UserError: the file can't be read.
    """
    with contextlib.suppress(FileNotFoundError):
        try:
            return json_values.parse_object(json_values.content_of(path), finite=False)
        except ValueError as error:
            raise UserError(f"{path} can't be read: {error}") from error
    return {}
