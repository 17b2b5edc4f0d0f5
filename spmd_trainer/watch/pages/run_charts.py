"""Chooses and orders the curves that the page of runs shows, and computes their points."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from spmd_trainer.watch.expert_load import EXPERTS
from spmd_trainer.watch.pages.run_scalars import TRAIN, Floats, RunScalars, differences, rounded, thin

# A JSON object in a page's data.
Record: TypeAlias = dict[str, Any]

# Numbers of buckets of a main curve and of another curve (see `run_scalars.thin`), to be divided by the number of runs.
_BUCKETS = 900
_BUCKETS_OF_OTHERS = 120
_LEAST_BUCKETS = 60
# Maximum number of curves that are not main curves; further ones are only counted.
MOST_OTHERS = 240
# Scalars of an evaluation that don't describe the model.
_NO_RESULT = re.compile(r"eval_batches|eval_seconds|(.*/)?num_[a-z_]*|.*weight")
_LOSSES = ("loss", "log_pplx", "avg_xent", "total_loss")
_MOST_RESULTS = 6
_MOST_MARKS = 400


@dataclasses.dataclass(frozen=True)
class Curve:
    """A scalar that the page shows.

    Attributes:
      folder: the scalar's directory below `summaries`.
      name: the scalar's name in this directory.
      title: the curve's title on the page.
      unit: how the curve's values are formatted: '', 'share' or 'bytes'.
      is_main: True if the curve is among those that are shown first.
    """

    folder: str
    name: str
    title: str
    unit: str = ""
    is_main: bool = True


# Training curves that are shown first: (pattern of the scalar's name, title, unit). All scalars that match are shown.
_MAIN: Sequence[tuple[str, str, str]] = (
    (r"loss", "Training loss", ""),
    (r"(?:.*/)?lr", "Learning rate", ""),
    (r"(?:.*/)?raw_grad_norm", "Gradient norm", ""),
    (r"tokens_per_sec", "Tokens per second", ""),
    (r"examples_per_sec", "Examples per second", ""),
    (r"mfu", "Model FLOPs utilization (MFU)", "share"),
    (r"mfu_6n", "MFU, counted as 6N", "share"),
    (r"device_peak_bytes", "Device memory, peak", "bytes"),
    (r"device_bytes_in_use", "Device memory in use", "bytes"),
)


def curves_of(runs: Sequence[RunScalars]) -> list[Curve]:
    """Returns the curves of some runs: first the main curves in the order of the page, then all others sorted by name."""
    names: dict[str, list[str]] = {}
    for run in runs:
        for folder, file in run.files.items():
            known = names.setdefault(folder, [])
            known += [name for name in file.names() if name not in known]
    main = [
        *_matching(names.get(TRAIN, []), _MAIN[:1]),
        *_results(names, runs),
        *_matching(names.get(TRAIN, []), _MAIN[1:]),
    ]
    shown = {(curve.folder, curve.name) for curve in main}
    others = [
        Curve(folder, name, f"{folder}: {name}", is_main=False)
        for folder in sorted(names, key=lambda folder: (folder != TRAIN, folder))
        for name in sorted(names[folder])
        if (folder, name) not in shown
    ]
    return main + others


def chart(curve: Curve, runs: Sequence[RunScalars]) -> Record:
    """Returns the data of one curve for the page's script, with the curve's thinned points in each run."""
    buckets = max(_LEAST_BUCKETS, (_BUCKETS if curve.is_main else _BUCKETS_OF_OTHERS) // len(runs))
    series = []
    for number, run in enumerate(runs):
        if curve.folder not in run.files:
            continue
        steps, values = run.files[curve.folder].series(curve.name)
        if steps.size:
            steps, values = thin(steps, values, buckets)
            series.append({"run": number, "steps": differences(steps.astype(int).tolist()), "values": rounded(values)})
    return {
        "key": f"{curve.folder}/{curve.name}",
        "title": curve.title,
        "name": curve.name,
        "unit": curve.unit,
        "main": curve.is_main,
        "series": series,
    }


def invalid_steps(run: RunScalars, restarts: Sequence[int]) -> list[tuple[int, int]]:
    """Returns a pair (step of a summary, number of invalid steps since the previous summary) for each summary that has any.

    A step is invalid if its loss or gradient is NaN or infinite, or if the learner skipped it. If there are very many pairs,
    neighboring pairs are merged and their numbers added.

    Args:
      run: the run's scalars.
      restarts: for each restart of the run, in order, the step of the state with which it began.
    """
    found = _counted(run, "invalid_steps", restarts)
    if TRAIN in run.files:
        steps, losses = run.files[TRAIN].series("loss")
        for step in steps[~np.isfinite(losses)].tolist():
            found.setdefault(int(step), 1)
    return _marks(found)


def loss_spikes(run: RunScalars, restarts: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the numbers of loss spikes in the same form as `invalid_steps`, which has the same arguments."""
    return _marks(_counted(run, "loss_spikes", restarts))


def expert_load(run: RunScalars) -> list[Record]:
    """Returns, for each layer with experts, {'layer': name, 'shares': each expert's share of the load at the last summary}.

    Raises:
      ValueError: a value in the summaries is not a share between 0 and 1.
    """
    notes = run.files[EXPERTS].notes if EXPERTS in run.files else {}
    found: list[Record] = []
    for name, text in notes.items():
        shares = [float(share) for share in text.split()]
        if not all(0 <= share <= 1 for share in shares):
            raise ValueError(f"{name} is {text!r:.200}")
        found.append({"layer": name.removesuffix("/load"), "shares": shares})
    return found


def _counted(run: RunScalars, name: str, restarts: Sequence[int]) -> dict[int, int]:
    """Returns {step: increase} for a scalar that counts from 0 after each restart. `restarts`: as for `invalid_steps`."""
    found: dict[int, int] = {}
    if TRAIN not in run.files:
        return found
    steps, counts = run.files[TRAIN].series(name)
    # A later launch repeats all steps after the state with which it began, so a restart beyond that state no longer counts.
    begins = np.unique(list(itertools.accumulate(reversed(restarts), min)))
    starts = np.searchsorted(begins, steps)
    before, start = 0.0, 0
    for step, count, of_start in zip(steps.tolist(), counts.tolist(), starts.tolist(), strict=True):
        # Each launch of a run counts from 0.
        new = count - before if of_start == start and count >= before else count
        if new > 0:
            found[int(step)] = int(new)
        before, start = count, of_start
    return found


def _marks(found: dict[int, int]) -> list[tuple[int, int]]:
    """Returns the (step, number) pairs by step. If there are very many, merges neighboring pairs and adds their numbers."""
    marks = sorted(found.items())
    width = -(-len(marks) // _MOST_MARKS) or 1
    return [
        (marks[first][0], sum(number for _, number in marks[first : first + width]))
        for first in range(0, len(marks), width)
    ]


def _matching(names: Sequence[str], patterns: Sequence[tuple[str, str, str]]) -> Iterator[Curve]:
    for pattern, title, unit in patterns:
        found = [name for name in names if re.fullmatch(pattern, name)]
        for name in found:
            yield Curve(TRAIN, name, title if len(found) == 1 else f"{title}: {name}", unit)


def _results(names: dict[str, list[str]], runs: Sequence[RunScalars]) -> Iterator[Curve]:
    """Yields the curves of evaluation results. If several scalars have the same values, yields only the first."""
    for folder in sorted(names):
        if not folder.startswith(("eval_", "lm_eval")):
            continue
        dataset = folder.removeprefix("eval_")
        known: list[list[tuple[Floats, Floats]]] = []
        # Losses come first, then the other scalars in their order.
        for name in sorted(names[folder], key=lambda name: name not in _LOSSES):
            values = [run.files[folder].series(name) for run in runs if folder in run.files]
            if _NO_RESULT.fullmatch(name) or not any(found.any() for _, found in values):
                continue
            if len(known) == _MOST_RESULTS or any(_same(values, other) for other in known):
                continue
            known.append(values)
            yield Curve(folder, name, f"{dataset}: {name}")


def _same(one: Sequence[tuple[Floats, Floats]], other: Sequence[tuple[Floats, Floats]]) -> bool:
    return all(
        np.array_equal(a, b, equal_nan=True)
        for left, right in zip(one, other, strict=True)
        for a, b in zip(left, right, strict=True)
    )
