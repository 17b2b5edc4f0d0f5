"""The report of `make chat`: the stages above the page of their runs."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from spmd_trainer.experiments.lm import stdlib_questions
from spmd_trainer.experiments.lm.chat import Sizes
from spmd_trainer.sharding import page
from spmd_trainer.sharding.messages import format_duration
from spmd_trainer.storage.files import write_atomically
from spmd_trainer.training.summary_writers import read_metrics
from spmd_trainer.watch.pages import shared
from spmd_trainer.watch.pages.run_page import PageData

RUNS = ("pretrain", "answers", "prefer")
_WHAT = {
    "trained": "asked in training",
    "new_phrasing": "new phrasing of a question of training",
    "new_names": "names that training never asks about",
}
_NOTE = (
    "Questions: share of answers that are right to the letter. Pairs: share in which the right answer is likelier for each "
    "of its tokens than a wrong one; half would be chance. The model has learnt its answers by heart: what it is never asked "
    "about in training stands in the text of pretraining only."
)


def write(road: pathlib.Path, depth: int, rows: Sequence[Mapping[str, Any]], talk: Sequence[Mapping[str, str]]) -> None:
    """Writes ROAD/report.html.

    Args:
      road: the folder.
      depth: see `lm.chat.Sizes`.
      rows: the finished stages: name, purpose, command and seconds.
      talk: questions with the right answer, what was said, and the set that the question is of.
    """
    seconds = sum(row["seconds"] for row in rows)
    scores = {name: scores_of(road, name) for name in RUNS[1:]}
    bits = _last(road / "pretrain", "bits_per_byte")
    parameters = json.loads((road / "pretrain" / "run.json").read_text())["parameters"]
    of_talk = [[row["question"], row["said"], row["answer"], _WHAT[row["set"]]] for row in talk]
    best = scores["prefer"]
    about = {
        "title": f"Depth {depth}: {parameters:,} parameters",
        "facts": [
            ["Time", format_duration(seconds), "all stages"],
            ["Held-out text", f"{bits:.3f}", "bits per byte, after pretraining"],
            *([_WHAT[name].capitalize(), f"{best[name]:.0%}", "right to the letter"] for name in stdlib_questions.SETS),
        ],
        "stages": [_stage(road, row) for row in rows],
        "scores": {
            "names": ["", *("after " + name for name in scores)],
            "rows": [
                *(
                    [f"questions: {text}", *(f"{found[name]:.1%}" for found in scores.values())]
                    for name, text in _WHAT.items()
                ),
                [
                    "pairs, half of new phrasings, half of new names",
                    *(f"{found['pairs']:.1%}" for found in scores.values()),
                ],
            ],
            "note": _NOTE,
        },
        "talk": of_talk,
        "plan": _plan(Sizes(depth)),
    }
    data = PageData([epath.Path(road / name) for name in RUNS]).read()
    here = pathlib.Path(__file__).parent
    scripts = map(shared, ("page.js", "run_curves.js", "run_parts.js", "run_page.js"))
    text = page.document(
        f"Depth {depth}: from text to answers",
        (here / "chat_report.html").read_text() + shared("run_page.html"),
        styles=map(shared, ("vendor/uPlot.min.css", "page.css", "run_page.css")),
        data={**data, "follow": False, "road": about},
        scripts=[*scripts, (here / "chat_report.js").read_text()],
        libraries=(shared("vendor/uPlot.iife.min.js"),),
    )
    write_atomically(epath.Path(road / "report.html"), text.split("\n"))


def scores_of(road: pathlib.Path, run: str) -> dict[str, float]:
    """Returns the share of right answers of a run in each set, and of pairs ('pairs')."""
    found = {}
    for name in stdlib_questions.SETS:
        right = [json.loads(line)["answer"] for line in (road / "data" / "asked" / f"{name}.jsonl").open()]
        (newest,) = (road / run / "decode_out" / name).glob("step_*.jsonl")
        said = {row["index"]: row["output"] for row in map(json.loads, newest.open())}
        found[name] = sum(said[index].strip() == answer for index, answer in enumerate(right)) / len(right)
    return {**found, "pairs": _last(road / f"choose_{run}", "rewards/accuracies")}


def _last(run: pathlib.Path, name: str) -> float:
    """Returns the last value of a scalar of the held-out text or pairs."""
    records = read_metrics(run, "eval_heldout")
    return float(records[max(records)][name])


def _stage(road: pathlib.Path, row: Mapping[str, Any]) -> list[Any]:
    files = {"pretrain": "train.jsonl", "answers": "chats.jsonl", "prefer": "pairs.jsonl", "tokenizer": "train.jsonl"}
    data = "-"
    if name := files.get(row["name"]):
        path = road / "data" / name
        with path.open("rb") as file:
            data = f"{name}: {sum(1 for _ in file):,} records, {path.stat().st_size / 1e6:.1f} MB"
    has_page = row["name"] in RUNS
    link = {"href": f"{row['name']}/run.html", "text": "run.html"} if has_page else "-"
    return [row["name"], row["purpose"], data, format_duration(row["seconds"]), link, {"text": row["command"]}]


def _plan(sizes: Sizes) -> list[str]:
    return []
