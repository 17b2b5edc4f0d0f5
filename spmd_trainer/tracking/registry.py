"""The known trackers by name."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Iterable, Sequence

from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.tracking.base import Tracker


@dataclasses.dataclass(frozen=True)
class _Entry:
    """Where a tracker is.

    Attributes:
      module: the module of this package.
      cls: its class.
      package: the package that it imports.
      extra: the trainer's extra that installs the package; None if the trainer needs it anyway.
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
    """Checks names of trackers, and that their packages are installed. Imports none of them.

    Args:
      names: e.g. ['wandb'].
      where: what names them, for the message: '--track'.

    Raises:
      UserError: there is no such tracker, its name is there twice, or its package is not installed.
    """
    seen = set()
    for name in names:
        entry = TRACKERS.get(name)
        if entry is None:
            raise UserError(f"{where}: there is no tracker {name!r}{did_you_mean(name, TRACKERS)}")
        if name in seen:
            raise UserError(f"{where} names {name!r} twice")
        if entry.extra and importlib.util.find_spec(entry.package) is None:
            raise UserError(
                f"{where}: tracker {name} needs the package {entry.package}: pip install 'spmd-trainer[{entry.extra}]'"
            )
        seen.add(name)


def make(name: str) -> Tracker:
    """Returns a new tracker. Its package is not imported yet.

    Args:
      name: one of `TRACKERS`.
    """
    entry = TRACKERS[name]
    tracker: Tracker = getattr(importlib.import_module(f"spmd_trainer.tracking.{entry.module}"), entry.cls)()
    return tracker


def split_names(values: Sequence[str]) -> tuple[str, ...]:
    """Returns the names in the values of `--track`, which may be given several times: 'wandb,mlflow' and 'trackio'."""
    return tuple(name.strip() for value in values for name in value.split(",") if name.strip())
