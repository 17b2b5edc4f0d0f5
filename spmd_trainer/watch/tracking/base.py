"""`Tracker`, the interface through which a training run reports to a service that keeps the history of runs, and a table of
the known trackers.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib
import importlib.util
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from etils import epath

from spmd_trainer.callbacks import Status
from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.storage import is_remote
from spmd_trainer.watch.tracking.settings import Settings

# {name: class}. A tracker's module, the package that it imports, and the extra that installs the package have the same name.
TRACKERS = {
    "wandb": "WandbTracker",
    "mlflow": "MlflowTracker",
    "trackio": "TrackioTracker",
    "tensorboard": "TensorboardTracker",
}
_WITHOUT_EXTRA = "tensorboard"  # the trainer always needs it


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """Description of a run.

    Attributes:
      name: the run's name; by default, the name of its directory.
      project: name of a group of runs, which is called a project in W&B and an experiment in MLflow.
      experiment: the experiment's full registered name.
      settings: the resolved config as nested dicts, and under 'run' the mesh, devices, processes and versions.
      config_text: the same settings as text, one 'path: value' per line.
      job_log_dir: the run's directory.
      first_step: step of the state with which the run begins, or continues after a restart.
      tags: labels by which the run can be searched for.
      resume_id: the id that `Tracker.open` returned when the run was first tracked; None for a new run.
    """

    name: str
    project: str
    experiment: str
    settings: Settings
    config_text: str
    job_log_dir: epath.Path
    first_step: int = 0
    tags: tuple[str, ...] = ()
    resume_id: str | None = None

    @property
    def local_dir(self) -> str | None:
        """The run's directory as a local path; None if it is in an object store."""
        return None if is_remote(self.job_log_dir) else str(self.job_log_dir)


@dataclasses.dataclass(frozen=True)
class StepScalars:
    """Scalars of one step.

    Attributes:
      step: the training step.
      values: {'SUMMARY/SCALAR': value}, e.g. with the key 'train/loss' for the scalar 'loss' in the summary 'train'.
      time: time of writing, in seconds since 1970.
    """

    step: int
    values: Mapping[str, float]
    time: float


@dataclasses.dataclass(frozen=True)
class Histogram:
    """A histogram of one array.

    Attributes:
      counts: int64 [bins].
      edges: float64 [bins + 1], ascending.
    """

    counts: np.ndarray
    edges: np.ndarray


class Tracker(abc.ABC):
    """Sends one run's history to one service.

    All methods except `check` are called on one thread: first `open`, then the others, last `close`. They may block and
    raise errors, because `feed.Feed` protects the run from both. If `open` raises an error, no other method is called.

    Attributes:
      batch: maximum number of `StepScalars` per call of `scalars`.
      where: address or directory of the run, for the log; set by `open`.
    """

    batch = 1
    where = ""

    def check(self, job_log_dir: epath.Path) -> None:
        """Raises UserError if a run in `job_log_dir` can't be tracked. Called before training, on the main thread."""
        del job_log_dir

    @abc.abstractmethod
    def open(self, facts: RunFacts) -> str:
        """Begins a run, or continues the run with id `facts.resume_id`. Returns the id with which a restart continues it."""

    @abc.abstractmethod
    def scalars(self, records: Sequence[StepScalars]) -> None:
        """Records the scalars of 1 to `batch` steps.

        A run that restarts from an older checkpoint repeats steps, so a step may be earlier than steps already recorded.
        """

    @abc.abstractmethod
    def samples(self, step: int, dataset: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Records decoded examples, with the fields of `decode_out/DATASET/step_N.jsonl`."""

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Records the histograms of a step, {name: histogram}. Trackers without histograms ignore them."""
        del step, histograms

    @abc.abstractmethod
    def page(self, path: epath.Path) -> None:
        """Records the run's page, one HTML file."""

    @abc.abstractmethod
    def close(self, status: Status) -> None:
        """Ends the run and waits until everything is sent."""


def check(names: Iterable[str], where: str) -> None:
    """Checks trackers' names, and that the trackers' packages are installed. Does not import the packages.

    Args:
      names: e.g. ['wandb'].
      where: where the names were given, for error messages, e.g. '--track'.

    Raises:
      UserError: a name is unknown or repeated, or its package is not installed.
    """
    seen = set()
    for name in names:
        if name not in TRACKERS:
            raise UserError(f"{where}: unknown tracker {name!r}{did_you_mean(name, TRACKERS)}")
        if name in seen:
            raise UserError(f"{where} names {name!r} twice")
        if name != _WITHOUT_EXTRA and importlib.util.find_spec(name) is None:
            raise UserError(f"{where}: tracker {name} needs the package {name}: pip install 'spmd-trainer[{name}]'")
        seen.add(name)


def make(name: str) -> Tracker:
    """Creates the tracker with this name, a key of `TRACKERS`. The package that the tracker needs is imported later."""
    tracker: Tracker = getattr(importlib.import_module(f"spmd_trainer.watch.tracking.{name}"), TRACKERS[name])()
    return tracker
