"""Reads the files of one run for its page. If they are read repeatedly, only what has changed is read again."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from etils import epath

from spmd_trainer.models import config_lines
from spmd_trainer.storage import is_remote, json_values, reading, run_files
from spmd_trainer.watch.expert_load import EXPERTS
from spmd_trainer.watch.pages import run_charts, run_facts, run_texts
from spmd_trainer.watch.pages.run_charts import Record
from spmd_trainer.watch.pages.run_scalars import TRAIN, RunScalars, entries
from spmd_trainer.watch.run_times import TIMES_FILE, goodput, read_run_times

_T = TypeVar("_T")
# Exceptions from reading a file that is cut short, or that the trainer didn't write.
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError)
_MOST_VARIABLES = 400
_MOST_CHANGES = 200
_MOST_DEVICES = 512


class RunReader:
    """Reads the data that a page shows about one run. Later calls of `read` skip local files that haven't changed.

    Attributes:
      settings: {path: value} of the run's `config.txt`.
      notes: messages about files that the last `read` could not read.
    """

    def __init__(self, path: epath.Path):
        self.path = path
        self.scalars = RunScalars(path)
        self.settings: Mapping[str, str] = {}
        self.notes: list[str] = []
        self._kept: dict[str, tuple[object, Any]] = {}

    def is_run(self) -> bool:
        """Returns True if the directory contains files of a run."""
        return run_files.has_run(self.path) or any(
            (self.path / name).exists() for name in (run_files.CONFIG_FILE, "summaries")
        )

    def read(self, name: str) -> Record:
        """Returns the run's data for the page's script, without its curves. `name`: the run's name on the page."""
        self.notes = list(self.scalars.update())
        self.settings = self._read(run_files.CONFIG_FILE, _settings) or {}
        about: Mapping[str, Any] = self._noted(run_files.RUN, lambda: run_files.read_record(self.path)) or {}
        times = self._noted(TIMES_FILE, lambda: read_run_times(self.path)) or []
        found = run_facts.Found(self.settings, about, times, self.scalars)
        train = self.scalars.files.get(TRAIN)
        back = train.back if train else []
        restarts = [record.first_step for record in times if record.steps][1:]
        begins = restarts or [step - 1 for step in back]
        return {
            "name": name,
            "path": str(self.path),
            "experiment": str(about.get("experiment") or "unknown experiment"),
            "state": run_facts.state(found),
            "facts": list(run_facts.facts(found)),
            "about": self._noted(run_files.RUN, lambda: run_facts.about(found)) or [],
            "overrides": [str(one) for one in texts] if isinstance(texts := about.get("overrides"), list) else [],
            "restarts": sorted(set(restarts or back)),
            "invalid": run_charts.invalid_steps(self.scalars, begins),
            "spikes": run_charts.loss_spikes(self.scalars, begins),
            "experts": self._noted(f"summaries/{EXPERTS}", lambda: run_charts.expert_load(self.scalars)) or [],
            "times": [dataclasses.asdict(record) for record in times],
            "goodput": {**dataclasses.asdict(goodput(times)), "share": goodput(times).share} if times else None,
            "report": self._read(run_files.SHARDING_REPORT, _report),
            "changes": self._changes(),
            "warnings": self._warnings(),
            "samples": self._samples(),
            "notes": self.notes,
        }

    def _changes(self) -> Record:
        """Returns the settings that each restart of the run has changed, newest restart first."""
        rows: list[Record] = []
        with self._noting(run_files.CONFIG_FILE):
            earlier = sorted(path.name for path in self.path.iterdir() if run_files.EARLIER_CONFIG.fullmatch(path.name))
            known = [self._read(name, _settings) or {} for name in [*earlier, run_files.CONFIG_FILE]]
            for number in range(len(earlier), 0, -1):
                for change in config_lines.compare(known[number - 1], known[number]):
                    before, now = change.shortened()
                    rows.append({"start": number, "path": change.path, "before": before, "now": now})
        return {"rows": rows[:_MOST_CHANGES], "left_out": max(0, len(rows) - _MOST_CHANGES)}

    def _warnings(self) -> Record:
        kinds: dict[tuple[str, ...], Record] = {}
        for path in self._entries(run_files.LOGS, ".log"):
            with self._noting(f"{run_files.LOGS}/{path.name}"):
                found, is_cut = self._of_file(path, run_texts.read_warnings)
                run_texts.add(found, kinds)
                if is_cut:
                    self.notes.append(f"{run_files.LOGS}/{path.name} is long; only its end was read for warnings")
        ordered = sorted(kinds.values(), key=lambda kind: kind["last"], reverse=True)
        return {"rows": ordered[: run_texts.MOST_KINDS], "left_out": max(0, len(ordered) - run_texts.MOST_KINDS)}

    def _samples(self) -> Record:
        groups: Record = {}
        with self._noting("decode_out"):
            for group, steps in run_texts.sample_files(self.path).items():
                shown = []
                for step in run_texts.chosen_steps(list(steps)):
                    path = steps[step]
                    with self._noting(f"{group}/{path.name}"):
                        examples = self._of_file(path, run_texts.read_examples)
                        shown.append({"step": step, "examples": examples})
                groups[group] = {"steps": shown, "left_out": len(steps) - len(shown)}
        return groups

    def _entries(self, folder: str, ending: str) -> list[epath.Path]:
        """Returns the files in a folder with this suffix. A growing file that an object store keeps as parts is listed once."""
        names = [path.name for path in entries(self.path / folder)]
        whole = {name.partition(f"{ending}.part-")[0] + ending if ".part-" in name else name for name in names}
        return [self.path / folder / name for name in sorted(whole) if name.endswith(ending)]

    def _read(self, name: str, parse: Callable[[str], _T]) -> _T | None:
        """Returns the result of `parse` for a file's text. Returns None if the file is missing or can't be read; see `_noted`."""
        path = self.path / name
        return self._noted(name, lambda: self._of_file(path, lambda path: parse(reading.read(str(path)).decode())))

    def _of_file(self, path: epath.Path, read: Callable[[epath.Path], _T]) -> _T:
        """Returns `read(path)`. If a local file hasn't changed since the previous call, returns the previous result."""
        if is_remote(path):
            return read(path)
        stat = path.stat()
        version = (stat.length, stat.mtime)
        kept = self._kept.get(str(path))
        if kept is None or kept[0] != version:
            kept = self._kept[str(path)] = (version, read(path))
        found: _T = kept[1]
        return found

    def _noted(self, name: str, read: Callable[[], _T]) -> _T | None:
        """Returns `read()`. Returns None if the file is missing; if it can't be read, also adds a message to `notes`."""
        with self._noting(name), contextlib.suppress(FileNotFoundError):
            return read()
        return None

    @contextlib.contextmanager
    def _noting(self, name: str) -> Iterator[None]:
        try:
            yield
        except _UNREADABLE as error:
            self.notes.append(f"{name} can't be read: {type(error).__name__}: {error}"[:400])


def _settings(text: str) -> Mapping[str, str]:
    return config_lines.settings(text.splitlines())


def _report(text: str) -> Record:
    """Returns the part of a sharding report that the page shows: the mesh, the totals and the largest variables."""
    report = json_values.parse_object(text)
    variables = sorted(report["variables"], key=lambda v: -int(v["bytes_per_device"]))
    ids = report["mesh"]["device_ids"]
    return {
        "axes": [[str(axis["name"]), int(axis["size"])] for axis in report["mesh"]["axes"]],
        "device_ids": ids and [int(number) for number in ids[:_MOST_DEVICES]],
        "totals": {name: int(value) for name, value in report["totals"].items()},
        "by_kind": {
            str(kind): [int(totals["num_variables"]), int(totals["logical_bytes"]), int(totals["bytes_per_device"])]
            for kind, totals in report["totals_by_kind"].items()
        },
        "variables": [
            {
                "path": str(v["path"]),
                "kind": str(v["kind"]),
                "dtype": str(v["dtype"]),
                "shape": [int(n) for n in v["logical_shape"]],
                "padded": [int(n) for n in v["padded_shape"]],
                "spec": str(v["spec_text"]),
                "bytes": int(v["bytes_per_device"]),
                "reason": str(v["reason"]),
            }
            for v in variables[:_MOST_VARIABLES]
        ],
        "left_out": max(0, len(variables) - _MOST_VARIABLES),
    }
