"""Finds which process of a run is slow, and in which part of a step.

A process's own time for a step is the sum of its input, dispatch and device times. The device time is an estimate, because
devices wait for each other: the shortest device time of any process, multiplied by this process's time for a small program (see
`device_watch.py`), and divided by the median process's time for this program. Processes are compared over windows of 20 steps.
A process is slow if three conditions hold:

- 15 of its 20 own times are longer than 1.2 times the median of all processes' median own times.
- 17 of its 20 own times are longer than 17 of the 20 own times of the median process. Noise alone doesn't cause this.
- Its median own time exceeds the median of all processes by over 1 ms. A single line of Python can cause a smaller excess.

If there are only two processes, each is compared with the other one instead of the median. Then the slower process counts as
slow, although the other process may be unusually fast.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from spmd_trainer.watch.step_parts import WINDOW

# A process is slow above SLOW times the median, and fast again below FAST times the median.
SLOW, FAST = 1.2, 1.1
_LEAST_SECONDS = 0.001
PARTS = ("input", "dispatch", "device")
_LOW, _QUARTER, _MEDIAN, _HIGH = range(4)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Comparison of one process with the others over one window.

    Attributes:
      part: the part with the largest excess over the other processes, one of `PARTS`.
      seconds: the process's median time for that part.
      others: the median of the other processes' median times for that part, in seconds.
      ratio: the process's median own time divided by the median of all processes' median own times.
      is_slow: True if the process is slow; see the module.
      steps: the first and the last step of the window.
      processes: number of processes that were compared.
      is_hidden: True if the host does this part while the devices are busy with the previous step, so that no step waits for it.
    """

    process: int
    host: str
    part: str
    seconds: float
    others: float
    ratio: float
    is_slow: bool
    steps: tuple[int, int]
    processes: int
    is_hidden: bool

    @property
    def text(self) -> str:
        than = f"median of {self.processes} processes" if self.processes > 2 else "the other process"
        estimated = ", estimated by a small program" if self.part == "device" else ""
        hidden = "; the devices have work meanwhile, so no step waits for it yet" if self.is_hidden else ""
        return (
            f"process {self.process} (host {self.host}) is slow: {self.part} takes {_ms(self.seconds)} of a step, others "
            f"{_ms(self.others)} ({than}{estimated}), over steps {self.steps[0]} to {self.steps[1]}{hidden}"
        )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 0.1 else f"{1000 * seconds:.0f} ms"


def judge(told: Mapping[int, Mapping[str, Any] | None], newer_than: int = 0) -> list[Verdict]:
    """Compares all processes over the newest window of steps that all of them have measured.

    Args:
      told: {process: result of its `StepParts.window`}.
      newer_than: the window must end after this step.

    Returns:
      A verdict for each process; empty if there is only one process, or no common window that is new enough.
    """
    by_step = {p: {one["step"]: one for one in window["windows"]} for p, window in told.items() if window}
    if len(by_step) < len(told) or len(told) < 2:
        return []
    common = set.intersection(*(set(windows) for windows in by_step.values()))
    end = max(common, default=0)
    if end <= newer_than:
        return []
    whole = {p: window for p, window in told.items() if window is not None}
    device = min((window["device"][_MEDIAN] for window in whole.values() if window["device"]), default=0.0)
    devices = _device_times(device, {p: window["probe"] for p, window in whole.items()})
    times = {p: {**windows[end], "device": devices[p]} for p, windows in by_step.items()}
    return [_verdict(p, whole[p], times, end) for p in sorted(times)]


def _device_times(device: float, probes: Mapping[int, Sequence[float] | None]) -> dict[int, list[float]]:
    """Returns {process: device seconds per step, as in `spread`}: all four are `device`, or larger if its probe is slow."""
    found = {p: [device] * 4 for p in probes}
    known = {p: probe for p, probe in probes.items() if probe is not None}
    if len(known) < len(probes):
        return found
    for p, probe in known.items():
        if probe[_LOW] > _typical(known, p, _HIGH):
            usual = max(_typical(known, p, _MEDIAN), 1e-9)
            found[p] = [device * max(1.0, value / usual) for value in probe]
    return found


def _typical(spreads: Mapping[int, Sequence[float]], process: int, which: int) -> float:
    """Returns the median over all processes of `spreads[...][which]`. With only two processes, returns the other one's value."""
    values = {p: spread[which] for p, spread in spreads.items()}
    if len(values) == 2:
        del values[process]
    return statistics.median(values.values())


def _verdict(process: int, told: Mapping[str, Any], times: Mapping[int, Mapping[str, Any]], end: int) -> Verdict:
    total = {
        p: [own + device for own, device in zip(one["own"], one["device"], strict=True)] for p, one in times.items()
    }
    usual = _typical(total, process, _MEDIAN)
    mine = total[process]
    is_slow = (
        mine[_QUARTER] > SLOW * usual
        and mine[_LOW] > _typical(total, process, _HIGH)
        and mine[_MEDIAN] > usual + _LEAST_SECONDS
    )
    others = {part: statistics.median(one[part][_MEDIAN] for p, one in times.items() if p != process) for part in PARTS}
    part = max(PARTS, key=lambda name: times[process][name][_MEDIAN] - others[name])
    return Verdict(
        process=process,
        host=told["host"],
        part=part,
        seconds=times[process][part][_MEDIAN],
        others=others[part],
        ratio=mine[_MEDIAN] / max(usual, 1e-9),
        is_slow=is_slow,
        steps=(end - WINDOW + 1, end),
        processes=len(times),
        is_hidden=part != "device" and told["dry"] is not None and told["dry"] < 0.5,
    )


class SlowProcesses:
    """Reports that a process has become slow, that a different part of its steps is slow, or that it is no longer slow."""

    def __init__(self) -> None:
        self._judged = 0
        # {process: (the slow part that was reported, the last step of the last window in which this part was slow)}
        self._named: dict[int, tuple[str, int]] = {}

    def update(self, told: Mapping[int, Mapping[str, Any] | None]) -> list[str]:
        """Returns lines for the log about the newest window of steps that all processes have measured; [] if it isn't new."""
        lines = []
        for verdict in judge(told, self._judged):
            self._judged = verdict.steps[1]
            part, since = self._named.get(verdict.process, ("", 0))
            # Windows overlap: a change is reported only for a window without steps of the window before the change.
            is_new = not part or verdict.steps[0] > since
            if verdict.is_slow and (not part or (verdict.part != part and is_new)):
                lines.append(verdict.text)
            if verdict.is_slow and (is_new or verdict.part == part):
                self._named[verdict.process] = (verdict.part, verdict.steps[1])
            elif part and is_new and verdict.ratio < FAST:
                name, (first, last) = f"process {verdict.process} (host {verdict.host})", verdict.steps
                lines.append(f"{name} is as fast as the others again, over steps {first} to {last}")
                del self._named[verdict.process]
        return lines
