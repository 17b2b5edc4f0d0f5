"""The top of a run's page: the run's status, newest metrics, devices and package versions."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spmd_trainer.sharding.messages import bytes_text, count_text, format_duration
from spmd_trainer.watch.pages.run_charts import Record, curves_of
from spmd_trainer.watch.pages.run_scalars import TRAIN, RunScalars
from spmd_trainer.watch.run_times import StartTimes, goodput

# The page says so if a run has written nothing for more than this many seconds.
_SILENT_SECONDS = 600.0


@dataclasses.dataclass(frozen=True)
class Found:
    """Data read from a run's files: resolved config ({path: value}), the content of `run.json` (`about`), times and scalars."""

    settings: Mapping[str, str]
    about: Mapping[str, Any]
    times: Sequence[StartTimes]
    scalars: RunScalars

    @property
    def step(self) -> int:
        noted = self.times[-1].step if self.times else 0
        file = self.scalars.files.get(TRAIN)
        return max(noted, int(file.series("loss")[0].max(initial=0)) if file else 0)

    @property
    def num_steps(self) -> int | None:
        """The step at which training is complete; None if it is not known."""
        text = self.settings.get("task.train.num_train_steps", "")
        return int(text) if text.isdecimal() else None

    def last(self, folder: str, name: str) -> float | None:
        file = self.scalars.files.get(folder)
        values = file.series(name)[1].tolist() if file else []
        return values[-1] if values else None


def state(found: Found) -> Record:
    """Returns the run's status for the page: 'text', 'note', and 'tone', which is 'good', 'bad' or ''."""
    text, note, tone = _state(found)
    of = f" of {found.num_steps:,}" if found.num_steps is not None else ""
    return {"text": f"{text} step {found.step:,}{of}", "note": note, "tone": tone}


def _state(found: Found) -> tuple[str, str, str]:
    last = found.times[-1] if found.times else None
    if isinstance(failure := found.about.get("failure"), Mapping):
        return "failed at", str(failure.get("reason", ""))[:2000], "bad"
    if last and last.starting and not last.ended:
        return "at", _silence(last) or "a new start has begun: it restores and compiles", ""
    if "last_step" in found.about or (last and last.ended == "finished"):
        return "finished at", "", "good"
    if last and last.ended == "failed":
        return "failed at", "", "bad"
    if last and last.ended == "stopped":
        return "stopped at", "by a signal", ""
    return "at", _silence(last) if last else "", ""


def _silence(last: StartTimes) -> str:
    silent = time.time() - last.time
    return f"nothing was written for {format_duration(silent)}" if silent > _SILENT_SECONDS else ""


def facts(found: Found) -> Iterator[tuple[str, str, str, str]]:
    """Yields (title, value, note, tone) for each number at the top of the page."""
    of = f"of {found.num_steps:,}" if found.num_steps is not None else ""
    yield "Step", f"{found.step:,}", of, _state(found)[2]
    loss = found.last(TRAIN, "loss")
    if loss is not None:
        yield "Training loss", _number(loss), "last summary", "" if math.isfinite(loss) else "bad"
    result = next((c for c in curves_of([found.scalars]) if c.is_main and c.folder.startswith("eval_")), None)
    if result is not None and (value := found.last(result.folder, result.name)) is not None:
        what = f"{result.name} on {result.folder.removeprefix('eval_')}"
        yield "Evaluation", _number(value), what, "" if math.isfinite(value) else "bad"
    yield from _speed(found)
    if found.times:
        good = goodput(found.times)
        yield "Goodput", f"{good.share:.1%}", f"of {format_duration(good.seconds)} in steps that count", ""


def _speed(found: Found) -> Iterator[tuple[str, str, str, str]]:
    for name, unit in (("tokens_per_sec", "tokens/s"), ("examples_per_sec", "examples/s")):
        rate, steps = _finite(found, name), _finite(found, "steps_per_sec")
        if rate is not None:
            each = f", {1e3 / steps:.3g} ms a step" if steps and steps > 1 else ""
            each = each or (f", {1 / steps:.3g} s a step" if steps else "")
            yield "Throughput", f"{rate:,.0f}", f"{unit}{each}", ""
    mfu, of_6n = _finite(found, "mfu"), _finite(found, "mfu_6n")
    if mfu is not None:
        yield "MFU", f"{mfu:.1%}", "of the chips' peak FLOP/s" + ("" if of_6n is None else f"; 6N: {of_6n:.1%}"), ""
    elif of_6n is not None:
        yield "MFU 6N", f"{of_6n:.1%}", "of the chips' peak FLOP/s", ""
    if (peak := _finite(found, "device_peak_bytes")) is not None:
        yield "Device memory", bytes_text(peak), "peak of a device", ""


def _finite(found: Found, name: str) -> float | None:
    """Returns the last value of a training scalar; None if there is no value, or it is not finite."""
    value = found.last(TRAIN, name)
    return value if value is not None and math.isfinite(value) else None


def about(found: Found) -> list[list[str]]:
    """Returns rows [name, text] about the run's devices, mesh, parameters, batch and package versions."""
    rows = []
    devices = found.about.get("devices")
    if isinstance(devices, Mapping):
        several = f", {count_text(int(devices['processes']), 'process', 'processes')}"
        rows.append(["devices", f"{count_text(int(devices['count']), 'device')} ({devices['kind']}){several}"])
    if "mesh" in found.settings:
        rows.append(["mesh", found.settings["mesh"].strip("()")])
    if found.about.get("parameters") is not None:
        rows.append(["parameters", f"{int(found.about['parameters']):,}"])
    if "global batch rows" in found.settings:
        rows.append(["batch", f"{found.settings['global batch rows']} rows"])
    versions = found.about.get("versions")
    if isinstance(versions, Mapping):
        rows.append(["versions", ", ".join(f"{name} {version}" for name, version in versions.items())])
    return rows


def _number(value: float) -> str:
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 else f"{value:.4g}"
