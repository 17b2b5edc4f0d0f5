"""Writes `sweep.html`: a sweep's trials as a table, curves and parallel coordinates, and a command for the best trial."""

from __future__ import annotations

import functools
import math
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from spmd_trainer.experiment_modules import short_name
from spmd_trainer.settings import arguments, settings_of
from spmd_trainer.sharding import page
from spmd_trainer.storage.files import write_atomically
from spmd_trainer.sweeps import scaling_law, trials
from spmd_trainer.sweeps.trials import Sweep, Trial
from spmd_trainer.training.experiment_config import without_replaced
from spmd_trainer.training.run_config import TrainConfig
from spmd_trainer.watch.pages import shared

if TYPE_CHECKING:
    from spmd_trainer.sweeps.settings import SweepConfig

FILE = "sweep.html"
# A curve is thinned to about this number of points; a screen can't show more.
_MOST_POINTS = 200


def write(config: SweepConfig, sweep: Sweep) -> None:
    own = functools.partial(page.asset, "spmd_trainer.sweeps")
    text = page.document(
        f"Sweep of {short_name(sweep.experiment)}",
        own("sweep_page.html"),
        styles=(shared("page.css"), own("sweep_page.css")),
        data=data(config, sweep),
        scripts=(shared("page.js"), own("sweep_page.js")),
    )
    write_atomically(sweep.directory / FILE, text.split("\n"))


def data(config: SweepConfig, sweep: Sweep) -> dict[str, Any]:
    found = in_order(sweep, sweep.trials())
    best = sweep.best(found)
    sized = [(t.number, t.flops, t.value) for t in found if t.status == trials.FINISHED and t.value is not None]
    return {
        "experiment": short_name(sweep.experiment),
        "directory": str(sweep.directory),
        "metric": sweep.metric.name,
        "goal": "max" if sweep.metric.maximize else "min",
        "method": str(sweep.method.description()["method"]),
        "total": sweep.method.num_trials,
        "paths": list(dict.fromkeys(path for trial in found for path in trial.values)),
        "trials": [_row(sweep, trial) for trial in found],
        "law": None if sweep.metric.maximize else scaling_law.record(sized),
        "best": None if best is None else best.number,
        "command": "" if best is None else own_command(config, sweep, best),
    }


def in_order(sweep: Sweep, found: Sequence[Trial]) -> list[Trial]:
    """Sorts trials from best to worst: finished trials, then pruned, then diverged ones, then trials without a value."""

    def key(trial: Trial) -> tuple[int, float]:
        if trial.value is None or math.isnan(trial.value):
            return (3 if trial.value is None else 2, trial.number)
        return (int(trial.status != trials.FINISHED), -trial.value if sweep.metric.maximize else trial.value)

    return sorted(found, key=key)


def own_command(config: SweepConfig, sweep: Sweep, trial: Trial) -> str:
    """Returns a command that repeats a trial as a separate run in another directory; '' if overrides can't set its values."""
    values = sweep.method.own_overrides(trial.values)
    if values is None:
        return ""
    of_training = settings_of(TrainConfig)
    flags = [
        f"--exp={short_name(sweep.experiment)}",
        f"--job_log_dir={sweep.directory}-best",
        *arguments(TrainConfig, {name: value for name, value in config.given().items() if name in of_training}),
        *(f"--fdl.set={one}" for one in [*without_replaced(config.experiment.overrides, values), *values]),
    ]
    return f"spmd-trainer {shlex.join(flags)}"


def _row(sweep: Sweep, trial: Trial) -> dict[str, Any]:
    """Returns a trial as JSON values for the page's script. If the metric isn't finite, 'value' is None and 'diverged' True."""
    curve = [(step, value) for step, value in sweep.curve(trial.number).items() if math.isfinite(value)]
    every = -(-len(curve) // _MOST_POINTS) or 1
    points = curve[::every] + (curve[-1:] if (len(curve) - 1) % every else [])
    has_diverged = trial.value is not None and not math.isfinite(trial.value)
    return {
        "number": trial.number,
        "status": trial.status,
        "value": None if has_diverged else trial.value,
        "diverged": has_diverged,
        "step": trial.step,
        "seconds": trial.seconds,
        "reason": trial.reason,
        "values": {
            path: value if isinstance(value, int | float) and not isinstance(value, bool) else repr(value)
            for path, value in trial.values.items()
        },
        "curve": points,
    }
