"""The known trackers by name."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Iterable

from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.tracking.base import Tracker


@dataclasses.dataclass(frozen=True)
class _Entry:
    """Location of a tracker.

    Attributes:
      module: module of this package.
      cls: its class.
      package: the package that it imports.
      extra: the trainer's extra that installs the package; None if the trainer always needs it.
    """

    module: str
    cls: str
    package: str
    extra: str | None


TRACKERS = {
    "wandb": _Entry("wandb", "WandbTracker", "wandb", "wandb"),
    "mlflow": _Entry("mlflow", "MlflowTracker", "mlflow", "mlflow"),
    "trackio": _Entry("trackio", "TrackioTracker", "trackio", "trackio"),
    "tensorboard": _Entry("tensorboard", "TensorboardTracker", "tensorboard", None),
}


def check(names: Iterable[str], where: str) -> None:
    """Checks names of trackers, and that their packages are installed, without importing them.

    Args:
      names: e.g. ['wandb'].
      where: source of the names, for messages: '--track'.

    Raises:
      UserError: a name is unknown or repeated, or its package is not installed.
    """
    seen = set()
    for name in names:
        entry = TRACKERS.get(name)
        if entry is None:
            raise UserError(f"{where}: unknown tracker {name!r}{did_you_mean(name, TRACKERS)}")
        if name in seen:
            raise UserError(f"{where} names {name!r} twice")
        if entry.extra and importlib.util.find_spec(entry.package) is None:
            raise UserError(
                f"{where}: tracker {name} needs the package {entry.package}: pip install 'spmd-trainer[{entry.extra}]'"
            )
        seen.add(name)


def make(name: str) -> Tracker:
    """Makes the tracker named in `TRACKERS`. Its package is imported later."""
    entry = TRACKERS[name]
    tracker: Tracker = getattr(importlib.import_module(f"spmd_trainer.tracking.{entry.module}"), entry.cls)()
    return tracker
