"""Tokens per second of `CorpusInput`, against a loop over the same files with the library underneath.

    python -m benchmarks.corpus_rate [--rounds 7] [--megabytes 6] [--json FILE]

Four pairs: JSON lines (json), Parquet (pyarrow), TFRecord of tf.train.Example (tf.data and TensorFlow's class of examples) and
ArrayRecord (array_record, in a random order). The loops use the same tokenizer, 64 documents at a time, and the same packing;
they have no position, no shares of processes, no shuffle of rows and no checks. Each turn reads the whole corpus once, from
opening the files to the last batch. Documents are the files of the standard library in parts of 3,000 bytes, and the tokenizer is
a byte-level BPE of 4,096 tokens trained on them. On a shared machine, trust the ratio of processor times.

Also, each in a process of its own: how full the rows of the library's functions are, the memory and threads of a mixture of 35
sources against one, and the start of an input over a billion documents that are made up when they are read.
"""

from __future__ import annotations

import ast
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from praxis import base_hyperparams, pax_fiddle

from benchmarks import reporting
from spmd_trainer.inputs import stdlib_text
from spmd_trainer.inputs.corpus import row_plan
from spmd_trainer.inputs.corpus.corpus_input import CorpusInput
from spmd_trainer.inputs.corpus.documents import Document, Documents, Record
from spmd_trainer.inputs.corpus.file_source import FileSource
from spmd_trainer.inputs.corpus.mixture import Mixture
from spmd_trainer.inputs.huggingface_tokenizer import HuggingFaceTokenizer

LENGTH, BATCH, WINDOW_ROWS = 1024, 64, 256
DOCUMENT_BYTES, VOCABULARY, TOGETHER, EOS, SOURCES = 3000, 4096, 64, 0, 35
# The bars of this benchmark.
LEAST_RATE, LEAST_FILL, MOST_MEMORY, MOST_THREADS = 0.9, 0.97, 1.5, 2
START_SECONDS, START_BYTES = 1.0, 100e6


def main() -> int:
    """Measures and prints; returns the exit status."""
    parser = reporting.parser(__doc__, rounds=7)
    parser.add_argument("--megabytes", type=float, default=6, help="size of the corpus")
    parser.add_argument("--measure", choices=MEASUREMENTS, help="measure only this, in this process, and print JSON")
    args = parser.parse_args()
    if args.measure:
        sys.stdout.write(json.dumps(MEASUREMENTS[args.measure]()) + "\n")
        return 0
    report = reporting.Report("corpus_rate", args.json)
    with tempfile.TemporaryDirectory() as directory:
        corpus = Corpus(pathlib.Path(directory), int(args.megabytes * 2**20))
        for name, (ours, baseline) in corpus.pairs().items():
            compare(report, name, ours, baseline, args.rounds)
    report_processes(report)
    return report.finish()


def compare(
    report: reporting.Report, name: str, ours: Callable[[], int], baseline: Callable[[], int], rounds: int
) -> None:
    """Measures one pair, whose programs take turns, and reports it."""
    sides = {"trainer": ours, "baseline": baseline}
    seconds, processor = take_turns(report, f"{name}, ", sides, rounds, equal=True)
    for what, found in (("time", seconds), ("processor time", processor)):
        report.ratio(f"{name}: {what}, trainer / baseline", found["trainer"], found["baseline"], bar=1 / LEAST_RATE)


def take_turns(
    report: reporting.Report, prefix: str, sides: Mapping[str, Callable[[], int]], rounds: int, *, equal: bool
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Lets programs that return their number of tokens take turns, after an unmeasured round, and reports their rates.

    Args:
      report: gets a figure of each, named `prefix` and the program's name.
      prefix: see `report`.
      sides: {name: program}.
      rounds: measured turns of each.
      equal: whether they have to return the same number; otherwise the run fails.

    Returns:
      The seconds of each program's turns, and its seconds of processor time.
    """
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    processor: dict[str, list[float]] = {side: [] for side in sides}
    tokens: dict[str, int] = {}
    for number in range(rounds + 1):
        for side in random.sample(list(sides), len(sides)):
            began, began_processor = time.perf_counter(), time.process_time()
            tokens[side] = sides[side]()
            if number:
                seconds[side].append(time.perf_counter() - began)
                processor[side].append(time.process_time() - began_processor)
    for side, values in seconds.items():
        report.figure(f"{prefix}{side}", tokens[side] / np.array(values), "tokens/s")
    if equal and len({*tokens.values()}) > 1:
        report.fails(f"{prefix}the programs don't do the same work: {tokens}")
    return seconds, processor


def report_processes(report: reporting.Report) -> None:
    """Reports what is measured in processes of their own."""
    fill = _measure("fill")["fill"]
    report.figure("fill of rows of functions, best fit", fill)
    one, many, start = _measure("one"), _measure("many"), _measure("start")
    report.figure("memory, 1 source", one["bytes"], "MB", scale=1e-6)
    report.figure(f"memory, {SOURCES} sources", many["bytes"], "MB", scale=1e-6)
    report.figure(f"threads of Python, {SOURCES} sources", many["threads"])
    report.figure("start, a billion documents", start["seconds"], "s")
    report.figure("start, a billion documents: memory added", start["added"], "MB", scale=1e-6)
    bars = {
        f"rows are less than {LEAST_FILL:.0%} full": fill < LEAST_FILL,
        f"{SOURCES} sources need {MOST_MEMORY} times the memory of one": many["bytes"] >= MOST_MEMORY * one["bytes"],
        f"there are more than {MOST_THREADS} threads for each source": many["threads"] > MOST_THREADS * SOURCES,
        f"the start takes {START_SECONDS:g} s or longer": start["seconds"] >= START_SECONDS,
        f"the start needs {START_BYTES:,.0f} bytes or more": start["added"] >= START_BYTES,
    }
    for why, missed in bars.items():
        if missed:
            report.fails(why)


def _measure(name: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.corpus_rate", f"--measure={name}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"the process that measures {name} exited with status {done.returncode}; its output is above")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def build(source: Any, **fields: Any) -> CorpusInput:
    """Builds the input of this benchmark: one epoch, in order, unless the fields say otherwise."""
    sizes = {"seq_len": LENGTH, "batch_size": BATCH, "window_rows": WINDOW_ROWS}
    given = {"name": "rate", "is_training": False, **sizes, **fields}
    return base_hyperparams.instantiate(pax_fiddle.Config(CorpusInput, source=source, **given))


def read_all(source: CorpusInput) -> int:
    """Reads an input to its end; returns the number of tokens."""
    count = 0
    while True:
        try:
            count += int(source.get_next().weights.sum(dtype=np.int64))
        except StopIteration:
            return count


class Corpus:
    """The same documents as JSON lines, Parquet, TFRecord and ArrayRecord, and a tokenizer trained on them.

    Attributes:
      tokenizer: the tokenizer, of the library.
      wrapped: it, for the inputs.
      paths: {'jsonl', 'parquet', 'tfrecord' or 'arrayrecord': the file}.
    """

    def __init__(self, directory: pathlib.Path, size: int):
        """Writes the files.

        Args:
          directory: where to.
          size: bytes of text.
        """
        documents = list(_parts(size))
        self.tokenizer = _train(documents)
        self.wrapped = HuggingFaceTokenizer(self.tokenizer)
        self.paths = {kind: directory / f"corpus.{kind}" for kind in ("jsonl", "parquet", "tfrecord", "arrayrecord")}
        _write_json_lines(documents, self.paths["jsonl"])
        _write_parquet(documents, self.paths["parquet"])
        _write_tfrecord(documents, self.paths["tfrecord"])
        _write_array_record(documents, self.paths["arrayrecord"])

    def pairs(self) -> dict[str, tuple[Callable[[], int], Callable[[], int]]]:
        """Returns {name: (the trainer's program, the baseline)}. Each reads the corpus once, and returns the number of tokens."""
        return {
            "JSON lines": (lambda: self._ours("jsonl"), lambda: self._baseline(read_json_lines(self.paths["jsonl"]))),
            "Parquet": (lambda: self._ours("parquet"), lambda: self._baseline(self._parquet())),
            "TFRecord": (lambda: self._ours("tfrecord"), lambda: self._baseline(self._tfrecord())),
            "ArrayRecord": (lambda: self._ours("arrayrecord", "global"), lambda: self._baseline(self._array_record())),
        }

    def _ours(self, kind: str, shuffle: str | None = None) -> int:
        documents = Documents(str(self.paths[kind]), shuffle=shuffle)
        return read_all(build(documents, tokenizer=self.wrapped, shuffle=shuffle is not None))

    def _baseline(self, texts: Iterable[str]) -> int:
        window: list[np.ndarray] = []
        size = count = 0
        for some in together(texts):
            for encoding in self.tokenizer.encode_batch_fast(some, add_special_tokens=False):
                window.append(np.array(encoding.ids, np.uint16))
                size += len(window[-1])
                if size >= WINDOW_ROWS * LENGTH:
                    count += _pack(window)
                    window, size = [], 0
        return count + (_pack(window) if window else 0)

    def _parquet(self) -> Iterator[str]:
        import pyarrow.parquet

        for batch in pyarrow.parquet.ParquetFile(self.paths["parquet"]).iter_batches(columns=["text"]):
            yield from batch.column(0).to_pylist()

    def _tfrecord(self) -> Iterator[str]:
        import tensorflow as tf

        for record in tf.data.TFRecordDataset(str(self.paths["tfrecord"])).as_numpy_iterator():
            yield tf.train.Example.FromString(record).features.feature["text"].bytes_list.value[0].decode()

    def _array_record(self) -> Iterator[str]:
        from array_record.python import array_record_module

        reader = array_record_module.ArrayRecordReader(str(self.paths["arrayrecord"]))
        order = np.random.default_rng(0).permutation(reader.num_records())
        for start in range(0, len(order), TOGETHER):
            for record in reader.read(order[start : start + TOGETHER].tolist()):
                yield record.decode()
        reader.close()


def read_json_lines(path: pathlib.Path) -> Iterator[str]:
    """Yields the texts of a file."""
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def together(texts: Iterable[str], count: int = TOGETHER) -> Iterator[list[str]]:
    """Yields the texts in lists of `count`."""
    some: list[str] = []
    for text in texts:
        some.append(text)
        if len(some) == count:
            yield some
            some = []
    if some:
        yield some


def _pack(window: list[np.ndarray]) -> int:
    """Makes the batches of a window of documents; returns the number of tokens."""
    plan = row_plan.pack([len(one) + 1 for one in window], LENGTH, row_plan.BEST_FIT)
    frame = row_plan.Frame((EOS,), (EOS,))
    documents = [row_plan.FramedDocument(one, frame) for one in window]
    table = row_plan.make_rows(plan, np.arange(plan.num_rows), documents, LENGTH)
    count, num_rows = 0, plan.num_rows
    for start in range(0, num_rows, BATCH):
        batch = table.batch(np.arange(start, min(start + BATCH, num_rows)))
        count += int(batch.weights.sum(dtype=np.int64))
    return count


def _parts(size: int) -> Iterator[str]:
    for path in stdlib_text.stdlib_train_files():
        content = pathlib.Path(path).read_text(encoding="utf-8", errors="ignore")
        for start in range(0, len(content), DOCUMENT_BYTES):
            yield content[start : start + DOCUMENT_BYTES]
            size -= DOCUMENT_BYTES
            if size <= 0:
                return


def _train(documents: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents[:600], trainer)
    return tokenizer


def _write_json_lines(documents: list[str], path: str | pathlib.Path) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for number, text in enumerate(documents):
            file.write(json.dumps({"id": number, "text": text}) + "\n")


def _write_parquet(documents: list[str], path: pathlib.Path) -> None:
    import pyarrow
    import pyarrow.parquet

    columns = {"id": list(range(len(documents))), "text": documents}
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=500)


def _write_tfrecord(documents: list[str], path: pathlib.Path) -> None:
    import tensorflow as tf

    with tf.io.TFRecordWriter(str(path)) as writer:
        for text in documents:
            feature = tf.train.Feature(bytes_list=tf.train.BytesList(value=[text.encode()]))
            writer.write(tf.train.Example(features=tf.train.Features(feature={"text": feature})).SerializeToString())


def _write_array_record(documents: list[str], path: pathlib.Path) -> None:
    from array_record.python import array_record_module

    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for text in documents:
        writer.write(text.encode())
    writer.close()


def measure_fill() -> dict[str, Any]:
    """Packs the functions of the standard library as documents, read by byte."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "functions.jsonl")
        _write_json_lines(list(_functions()), path)
        source = build(Documents(path))
        read_all(source)
        return {"fill": source.fill}


def _functions() -> Iterator[str]:
    for path in stdlib_text.stdlib_train_files():
        content = pathlib.Path(path).read_text(encoding="utf-8", errors="ignore")
        lines = content.splitlines(keepends=True)
        for node in ast.walk(ast.parse(content)):
            if isinstance(node, ast.FunctionDef):
                yield "".join(lines[node.lineno - 1 : node.end_lineno])


def measure_sources(count: int) -> dict[str, Any]:
    """Reads a mixture of JSON-lines files in training, shuffled; returns the most memory, in bytes, and the threads."""
    with tempfile.TemporaryDirectory() as directory:
        given = {}
        for number in range(count):
            path = os.path.join(directory, f"{number}.jsonl")
            _write_json_lines([f"{number} {line} " + "made-up text " * 300 for line in range(3000)], path)
            given[f"source{number}"] = (Documents(path), 1.0)
        source = build(Mixture(given), is_training=True)
        for _ in range(40):
            source.get_next()
        return {"bytes": memory("VmHWM"), "threads": threading.active_count()}


class MadeUp(FileSource):
    """A billion documents that are made up when they are read."""

    paths = ()
    num_chunks = 1000
    random_access = True
    num_bytes = 10**12
    size_text = "a billion documents"

    def chunk_sizes(self) -> np.ndarray:
        return np.full(self.num_chunks, 10**9 // self.num_chunks, np.int64)

    def read_chunk(self, chunk: int, start: int) -> Iterator[Record]:
        raise NotImplementedError

    def read(self, numbers: np.ndarray) -> list[Record]:
        return [Document(b"%d " % number * 100, f"document {number}") for number in numbers]

    def fingerprint(self) -> dict[str, Any]:
        return {"files": 1}

    def changed_text(self, before: Mapping[str, Any]) -> str:
        return str(before)


def measure_start() -> dict[str, Any]:
    """Starts an input over a billion documents; returns the seconds to its first batch and the bytes of memory added."""
    before = memory("VmRSS")
    began = time.perf_counter()
    build(Documents(MadeUp()), is_training=True).get_next()
    return {"seconds": time.perf_counter() - began, "added": memory("VmHWM") - before}


def memory(entry: str) -> int:
    """Returns the bytes that this process holds ('VmRSS') or the most that it ever held ('VmHWM')."""
    # Not resource.getrusage: its maximum begins with that of the process that started this one.
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(entry)) * 1024


MEASUREMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "fill": measure_fill,
    "one": lambda: measure_sources(1),
    "many": lambda: measure_sources(SOURCES),
    "start": measure_start,
}


if __name__ == "__main__":
    sys.exit(main())
