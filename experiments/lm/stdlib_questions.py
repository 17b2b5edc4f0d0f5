"""Makes the training data of `lm.chat` by rules: text, questions and preferences about Python's standard library.

    python -m spmd_trainer.experiments.lm.stdlib_questions runs/chat/data

writes these files of JSON lines:

| file | records |
|---|---|
| `train.jsonl`, `heldout.jsonl` | {"text"}: the sources, in the parts of `stdlib_text`; the former also has the reference |
| `chats.jsonl` | {"messages"}: questions and answers |
| `pairs.jsonl`, `pairs_heldout.jsonl` | {"prompt", "chosen", "rejected"}: the right answer, and that of a similar question |
| `asked/SET.jsonl` | {"messages", "answer", "kind"}: questions to score; SET is one of `SETS` |

It also writes `chat_template.jinja`, the chat template, and `lm_eval/stdlib_questions.yaml`, a task of four choices for
EleutherAI's lm-eval, with the task's records.

The reference has an entry for each public function and class of `MODULES`, as `help` shows it: name, parameters, and the first
sentence of the docstring. Each entry gives up to three questions: in which module it is, what it does, and what it takes. One
name in `HELDOUT_ONE_IN` is never asked about in training, and the last phrasing of each question is never used in training. The
files depend on the version of the installed Python.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib
import inspect
import json
import os
import pathlib
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from spmd_trainer.inputs import stdlib_text

MODULES = (
    *(
        "argparse",
        "base64",
        "bisect",
        "calendar",
        "collections",
        "contextlib",
        "copy",
        "csv",
        "dataclasses",
        "datetime",
    ),
    *(
        "difflib",
        "fnmatch",
        "fractions",
        "functools",
        "getpass",
        "glob",
        "gzip",
        "heapq",
        "inspect",
        "itertools",
        "json",
    ),
    *(
        "keyword",
        "linecache",
        "locale",
        "math",
        "mimetypes",
        "operator",
        "os",
        "os.path",
        "pathlib",
        "pickle",
        "platform",
    ),
    *("pprint", "queue", "random", "re", "secrets", "shlex", "shutil", "signal", "socket", "statistics", "string"),
    *("struct", "subprocess", "tempfile", "textwrap", "threading", "time", "tokenize", "traceback", "types", "typing"),
    *("unicodedata", "urllib.parse", "uuid", "warnings", "weakref", "zipfile", "zlib"),
)
HELDOUT_ONE_IN = 10
WHERE, DOES, TAKES = "where", "does", "takes"
# The last phrasing of each is only for evaluation.
PHRASINGS: Mapping[str, Sequence[str]] = {
    WHERE: (
        "In which module is {name}?",
        "Where do I find {name}?",
        "Which module has {name}?",
        "From where do I import {name}?",
        "Where is {name}?",
        "Which module is {name} in?",
    ),
    DOES: (
        "What does {path} do?",
        "What is {path} for?",
        "Explain {path}.",
        "Tell me about {path}.",
        "Describe {path}.",
        "What is the purpose of {path}?",
    ),
    TAKES: (
        "What arguments does {path} take?",
        "Which parameters does {path} have?",
        "How do I call {path}?",
        "List the arguments of {path}.",
        "What do I pass to {path}?",
        "What are the parameters of {path}?",
    ),
}
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<|assistant|>{% generation %}{{ message.content }}"
    "<|endoftext|>{% endgeneration %}{% else %}<|{{ message.role }}|>{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ("<|user|>", "<|assistant|>", "<|system|>")
SETS = ("trained", "new_phrasing", "new_names")
TASK = "stdlib_questions"
_PER_SET = 96
# Wrong answers of a question.
_WRONG = 3
_MOST_SENTENCE = 90
_MOST_PARAMETERS = 6
_T = TypeVar("_T")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`])")


@dataclasses.dataclass(frozen=True)
class Entry:
    """A public function or class.

    Attributes:
      module, name: names of the module and of the function or class; the entry's path is 'module.name'.
      sentence: the first sentence of the docstring; '' if there is none, or it is too long.
      parameters: names of the parameters, with '*' or '**'; None if they are unknown or too many.
      is_only_one: False if another module has a different object of the same name.
    """

    module: str
    name: str
    sentence: str
    parameters: tuple[str, ...] | None
    is_only_one: bool = True

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def is_heldout(self) -> bool:
        """True if the entry is held out: training has no question about it."""
        return zlib.crc32(self.path.encode()) % HELDOUT_ONE_IN == 0

    def answers(self) -> dict[str, str]:
        """Returns {kind of question: answer} for the questions that can be asked about the entry."""
        found = {WHERE: f"It is in {self.module}."} if self.is_only_one else {}
        if self.sentence:
            found[DOES] = self.sentence
        if self.parameters is not None:
            found[TAKES] = f"It takes {', '.join(self.parameters)}." if self.parameters else "It takes nothing."
        return found

    def question(self, kind: str, phrasing: int) -> str:
        """Returns a question. `phrasing`: index in `PHRASINGS[kind]`."""
        return PHRASINGS[kind][phrasing].format(name=self.name, path=self.path)

    def reference(self) -> str:
        """Returns the entry's text in the reference."""
        parameters = "..." if self.parameters is None else ", ".join(self.parameters)
        return f"{self.path}({parameters})\n{self.sentence}".rstrip()


def entries(modules: Iterable[str] = MODULES) -> list[Entry]:
    """Returns the functions and classes of some modules, sorted by path.

    Modules whose file is held out are left out. A function that several modules export has one entry, in the module that
    defines it.
    """
    heldout = set(stdlib_text.stdlib_heldout_files())
    found: dict[int, Entry] = {}
    for name in modules:
        module = importlib.import_module(name)
        if getattr(module, "__file__", None) in heldout:
            continue
        for one in _public(module):
            value = getattr(module, one)
            if id(value) not in found or getattr(value, "__module__", None) == name:
                found[id(value)] = Entry(name, one, _first_sentence(value), _parameters(value))
    names = collections.Counter(entry.name for entry in found.values())
    known = (dataclasses.replace(entry, is_only_one=names[entry.name] == 1) for entry in found.values())
    return sorted(known, key=lambda entry: entry.path)


def write(
    directory: str | os.PathLike[str], *, num_entries: int | None = None, source_bytes: int | None = None
) -> None:
    """Writes all files; see the module's docstring.

    Args:
      directory: the folder to write, created if it is missing.
      num_entries: use about this many entries, chosen by `_some`; None for all.
      source_bytes: cut each part of the sources (train, heldout) to this many characters; None for all.
    """
    folder = pathlib.Path(directory)
    known = entries()
    known = _some(known, num_entries) if num_entries else known
    reference = ["\n\n".join(e.reference() for e in known if e.module == module) for module in MODULES]
    _write(folder / "train.jsonl", _texts(stdlib_text.stdlib_train_files(), source_bytes, filter(None, reference)))
    _write(folder / "heldout.jsonl", _texts(stdlib_text.stdlib_heldout_files(), source_bytes))
    asked = questions(known)
    _write(folder / "chats.jsonl", ({"messages": _chat(one.question, one.answer)} for one in asked["chats"]))
    for name in SETS:
        rows = _spread(asked[name], _PER_SET)
        records = ({"messages": _chat(one.question), "answer": one.answer, "kind": one.kind} for one in rows)
        _write(folder / "asked" / f"{name}.jsonl", records)
    _write(folder / "pairs.jsonl", map(_pair, asked["pairs"]))
    heldout = [*_spread(asked["new_phrasing"], _PER_SET), *_spread(asked["new_names"], _PER_SET)]
    _write(folder / "pairs_heldout.jsonl", map(_pair, heldout))
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    with_choices = [one for one in asked["new_phrasing"] if len(one.wrong) == _WRONG]
    _write_task(folder / "lm_eval", _spread(with_choices, _PER_SET))


class Asked(NamedTuple):
    """A question of one kind, its answer, and one to three wrong answers of the same kind."""

    kind: str
    question: str
    answer: str
    wrong: tuple[str, ...]


def questions(known: Sequence[Entry]) -> dict[str, list[Asked]]:
    """Returns the questions about `known` entries by set: 'chats' (all for training), 'pairs' (one phrasing each), and `SETS`."""
    answers = {kind: list(dict.fromkeys(e.answers()[kind] for e in known if kind in e.answers())) for kind in PHRASINGS}
    found: dict[str, list[Asked]] = {name: [] for name in ("chats", "pairs", *SETS)}
    for entry in known:
        for kind, answer in entry.answers().items():
            wrong = _wrong(answer, answers[kind], f"{entry.path} {kind}")
            made = [Asked(kind, entry.question(kind, n), answer, wrong) for n in range(len(PHRASINGS[kind]))]
            if entry.is_heldout:
                found["new_names"].append(made[0])
                continue
            found["chats"] += made[:-1]
            found["pairs"].append(made[zlib.crc32(entry.path.encode()) % (len(made) - 1)])
            found["trained"].append(made[0])
            found["new_phrasing"].append(made[-1])
    return found


def _some(known: Sequence[Entry], number: int) -> list[Entry]:
    """Returns about `number` entries with all kinds of questions, held-out ones in proportion, so that no set lacks a kind."""
    complete = [entry for entry in known if len(entry.answers()) == len(PHRASINGS)]
    of_each = [[entry for entry in complete if entry.is_heldout == is_heldout] for is_heldout in (False, True)]
    some = [entry for part in of_each for entry in _spread(part, max(1, round(number * len(part) / len(complete))))]
    return sorted(some, key=lambda entry: entry.path)


def _wrong(answer: str, among: Sequence[str], key: str) -> tuple[str, ...]:
    """Returns up to three answers other than `answer`, chosen by a checksum of `key`."""
    start = zlib.crc32(key.encode())
    others = [one for one in among if one != answer] or ["I do not know."]
    return tuple(others[(start + 7919 * number) % len(others)] for number in range(min(_WRONG, len(others))))


def _public(module: object) -> list[str]:
    names = getattr(module, "__all__", None) or [name for name in dir(module) if not name.startswith("_")]
    here = getattr(module, "__name__", "")
    return sorted(
        name
        for name in names
        if name.isascii()
        and len(name) > 2
        and (inspect.isroutine(value := getattr(module, name)) or inspect.isclass(value))
        and (hasattr(module, "__all__") or getattr(value, "__module__", None) in (here, f"_{here}"))
    )


def _first_sentence(value: object) -> str:
    paragraph = (inspect.getdoc(value) or "").split("\n\n")[0]
    text = _SENTENCE_END.split(" ".join(paragraph.split()))[0]
    # C functions and dataclasses begin with a call of themselves, which is no sentence.
    is_sentence = text.isascii() and text.endswith(".") and "(" not in text.split(" ")[0] and " " in text
    return text if is_sentence and len(text) <= _MOST_SENTENCE else ""


def _parameters(value: object) -> tuple[str, ...] | None:
    if not callable(value) or inspect.isclass(value):
        return None
    try:
        found = inspect.signature(value).parameters.values()
    except (ValueError, TypeError):  # functions in C without a signature
        return None
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    names = tuple(f"{stars.get(one.kind, '')}{one.name}" for one in found if not one.name.startswith("_"))
    return names if len(names) <= _MOST_PARAMETERS else None


def _texts(paths: Iterable[str], most: int | None, more: Iterable[str] = ()) -> Iterator[dict[str, str]]:
    for text in more:
        yield {"text": text}
    size = 0
    for path in paths:
        text = pathlib.Path(path).read_bytes().decode(errors="replace")
        yield {"text": text if most is None else text[: most - size]}
        size += len(text)
        if most is not None and size >= most:
            return


def _chat(question: str, answer: str | None = None) -> list[dict[str, str]]:
    said = [] if answer is None else [{"role": "assistant", "content": answer}]
    return [{"role": "user", "content": question}, *said]


def _pair(asked: Asked) -> dict[str, list[dict[str, str]]]:
    texts = {"chosen": asked.answer, "rejected": asked.wrong[0]}
    sides = {name: [{"role": "assistant", "content": text}] for name, text in texts.items()}
    return {"prompt": _chat(asked.question), **sides}


def _spread(rows: Sequence[_T], most: int) -> list[_T]:
    """Returns at most `most` rows, evenly spaced over the list."""
    return [rows[number * len(rows) // most] for number in range(most)] if len(rows) > most else list(rows)


def _write(path: pathlib.Path, rows: Iterable[Mapping[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _write_task(folder: pathlib.Path, rows: Sequence[Asked]) -> None:
    """Writes a task of lm-eval. The position of the right answer among the choices depends on the question."""
    records = []
    for _, question, right, wrong in rows:
        place = zlib.crc32(question.encode()) % (len(wrong) + 1)
        choices = [*wrong[:place], right, *wrong[place:]]
        records.append({"question": question, "choices": choices, "answer": place})
    _write(folder / f"{TASK}_choices.jsonl", records)
    lines = [
        f"task: {TASK}",
        "dataset_path: json",
        "dataset_kwargs:",
        "  data_files:",
        f"    test: {(folder / f'{TASK}_choices.jsonl').resolve()}",
        "test_split: test",
        "output_type: multiple_choice",
        'doc_to_text: "{{question}}"',
        'doc_to_choice: "{{choices}}"',
        'doc_to_target: "{{answer}}"',
        'target_delimiter: ""',
        "metric_list:",
        "  - {metric: acc, aggregation: mean, higher_is_better: true}",
    ]
    (folder / f"{TASK}.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Writes the files to the folder that the command names."""
    parser = argparse.ArgumentParser(description="Texts, questions and preferences about Python's library, by rule.")
    parser.add_argument("directory", help="folder to write")
    parser.add_argument("--entries", type=int, help="about how many functions and classes; default: all")
    parser.add_argument("--source_bytes", type=int, help="about how many bytes of sources; default: all")
    given = parser.parse_args()
    write(given.directory, num_entries=given.entries, source_bytes=given.source_bytes)


if __name__ == "__main__":
    main()
