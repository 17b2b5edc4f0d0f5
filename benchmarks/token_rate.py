"""Tokens per second: of tokenising into a store, and of the inputs for text, stored tokens, conversations and pairs.

    python -m benchmarks.token_rate [--rounds 3] [--megabytes 6] [--json FILE]

First the corpus of `corpus_rate`, 12 times over, is tokenised into a store by one worker process and by one for each core, and
encoded by the library's own threads on all cores in calls of 4,096 documents; the workers' start, which takes a second, counts.

Then each input reads one epoch of the same documents, from opening the files to the last batch: as JSON lines, as stored
tokens, as conversations of a question and a document, and as pairs of a document and half of it. Templates render in a process
beside the trainer, and the tokenizer uses all cores.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import sys
import tempfile
import threading
from typing import Any

import numpy as np
from praxis import base_hyperparams, pax_fiddle

from benchmarks import reporting
from benchmarks.corpus_rate import BATCH, LENGTH, WINDOW_ROWS, Corpus, read_json_lines, take_turns, together
from spmd_trainer.inputs import ChatInput, CorpusInput, PreferenceInput
from spmd_trainer.inputs.corpus.documents import Documents
from spmd_trainer.inputs.corpus.prepare import Preparation, Preparing, prepare

# Tokenising with a worker for each core against one, on 2 cores, and against the library's threads.
LEAST_SPEEDUP, LEAST_OF_LIBRARY = 1.7, 0.9
TIMES_OVER, TOGETHER = 12, 4096
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content }}{% endgeneration %}</{{ m.role }}>{% endfor %}"
)
QUESTION = {"role": "user", "content": "Go on."}


def main() -> int:
    """Measures and prints; returns the exit status."""
    parser = reporting.parser(__doc__, rounds=3)
    parser.add_argument("--megabytes", type=float, default=6, help="size of the corpus")
    args = parser.parse_args()
    report = reporting.Report("token_rate", args.json)
    with tempfile.TemporaryDirectory() as directory:
        corpus = Corpus(pathlib.Path(directory), int(args.megabytes * 2**20))
        report_tokenising(report, corpus, pathlib.Path(directory), args.rounds)
        report_inputs(report, corpus, pathlib.Path(directory), args.rounds)
    return report.finish()


def report_tokenising(report: reporting.Report, corpus: Corpus, folder: pathlib.Path, rounds: int) -> None:
    """Tokenises the corpus with worker processes, and with the library's threads; the three take turns."""
    lines = (corpus.paths["jsonl"]).read_text().splitlines(keepends=True)
    files = [folder / f"many-{number}.jsonl" for number in range(2 * TIMES_OVER)]
    for number, path in enumerate(files):
        path.write_text("".join(lines[number % 2 :: 2]))
    cores = os.cpu_count() or 1

    def tokenise(workers: int) -> int:
        shutil.rmtree(folder / "store", ignore_errors=True)
        preparing = Preparing(Preparation(Documents(tuple(map(str, files))), corpus.wrapped, str(folder / "store")))
        for _ in preparing.make(preparing.missing, workers, threading.Event(), nice=True):
            pass
        return preparing.tokens()

    def encode() -> int:
        count = 0
        for path in files:
            for some in together(read_json_lines(path), TOGETHER):
                for encoding in corpus.tokenizer.encode_batch_fast(some, add_special_tokens=False):
                    count += len(np.array(encoding.ids, np.uint16))
        return count

    sides = {"one worker": lambda: tokenise(1), f"{cores} workers": lambda: tokenise(cores), "the library": encode}
    one, many, library = take_turns(report, "tokenising, ", sides, rounds, equal=True)[0].values()
    report.ratio(f"tokenising: time, {cores} workers / one", many, one, bar=1 / LEAST_SPEEDUP)
    report.ratio(f"tokenising: time, {cores} workers / the library", many, library, bar=1 / LEAST_OF_LIBRARY)


def report_inputs(report: reporting.Report, corpus: Corpus, folder: pathlib.Path, rounds: int) -> None:
    """Reads an epoch of each input."""
    texts = list(read_json_lines(corpus.paths["jsonl"]))
    answers = [[{"role": "assistant", "content": text}] for text in texts]
    records = {
        "chats": [{"messages": [QUESTION, *answer]} for answer in answers],
        "pairs": [
            {
                "prompt": [QUESTION],
                "chosen": answer,
                "rejected": [{"role": "assistant", "content": text[: len(text) // 2]}],
            }
            for text, answer in zip(texts, answers, strict=True)
        ],
    }
    for name, rows in records.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    text = Documents(str(corpus.paths["jsonl"]))
    prepare(Preparation(text, corpus.wrapped, str(folder / "tokens")))
    chat = {"chat_template": TEMPLATE, "too_long": "drop", "seq_len": 2 * LENGTH}
    sides = {
        "text": lambda: read_all(CorpusInput, corpus, source=text),
        "stored tokens": lambda: read_all(CorpusInput, corpus, source=Documents(str(folder / "tokens"))),
        "conversations": lambda: read_all(ChatInput, corpus, files=str(folder / "chats.jsonl"), **chat),
        "pairs": lambda: read_all(PreferenceInput, corpus, files=str(folder / "pairs.jsonl"), **chat),
    }
    take_turns(report, "", sides, rounds, equal=False)


def read_all(kind: type[CorpusInput], corpus: Corpus, **fields: Any) -> int:
    """Reads an input to its end; returns the tokens of its batches."""
    settings = {
        "seq_len": LENGTH,
        "batch_size": BATCH,
        "window_rows": WINDOW_ROWS,
        "tokenizer": corpus.wrapped,
        **fields,
    }
    source = base_hyperparams.instantiate(pax_fiddle.Config(kind, name="rate", is_training=False, **settings))
    count = 0
    while True:
        try:
            batch = source.get_next()
        except StopIteration:
            return count
        for rows in (batch.chosen, batch.rejected) if kind is PreferenceInput else (batch,):
            count += int(np.count_nonzero(rows.paddings == 0))


if __name__ == "__main__":
    sys.exit(main())
