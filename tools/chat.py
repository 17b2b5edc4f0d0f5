"""`make chat`: from the sources of Python's library to a model that answers questions about it, and a report.

    python tools/chat.py [ROAD] [--depth=2] [--quick]

Each stage is a command that is printed, so that it can be run alone; the experiments are those of `lm.chat`. An interrupted
`make chat` goes on where it was: finished stages are in ROAD/stages.jsonl, and a run resumes from its newest checkpoint. A plan
that says that training doesn't fit is finished too.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import pathlib
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import chat_report
from etils import epath

import spmd_trainer as st
from spmd_trainer.experiments.lm import stdlib_questions
from spmd_trainer.experiments.lm.chat import Sizes
from spmd_trainer.planner.topologies import has_gpu_compiler
from spmd_trainer.storage import json_values, run_files
from spmd_trainer.storage.files import write_atomically

TRAINER = "spmd_trainer.main"
# What fits 2 cores and ten minutes: a fifth of the tokens that the rule of `Sizes` asks for, in smaller batches, at greater rates
# than the rule has for so small a model.
SMALL = ("TOKENS_PER_PARAMETER=4", "ROWS=32", "RATE=2")
# The set and the kind of each question of the talk.
TALK = (
    ("trained", stdlib_questions.DOES),
    ("trained", stdlib_questions.TAKES),
    ("new_phrasing", stdlib_questions.WHERE),
    ("new_phrasing", stdlib_questions.DOES),
    ("new_names", stdlib_questions.TAKES),
)
# From this depth on, the rules hold as they are.
DEEP = 12


@dataclasses.dataclass(frozen=True)
class Stage:
    """A command.

    Attributes:
      name: unique.
      purpose: a sentence for the report.
      module, arguments: the command is `python -m module arguments`.
      trained: directory of the run that it trains; None for other commands.
      result: file that makes it finished, whatever its status: a plan that doesn't fit is one too.
    """

    name: str
    purpose: str
    module: str
    arguments: tuple[str, ...]
    trained: pathlib.Path | None = None
    result: pathlib.Path | None = None

    def command(self) -> list[str]:
        return [sys.executable, "-m", self.module, *self.arguments]

    def shown(self) -> str:
        """Returns the command as it can be pasted."""
        return shlex.join(["python", *self.command()[1:]])


def stages(road: pathlib.Path, depth: int, quick: bool) -> Iterator[Stage]:
    """Yields the stages in order.

    Args:
      road: the folder of all of them.
      depth: see `Sizes`.
      quick: few steps of everything, to see that all of it runs.
    """
    sizes, data, questions = Sizes(depth), road / "data", stdlib_questions.__name__
    some = ["--entries=20", "--source_bytes=60000"] if quick else []
    yield Stage("data", "Texts, questions and pairs by rule.", questions, (str(data), *some))
    special = f"--special_tokens={','.join(stdlib_questions.SPECIAL_TOKENS)}"
    words = ("--mode=tokenizer", f"--output={road / 'tokenizer'}", f"--vocab_size={500 if quick else sizes.vocabulary}")
    template = f"--chat_template={data / 'chat_template.jinja'}"
    of_words = (*words, special, template, str(data / "train.jsonl"))
    yield Stage("tokenizer", "Byte-pair encoding of the training text.", TRAINER, of_words)

    def run(name: str, experiment: str, purpose: str, *overrides: str) -> Stage:
        given = (f"DEPTH={depth}", f"ROAD={road}", *overrides, *(["STEPS=10", "ROWS=4"] if quick else []))
        flags = (f"--exp=lm.chat.{experiment}", f"--job_log_dir={road / name}", *(f"--fdl.{one}" for one in given))
        return Stage(name, purpose, TRAINER, flags, road / name)

    def again(name: str, of: str, purpose: str, *flags: str) -> Stage:
        return Stage(name, purpose, TRAINER, (f"--job_log_dir={road / of}", *flags))

    fewer = SMALL if depth < DEEP else ()
    # Small batches need no parts, and --quick has four rows.
    parts = () if depth < DEEP or quick else (f"--num_minibatches={sizes.minibatches}",)

    def pretraining(name: str, purpose: str, *flags: str) -> Stage:
        stage = run(name, "Pretrain", purpose, *fewer)
        return dataclasses.replace(stage, arguments=(*stage.arguments, *parts, *flags))

    yield pretraining("pretrain", "Next tokens of sources and reference.")
    yield run("answers", "Answers", "Questions with their answers.")
    yield again("answers asked", "answers", "Answers to three sets of questions.", "--mode=decode_once")
    yield run("prefer", "Prefer", "Pairs of a right and a wrong answer.")
    yield again("prefer asked", "prefer", "Answers to three sets of questions.", "--mode=decode_once")
    for name in ("answers", "prefer"):
        chosen = run(f"choose_{name}", "Choose", "Right or wrong answer, which is likelier?")
        source = f"--restore_checkpoint_dir={road / name / 'checkpoints'}"
        yield dataclasses.replace(chosen, trained=None, arguments=(*chosen.arguments, "--mode=eval", source))
    if has_gpu_compiler():
        plan = pretraining("plan", "Pretraining, compiled for an H100.", "--mode=inspect", "--topology=h100:1x1")
        yield dataclasses.replace(plan, trained=None, result=road / "plan" / "plan.json")
    if importlib.util.find_spec("lm_eval"):
        tasks = (f"--tasks={stdlib_questions.TASK}", f"--include_path={data / 'lm_eval'}", "--apply_chat_template=True")
        yield again("lm_eval", "prefer", "Four choices, by EleutherAI's lm-eval.", "--mode=lm_eval", *tasks)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the stages that are not finished, asks five questions and writes ROAD/report.html."""
    parser = argparse.ArgumentParser(description="From text to a model that answers.")
    parser.add_argument("road", nargs="?", default="runs/chat", type=pathlib.Path, help="folder for everything")
    parser.add_argument("--depth", type=_depth, default=2, help="the dial: layers, and with them all sizes")
    parser.add_argument("--quick", action="store_true", help="few steps of everything, to see that it runs")
    given = parser.parse_args(arguments)
    road: pathlib.Path = given.road.resolve()
    road.mkdir(parents=True, exist_ok=True)
    log = road / "stages.jsonl"
    finished = _finished(log)
    planned = list(stages(road, given.depth, given.quick))
    for stage in planned:
        shown = stage.shown()
        if stage.name in finished:
            if finished[stage.name]["command"] != shown:
                sys.exit(
                    f"{road} was made with other settings: {finished[stage.name]['command']}\nGive another folder."
                )
            continue
        print(f"\n== {stage.name}: {stage.purpose}\n{shown}\n", flush=True)
        begun = time.time()
        if problem := _problem(stage):
            sys.exit(f"\n{stage.name} {problem}; make chat again goes on from here")
        row = {"name": stage.name, "purpose": stage.purpose, "command": shown, "seconds": time.time() - begun}
        finished[stage.name] = row
        write_atomically(epath.Path(log), map(json.dumps, finished.values()))
    talk = _talk(road, given.depth)
    chat_report.write(road, given.depth, [finished[stage.name] for stage in planned], talk)
    print(f"\n{road / 'report.html'}")


def _depth(text: str) -> int:
    """Returns a depth that `Sizes` takes; argparse names the option in its message."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of layers; give 1 or more, e.g. --depth=2")
    return int(text)


def _finished(log: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Returns the finished stages by name. A line that can't be read is left out: that stage runs again."""
    found = {}
    for line in log.read_text().splitlines() if log.exists() else ():
        with contextlib.suppress(ValueError):
            row = json_values.parse_object(line)
            found[row["name"]] = row
    return found


def _problem(stage: Stage) -> str:
    """Runs a stage and returns why it isn't finished, or ''. After Ctrl-C, which the stage gets too, waits until it has saved."""
    if stage.result:
        stage.result.unlink(missing_ok=True)
    program = subprocess.Popen(stage.command())
    status, is_interrupted = None, False
    while status is None:
        try:
            status = program.wait()
        except KeyboardInterrupt:
            is_interrupted = True
    # A run that is interrupted saves its state and has status 0; in its last evaluation it is finished before that.
    if is_interrupted:
        return "was interrupted"
    if status and not (stage.result and stage.result.exists()):
        return f"ended with status {status}"
    is_finished = stage.trained is None or run_files.read_record(epath.Path(stage.trained)).get("status") == "finished"
    return "" if is_finished else "was interrupted"


def _talk(road: pathlib.Path, depth: int) -> list[dict[str, str]]:
    """Asks five questions, prints and returns them with the answers."""
    asked = [_asked(road, name, kind) for name, kind in TALK]
    overrides = [f"DEPTH={depth}", f"ROAD={road}"]
    said = st.generate("lm.chat.Prefer", road / "prefer", [row["question"] for row in asked], overrides=overrides)
    for row, answer in zip(asked, said, strict=True):
        row["said"] = answer
        print(f"\n> {row['question']}\n{answer}\n  ({row['set']}; right: {row['answer']})")
    return asked


def _asked(road: pathlib.Path, name: str, kind: str) -> dict[str, str]:
    """Returns the question in the middle of those of a set and a kind."""
    rows = map(json.loads, json_values.lines((road / "data" / "asked" / f"{name}.jsonl").read_text()))
    found = [row for row in rows if row["kind"] == kind]
    row = found[len(found) // 2]
    return {"set": name, "question": row["messages"][0]["content"], "answer": row["answer"]}


if __name__ == "__main__":
    main()
