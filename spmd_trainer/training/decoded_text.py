"""Shows decoded examples to people: prompt and output as they are, a bar in front of each line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from absl import logging
from etils import epath

from spmd_trainer.metrics.live_status import SHOWN_LIVE, live
from spmd_trainer.sharding.messages import count_text

# More of a text is not shown; the file has it.
_MOST_LINES = 24
_MOST_CHARACTERS = 2000
# Colours of a terminal.
_STYLES = {"prompt": "", "output": "bold green"}


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
