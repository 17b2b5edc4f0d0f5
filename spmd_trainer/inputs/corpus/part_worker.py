"""Worker processes that tokenize parts of a corpus. Threads would compete with the trainer for the interpreter lock (GIL).

A worker first reads a pickled `Task` from its pipe. Each later request is the number of a part to tokenize. The answer to a
request is JSON: the part's record (its statistics), or {"error": message}.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pickle
import queue
import shutil
import sys
import tempfile
import threading
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from etils import epath

from spmd_trainer.errors import UserError
from spmd_trainer.errors.installation import imported
from spmd_trainer.inputs import tokenizers
from spmd_trainer.inputs.corpus.documents import BadRecord, Documents, LeftOut, Record
from spmd_trainer.inputs.corpus.encoding import RAISE, Encoder
from spmd_trainer.inputs.corpus.file_source import FileSource
from spmd_trainer.inputs.corpus.open_source import open_files
from spmd_trainer.inputs.corpus.order import size_of
from spmd_trainer.inputs.corpus.token_store import Batch
from spmd_trainer.inputs.corpus.tokens import CountedTokens, StoredTokens, Tokens, fetch
from spmd_trainer.inputs.shards import changed
from spmd_trainer.inputs.worker_process import EndedError, WorkerProcess, pipe_of_trainer
from spmd_trainer.storage import files, is_remote
from spmd_trainer.storage.paths import directory

# Number of documents tokenized at a time.
_BLOCK = 256
# Maximum number of bad records listed per part.
_NAMED = 5
# Number of buckets in the histogram of document lengths. Bucket n counts documents of 2^n to 2^(n+1) - 1 tokens.
_BUCKETS = 32
# A record batch ends with the document that reaches one of these limits, because a writer holds the batch in memory.
_BATCH_TOKENS, _BATCH_DOCUMENTS = 2**24, 2**20
_COPY_BYTES = 2**24
# Prefix of the names of folders in which parts are written. A worker that is killed leaves its folder behind.
_SCRATCH = ".making-"
# Niceness of the workers of a training run, so that the run's own threads get the processors first.
_NICE = 10


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a token store. One worker makes it from some documents of a chunk of the corpus.

    Attributes:
      chunk: index of the chunk in the source.
      start: index, in the chunk, of the part's first document.
      stop: index of the first document after the part; None if the part extends to the chunk's end.
      path, size: path of the chunk's file, and the size of this file in bytes when the source was opened.
      inside: index of the chunk among the chunks of its file.
    """

    chunk: int
    start: int
    stop: int | None
    path: str
    size: int
    inside: int


@dataclasses.dataclass(frozen=True)
class Task:
    """Settings with which a worker makes the parts of a token store.

    Attributes:
      documents: the settings of the corpus, without its files.
      kind: kind of the corpus's files.
      tokenizer: the tokenizer.
      folder: folder of the store.
      key: hash of everything on which the content of the parts depends.
      parts: all parts of the store.
      bad_records: 'raise' raises an error at a bad record; 'skip' leaves it out.
    """

    documents: Documents
    kind: str
    tokenizer: tokenizers.Tokenizer
    folder: str
    key: str
    parts: tuple[Part, ...]
    bad_records: str

    def source_of(self, part: Part) -> tuple[FileSource, int]:
        """Opens the file of a part. Returns the file's source, and the number of the part's chunk in the file.

        Keeps only the file that was opened last, because a corpus may have many files.

        Raises:
          UserError: the file can't be read, or has changed since the corpus was opened.
        """
        if part.path not in self._newest:
            self._newest.clear()
            self._newest[part.path] = source = open_files(self.documents, self.kind, [part.path])
            if source.sizes != (part.size,):
                raise changed(part.path, part.size)
        return self._newest[part.path], part.inside

    @functools.cached_property
    def _newest(self) -> dict[str, FileSource]:
        # The file that was opened last: it often has the next part, too.
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(tokenizers.token_dtype(self.tokenizer.vocab_size))

    def part_name(self, number: int) -> str:
        return f"tokens-{number:05d}-of-{len(self.parts):05d}.arrow"

    def record_name(self, number: int) -> str:
        """Returns the name of the JSON file that marks a part as finished."""
        return f"tokens-{number:05d}-of-{len(self.parts):05d}.json"


class Worker:
    """Starts and controls one worker process. Used in the parent process."""

    def __init__(self, task: Task, *, nice: bool):
        """Prepares the worker process. `nice`: True runs it at low priority (`os.nice`).

        Raises:
          TypeError, AttributeError, pickle.PicklingError: the tokenizer can't be sent to another process.
        """
        content = pickle.dumps(task)
        self._scratch = tempfile.TemporaryDirectory(prefix="spmd-trainer-")
        environment = {"TOKENIZERS_PARALLELISM": "false", "TMPDIR": self._scratch.name}
        self._process = WorkerProcess.of_module(__name__, content, ["nice"] if nice else [], environment)

    def make(self, number: int) -> dict[str, Any]:
        """Lets the process make part `number`, and returns the part's record (its statistics).

        Raises:
          UserError: `make_part` failed, or the process died.
        """
        try:
            found: dict[str, Any] = json.loads(self._process.ask(str(number).encode()))
        except EndedError as error:
            raise UserError(f"a process that tokenises {error}") from error
        if "error" in found:
            raise UserError(found["error"])
        return found

    def stop(self) -> None:
        """Kills the process, and removes its temporary files."""
        self._process.stop()
        self._scratch.cleanup()


def remove_unfinished(folder: epath.Path) -> None:
    """Removes unfinished parts that killed workers left in a local store. Call it only while no worker writes to the store."""
    if not is_remote(folder):
        for left in folder.glob(f"{_SCRATCH}*"):
            shutil.rmtree(left, ignore_errors=True)


def make_part(task: Task, number: int) -> dict[str, Any]:
    """Tokenizes a part, writes it and its record (a JSON file of statistics), and returns the record.

    Raises:
      UserError: the corpus can't be read, or has a bad record and `bad_records` is 'raise'.
      OSError: the part can't be written.
    """
    part, folder = task.parts[number], directory("the store of tokens", task.folder)
    encoder = Encoder(task.tokenizer, task.tokenizer.vocab_size, task.documents.processor)
    names = ("documents", "tokens", "bytes", "empty", "skipped", "largest")
    record: dict[str, Any] = {"key": task.key, **dict.fromkeys(names, 0), "named": []}
    lengths = np.zeros(_BUCKETS, np.int64)
    count = None if part.stop is None else part.stop - part.start
    source, chunk = task.source_of(part)
    records = itertools.islice(source.read_chunk(chunk, part.start), count)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=None if is_remote(folder) else os.fspath(folder)) as scratch:
        path = os.path.join(scratch, "part")
        writer = Writer(path, task.dtype, counts=task.documents.processor is not None)
        while block := list(itertools.islice(records, _BLOCK)):
            for one, tokens in zip(block, encoder.encode(block), strict=True):
                writer.add(_counted(record, lengths, one, tokens, task.bad_records), size_of(one))
        record |= {"batches": writer.close(), "lengths": lengths.tolist()}
        # Delete an old record first: even after a crash, it must never describe a different part than the one written here.
        (folder / task.record_name(number)).unlink(missing_ok=True)
        target = folder / task.part_name(number)
        if is_remote(folder):
            with open(path, "rb") as made, target.open("wb") as stored:
                shutil.copyfileobj(made, stored, _COPY_BYTES)
        else:
            with open(path, "rb") as made:  # a part that a record names must be on the disk
                os.fsync(made.fileno())
            os.replace(path, os.fspath(target))
    # Written last: its presence marks the part as complete.
    files.write_atomically(folder / task.record_name(number), [json.dumps(record)])
    return record


def _counted(
    record: dict[str, Any], lengths: np.ndarray, one: Record, tokens: Tokens | BadRecord, bad_records: str
) -> np.ndarray | CountedTokens | None:
    """Adds a document to a part's statistics and returns the document's tokens; None for a bad record that is skipped."""
    record["documents"] += 1
    if isinstance(tokens, BadRecord):
        if bad_records == RAISE and not isinstance(tokens, LeftOut):
            raise UserError(f"{tokens.text}. Fix it, or skip bad records (bad_records='skip', or --bad_records=skip)")
        record["skipped"] += 1
        if len(record["named"]) < _NAMED:
            record["named"].append(tokens.text)
        return None
    assert not isinstance(tokens, StoredTokens)  # a store is not prepared again
    record["tokens"] += len(tokens)
    record["bytes"] += 0 if isinstance(one, BadRecord) else len(one.content)
    if len(tokens):
        values = tokens.tokens if isinstance(tokens, CountedTokens) else tokens
        record["largest"] = max(record["largest"], int(values.max()))
        lengths[min(len(tokens).bit_length() - 1, _BUCKETS - 1)] += 1
    else:
        record["empty"] += 1
    return tokens


class Writer:
    """Writes one part of a token store to a local Arrow file."""

    def __init__(self, path: str, dtype: np.dtype, *, counts: bool = False):
        """Creates the file. Raises UserError if pyarrow isn't installed.

        `counts`: True adds a column that marks the tokens that count toward the loss.
        """
        self._arrow = arrow = arrow_library()
        self._path, self._dtype = path, dtype
        columns = [("tokens", arrow.list_(arrow.from_numpy_dtype(dtype))), ("bytes", arrow.int32())]
        columns += [("counted", arrow.list_(arrow.bool_()))] if counts else []
        self._schema = arrow.schema(columns)
        self._writer = arrow.ipc.new_file(path, self._schema)
        self._documents: list[np.ndarray | CountedTokens] = []
        self._sizes: list[int] = []
        self._tokens = 0

    def add(self, tokens: np.ndarray | CountedTokens | None, size: int) -> None:
        """Adds a document. `tokens`: its tokens, or None if its record is left out. `size`: bytes of its text."""
        self._sizes.append(-1 - size if tokens is None else size)
        tokens = np.zeros(0, self._dtype) if tokens is None else tokens
        self._documents.append(tokens)
        self._tokens += len(tokens)
        if self._tokens >= _BATCH_TOKENS or len(self._documents) >= _BATCH_DOCUMENTS:
            self._write()

    def close(self) -> list[Batch]:
        """Closes the file, and returns the descriptions of its record batches."""
        if self._documents:
            self._write()
        self._writer.close()
        with self._arrow.memory_map(self._path) as file:
            base = file.read_buffer(file.size()).address
            with self._arrow.ipc.open_file(file) as opened:
                return [self._located(opened.get_batch(n), base) for n in range(opened.num_record_batches)]

    def _write(self) -> None:
        ends = np.cumsum([0, *map(len, self._documents)])
        offsets = self._arrow.array(ends.astype(np.int32))
        whole = [(one, 0, len(one)) for one in self._documents]

        def lists(values: list[np.ndarray], dtype: Any) -> Any:
            joined = np.concatenate(values).astype(dtype, copy=False)
            return self._arrow.ListArray.from_arrays(offsets, self._arrow.array(joined))

        columns = [lists(fetch(whole), self._dtype), self._arrow.array(self._sizes, self._arrow.int32())]
        if len(self._schema) > len(columns):
            columns.append(lists(fetch(whole, counted=True), bool))
        self._writer.write_batch(self._arrow.record_batch(columns, schema=self._schema))
        self._documents, self._sizes, self._tokens = [], [], 0

    def _located(self, batch: Any, base: int) -> Batch:
        tokens, sizes, *masks = batch.columns
        _, offsets, _, values = tokens.buffers()
        count = len(tokens.values)
        tokens_at = values.address - base if count else 0
        at = [one.buffers()[3].address - base if count else 0 for one in masks]
        return Batch(len(tokens), count, offsets.address - base, tokens_at, sizes.buffers()[1].address - base, *at)


def arrow_library() -> Any:
    """Imports pyarrow. Raises UserError if it isn't installed."""
    return imported("pyarrow", "prepared corpora need pyarrow to be written: pip install 'spmd-trainer[data]'")


def main(pipe: Connection) -> None:
    """Runs the worker process: makes the parts that the parent requests. Exits when the parent exits, even within a part."""
    content = pipe.recv_bytes()
    try:
        task: Task | str = pickle.loads(content)
    except (AttributeError, ImportError) as error:
        task = f"another process can't import the tokenizer's class ({error}); define it in a module, not in a notebook or script"
    numbers: queue.SimpleQueue[int] = queue.SimpleQueue()

    def read() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                numbers.put(int(pipe.recv_bytes()))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            number = numbers.get()
            if isinstance(task, str):
                raise UserError(task)
            answer = make_part(task, number)
        except (UserError, OSError) as error:
            answer = {"error": str(error)}
        pipe.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    if sys.argv[2:] == ["nice"]:
        os.nice(_NICE)
    os.dup2(2, 1)  # text that a library prints to stdout goes to stderr
    with pipe_of_trainer() as opened:
        main(opened)
