"""The output file of a decode: collected batch by batch, continued after a kill, and visible only once it is complete."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from etils import epath

from spmd_trainer.metrics.packing import WeightedMean
from spmd_trainer.storage.files import write_atomically


class DecodeOutput:
    """The decoded examples of one dataset at one step.

    While a decode runs, each batch is written atomically to its own file in `step_N.parts/`. At the end `step_N.jsonl` is
    assembled from these files, then `step_N.json` records its identity and metrics, and then the parts are deleted. Only one
    process may create and use this object.
    """

    def __init__(self, directory: epath.Path, step: int, identity: str):
        """Reads and writes nothing.

        Args:
          directory: `decode_out/DATASET`.
          step: the training step.
          identity: fingerprint of variables, data and settings; files with another identity are ignored.
        """
        self.path = directory / f"step_{step}.jsonl"
        self._summary = directory / f"step_{step}.json"
        self._parts = directory / f"step_{step}.parts"
        self._identity = identity

    def finished_metrics(self) -> dict[str, float] | None:
        """Returns the metrics of a finished decode with the same identity, or None."""
        summary = _read_json(self._summary)
        if summary is None or summary.get("identity") != self._identity or not self.path.exists():
            return None
        if self._parts.exists():
            self._parts.rmtree()
        return summary["metrics"]

    def batches_done(self) -> int:
        """Returns how many batches, counted from the first, a run with the same identity decoded; deletes parts of any other."""
        done = 0
        while (part := _read_json(self._part(done))) is not None and part["identity"] == self._identity:
            done += 1
        if not done and self._parts.exists():
            self._parts.rmtree()
        return done

    def add(
        self, batch: int, records: list[dict[str, Any]], values: Mapping[str, float], weights: Mapping[str, float]
    ) -> None:
        """Writes the examples and the weighted scalars of batch number `batch`."""
        self._parts.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(record, ensure_ascii=False) for record in records]
        part = {"identity": self._identity, "values": dict(values), "weights": dict(weights), "lines": lines}
        write_atomically(self._part(batch), [json.dumps(part)])

    def finish(self, batches: int) -> tuple[dict[str, float], int]:
        """Assembles `step_N.jsonl` from `batches` batches; returns the metrics over all of them and the number of examples."""
        mean, examples = WeightedMean(), 0

        def lines() -> Iterable[str]:
            nonlocal examples
            for batch in range(batches):
                part = json.loads(self._part(batch).read_text())
                mean.add(part["values"], part["weights"])
                examples += len(part["lines"])
                yield from part["lines"]

        write_atomically(self.path, lines())
        metrics = mean.result()
        summary = {"identity": self._identity, "examples": examples, "metrics": metrics}
        write_atomically(self._summary, [json.dumps(summary)])
        self._parts.rmtree()
        return metrics, examples

    def _part(self, batch: int) -> epath.Path:
        return self._parts / f"{batch:06}.json"


def _read_json(path: epath.Path) -> dict[str, Any] | None:
    """Returns a file's content, or None if it is missing or, after a power cut, not valid JSON."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
