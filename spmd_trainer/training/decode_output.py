"""The output of a decode. Its file is collected batch by batch, continued after a kill, and visible only once it is complete.

`say` shows examples to people: prompt and output as they are, a bar in front of each line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from absl import logging
from etils import epath

from spmd_trainer.metrics.live_status import SHOWN_LIVE, live
from spmd_trainer.metrics.packing import WeightedMean
from spmd_trainer.sharding.messages import count_text
from spmd_trainer.storage.files import write_atomically

# More of a text is not shown; the file has it.
_MOST_LINES = 24
_MOST_CHARACTERS = 2000
# Colours of a terminal.
_STYLES = {"prompt": "", "output": "bold green"}


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


def say(dataset: str, step: int, record: Mapping[str, object], file: epath.Path) -> None:
    """Logs one decoded example, in colours where there is a display.

    Args:
      dataset: its dataset's name.
      step: the training step that it was decoded with.
      record: as `decode_records.records` yields it.
      file: where the whole record is going to be.
    """
    head = f"decoded {dataset} at step {step}, example {record['index']}:"
    parts = {name: shown(str(record[name]), file) for name in _STYLES if name in record}
    if "output" not in parts:
        parts = {"output": shown(json.dumps(record, ensure_ascii=False), file)}
    rows = [(name, first, line) for name, lines in parts.items() for first, line in _labelled(name, lines)]
    if live.display is not None:
        from rich.text import Text  # only terminals need it

        text = Text().append(head, "cyan")
        for name, label, line in rows:
            text.append(f"\n{label}", "dim").append(line, _STYLES[name])
        live.display.print(text)
    logging.info("%s", "\n".join([head, *(label + line for _, label, line in rows)]), extra=SHOWN_LIVE)


def shown(text: str, file: epath.Path) -> list[str]:
    """Returns a text's lines for a terminal. What has no shape is escaped, and a long text ends with a note of its file.

    Args:
      text: any text; may have control characters.
      file: where all of it is going to be.
    """
    lines = text[:_MOST_CHARACTERS].split("\n")[:_MOST_LINES]
    begin = "\n".join(lines)
    left = len(text) - len(begin)
    note = [f"[{count_text(left, 'more character')} in {file}]"] if left else []
    if not begin.strip():
        return [repr(begin), *note]
    return ["".join(map(_printable, line)) for line in lines] + note


def _labelled(name: str, lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yields each line with what stands in front of it: the name in front of the first one."""
    for number, line in enumerate(lines):
        yield f"  {'' if number else name:6} | ", line


def _printable(character: str) -> str:
    return character if character.isprintable() or character == "\t" else repr(character)[1:-1]
