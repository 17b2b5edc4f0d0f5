"""The report of `make chat`: the stages above the page of their runs."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from spmd_trainer.experiments.lm import stdlib_questions
from spmd_trainer.sharding import page
from spmd_trainer.sharding.messages import bytes_text, format_duration
from spmd_trainer.storage import json_values, run_files
from spmd_trainer.storage.files import write_atomically
from spmd_trainer.training.summary_writers import read_metrics
from spmd_trainer.watch.pages import shared
from spmd_trainer.watch.pages.run_page import PageData
from spmd_trainer.watch.pages.run_texts import sample_files

# What nanochat's README counts for a GPU.
DOLLARS_AN_HOUR = 3.0
RUNS = ("pretrain", "answers", "prefer")
_KINDS = tuple(stdlib_questions.PHRASINGS)
_OF_LM_EVAL = f"lm_eval_{stdlib_questions.TASK}"
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
    bits = _last(road, "pretrain", "eval_heldout", "bits_per_byte")
    parameters = json.loads((road / "pretrain" / "run.json").read_text())["parameters"]
    of_talk = [[row["question"], row["said"], row["answer"], _WHAT[row["set"]]] for row in talk]
    best = scores["prefer"]
    about = {
        "title": f"Depth {depth}: {parameters:,} parameters",
        "facts": [
            ["Time", format_duration(seconds), "all stages"],
            ["Held-out text", "-" if bits is None else f"{bits:.3f}", "bits per byte, after pretraining"],
            *(
                [_WHAT[name].capitalize(), f"{best[name][0]:.0%}", "right to the letter"]
                for name in stdlib_questions.SETS
                if name in best
            ),
        ],
        "stages": [_stage(road, row) for row in rows],
        "commands": [row["command"] for row in rows],
        "scores": _score_table(scores),
        "talk": of_talk,
        "plan": _plan(road),
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


def scores_of(road: pathlib.Path, run: str) -> dict[str, tuple[float, str]]:
    """Returns a run's share of right answers in each set, of 'pairs' and of 'choices', each with a note.

    What wasn't measured is left out.
    """
    found, samples = {}, sample_files(epath.Path(road / run))
    for name in stdlib_questions.SETS:
        asked = [json.loads(line) for line in (road / "data" / "asked" / f"{name}.jsonl").open()]
        of_steps = samples.get(f"decode_out/{name}")
        if not (asked and of_steps):
            continue
        lines = json_values.lines(of_steps[max(of_steps)].read_text())
        said = {row["index"]: row["output"] for row in map(json.loads, lines)}
        right = [said[index].strip() == row["answer"] for index, row in enumerate(asked)]
        of_kind = {kind: [one for one, row in zip(right, asked, strict=True) if row["kind"] == kind] for kind in _KINDS}
        note = ", ".join(f"{kind} {sum(some)}/{len(some)}" for kind, some in of_kind.items())
        found[name] = (sum(right) / len(right), note)
    pairs = _last(road, run, "eval_heldout", "rewards/accuracies", measured_in=f"choose_{run}")
    for name, share in (("pairs", pairs), ("choices", _last(road, run, _OF_LM_EVAL, "acc"))):
        if share is not None:
            found[name] = (share, "")
    return found


def _last(road: pathlib.Path, run: str, folder: str, name: str, measured_in: str | None = None) -> float | None:
    """Returns a scalar of a run's last step, which another directory may have; None if it wasn't measured at that step."""
    last_step = run_files.read_record(epath.Path(road / run)).get("last_step")
    value = read_metrics(road / (measured_in or run), folder).get(last_step, {}).get(name)
    return None if value is None else float(value)


def _score_table(scores: Mapping[str, Mapping[str, tuple[float, str]]]) -> dict[str, Any]:
    names = {
        **{name: f"questions: {text}" for name, text in _WHAT.items()},
        "pairs": "pairs, half of new phrasings, half of new names",
        "choices": "one of four, of new phrasings, by lm-eval",
    }

    def shown(share: float, note: str) -> str:
        return f"{share:.1%} ({note})" if note else f"{share:.1%}"

    rows = [
        [text, *(shown(*found[name]) if name in found else "-" for found in scores.values())]
        for name, text in names.items()
        if any(name in found for found in scores.values())
    ]
    return {"names": ["", *("after " + run for run in scores)], "rows": rows, "note": _NOTE}


def _stage(road: pathlib.Path, row: Mapping[str, Any]) -> list[Any]:
    files = {"pretrain": "train.jsonl", "answers": "chats.jsonl", "prefer": "pairs.jsonl", "tokenizer": "train.jsonl"}
    data = "-"
    if name := files.get(row["name"]):
        path = road / "data" / name
        with path.open("rb") as file:
            data = f"{name}: {sum(1 for _ in file):,} records, {bytes_text(path.stat().st_size)}"
    page_of_run = {"href": f"{row['name']}/run.html", "text": "run.html"} if row["name"] in RUNS else "-"
    return [row["name"], row["purpose"], data, page_of_run, format_duration(row["seconds"])]


def _plan(road: pathlib.Path) -> list[str]:
    """Returns sentences about pretraining on one H100: what the compiled program says, if the compiler was there."""
    plan = road / "plan" / "plan.json"
    if not plan.exists():
        return [
            "The compiler for NVIDIA's GPUs was not there. It needs no GPU: after make .gpu-compiler/.synced, "
            "PYTHONPATH=.gpu-compiler make chat adds the plan."
        ]
    found, settings = json.loads(plan.read_text()), (road / "pretrain" / "config.txt").read_text()
    if found["fits"] is False:
        needs, has = bytes_text(found["total"]), bytes_text(found["memory"])
        return [
            f"Pretraining as here doesn't fit one H100: it needs {needs}, of {has}. More --num_minibatches need less."
        ]
    steps = int(re.search(r"^task.train.num_train_steps: (\d+)$", settings, re.MULTILINE)[1])
    shortest, longest = (found["estimate"][name] for name in ("shortest", "longest"))
    seconds = [format_duration(steps * one) for one in (shortest, longest)]
    tokens = found["model_flops"] / 6 / found["num_params"]
    dollars = steps * longest / 3600 * DOLLARS_AN_HOUR
    cost = "less than a cent" if dollars < 0.01 else f"at most {dollars:.2f} dollars"
    return [
        f"Pretraining as here, {steps:,} steps of {tokens:,.0f} tokens: {seconds[0]} to {seconds[1]}, {tokens / longest:,.0f} to "
        f"{tokens / shortest:,.0f} tokens/s, {cost} at {DOLLARS_AN_HOUR:g} dollars an hour. Starting and compiling take longer.",
        "Estimated from the step that was compiled for an H100; nothing ran on one.",
    ]
