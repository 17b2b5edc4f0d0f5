"""Tokenizes a corpus into a token store: before training (`--mode=tokenise`), or during training (`prepared_source`).

The corpus is divided into parts. Worker processes tokenize them, each into a file of the store and a small JSON file beside it.
Finished parts are kept, so if the job stops, the same command makes only the missing parts. `corpus.json` is written last. With
the same `shuffle`, the store gives the same batches as the text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from absl import logging
from etils import epath

from spmd_trainer.errors import UserError, require_one_of, terminal
from spmd_trainer.inputs import tokenizer_field
from spmd_trainer.inputs.corpus.documents import Documents
from spmd_trainer.inputs.corpus.encoding import BAD_RECORDS, RAISE
from spmd_trainer.inputs.corpus.file_source import FileSource
from spmd_trainer.inputs.corpus.open_source import open_documents
from spmd_trainer.inputs.corpus.part_worker import Part, Task, Worker, arrow_library, make_part
from spmd_trainer.inputs.corpus.token_store import DESCRIPTION_FILE, FORMAT, Batch, Description, TokenStore
from spmd_trainer.inputs.text_settings import TokeniseConfig
from spmd_trainer.sharding.messages import count_text, format_seconds, short_hash
from spmd_trainer.storage import access, files, json_values, reading
from spmd_trainer.storage.paths import directory

# Maximum number of documents per part, if documents can be read by number.
DOCUMENTS_PER_PART = 100_000
# Maximum number of bad records listed for a whole store.
_NAMED = 20
_LINE_EVERY = 10.0


@dataclasses.dataclass(frozen=True)
class Preparation:
    """Settings for tokenizing a corpus into a token store.

    Attributes:
      documents: the corpus.
      tokenizer: see `text_base.TokenizedInput`.
      output: folder for the store; local, gs:// or s3://.
      bad_records: 'raise' stops at the first bad record; 'skip' stores an empty document instead of each bad record.
      documents_per_part: maximum number of documents per part, see `parts_of`.
    """

    documents: Documents
    tokenizer: Any
    output: str
    bad_records: str = RAISE
    documents_per_part: int = DOCUMENTS_PER_PART

    def __post_init__(self) -> None:
        require_one_of("bad_records", self.bad_records, BAD_RECORDS)
        if self.documents_per_part < 1:
            raise UserError(f"documents_per_part={self.documents_per_part}; set it to 1 or more")


def parts_of(source: FileSource, documents_per_part: int) -> list[Part]:
    """Divides a source into parts, each of which one worker tokenizes.

    Each chunk of the source (see `FileSource`) is divided into parts of at most `documents_per_part` documents. If the source has
    no random access, or its chunk sizes are unknown, each chunk is one part.
    """

    def part(chunk: int, start: int, stop: int | None) -> Part:
        file, inside = source.groups[chunk]
        return Part(chunk, start, stop, source.paths[file], source.sizes[file], inside)

    sizes = source.chunk_sizes()
    if sizes is None or not source.random_access:
        return [part(chunk, 0, None) for chunk in range(source.num_chunks)]
    return [
        part(chunk, start, min(start + documents_per_part, int(size)))
        for chunk, size in enumerate(sizes)
        for start in range(0, int(size), documents_per_part)
    ]


class Preparing:
    """A token store that is being made, perhaps by several processes."""

    def __init__(self, preparation: Preparation):
        """Opens the corpus and the output folder, and finds the parts that are finished already.

        Raises:
          UserError: the corpus, the tokenizer or the output can't be used.
        """
        tokenizer = tokenizer_field.make_tokenizer(preparation.tokenizer, None)
        documents = preparation.documents
        if documents.processor is not None:
            bound = documents.processor.bound(tokenizer, documents.processor.seq_len)
            documents = dataclasses.replace(documents, processor=bound)
        self.source = open_documents(documents)
        if isinstance(self.source, TokenStore):
            raise UserError(
                f"files={documents.files!r:.300} are tokenised already: {self.source.size_text}. CorpusInput reads them as they "
                "are; to tokenise them in another way, give the text that they were made of"
            )
        parts = tuple(parts_of(self.source, preparation.documents_per_part))
        if not parts:
            raise UserError(f"{self.source.size_text} hold no document; give at least one")
        arrow_library()
        self.folder = _output_folder(preparation)
        decides = deciding(documents, self.source, tokenizer, preparation.bad_records)
        key = short_hash(json.dumps([decides, preparation.documents_per_part], sort_keys=True, default=str))
        # Workers open the files that the parts name.
        documents = dataclasses.replace(documents, files=())
        self.task = Task(
            documents, self.source.kind, tokenizer, os.fspath(self.folder), key, parts, preparation.bad_records
        )
        self._done: dict[int, dict[str, Any]] = {}
        self.look()

    @property
    def missing(self) -> list[int]:
        """Numbers of the parts that are not finished, ascending."""
        return [number for number in range(len(self.task.parts)) if number not in self._done]

    def look(self) -> None:
        """Looks for parts that other processes have finished, and records them as finished."""
        names: set[str] = set()
        with contextlib.suppress(FileNotFoundError):  # a folder of an object store appears with its first file
            names |= set(reading.names(os.fspath(self.folder)))
        for number in self.missing:
            if {self.task.part_name(number), self.task.record_name(number)} <= names:
                try:
                    record = json_values.parse_object(
                        json_values.content_of(self.folder / self.task.record_name(number))
                    )
                except (OSError, ValueError):
                    continue
                if record.get("key") == self.task.key:
                    self._done[number] = record

    def make(self, numbers: Sequence[int], workers: int, ends: threading.Event, *, nice: bool = False) -> Iterator[int]:
        """Makes parts with `workers` processes, and yields the number of each part when it is finished.

        Args:
          numbers: numbers of the parts to make.
          workers: number of processes. With one worker or one part, and `nice=False`, this process itself makes the parts.
          ends: when this event is set, the worker processes are stopped. Their unfinished parts are dropped.
          nice: True runs the processes at low priority (`os.nice`).

        Raises:
          UserError: the corpus can't be read, or a record is bad and `bad_records` is 'raise'.
        """
        if not nice and (workers == 1 or len(numbers) < 2):
            for number in numbers:
                self._done[number] = make_part(self.task, number)
                yield number
            return
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        made: queue.SimpleQueue[tuple[int, dict[str, Any]] | Exception] = queue.SimpleQueue()
        for number in numbers:
            waiting.put(number)
        running: list[Worker] = []
        try:
            for _ in range(min(workers, len(numbers))):
                running.append(Worker(self.task, nice=nice))
                threading.Thread(target=_serve, args=(running[-1], waiting, made), daemon=True).start()
            left = len(numbers)
            while left and not ends.is_set():
                try:
                    found = made.get(timeout=1.0)
                except queue.Empty:
                    continue
                if isinstance(found, Exception):
                    raise found
                self._done[found[0]] = found[1]
                left -= 1
                yield found[0]
        finally:
            for worker in running:
                worker.stop()

    def finish(self) -> Description:
        """Writes `corpus.json` once all parts are finished, and returns its content."""
        task, records = self.task, [self._done[number] for number in range(len(self.task.parts))]
        chunks = [0] * self.source.num_chunks
        for part, record in zip(task.parts, records, strict=True):
            chunks[part.chunk] += record["documents"]
        counts = ("documents", "tokens", "bytes", "empty", "skipped")
        statistics: dict[str, Any] = {name: sum(record[name] for record in records) for name in counts}
        statistics["largest"] = max(record["largest"] for record in records)
        statistics["named"] = [text for record in records for text in record["named"]][:_NAMED]
        lengths = np.sum([record["lengths"] for record in records], axis=0)
        statistics["lengths"] = {str(2**n): int(count) for n, count in enumerate(lengths) if count}
        parts = {task.part_name(n): [Batch(*batch) for batch in record["batches"]] for n, record in enumerate(records)}
        processor = task.documents.processor
        made_by = None if processor is None else processor.fingerprint()
        found = Description(task.tokenizer.fingerprint(), task.dtype.name, chunks, parts, statistics, made_by)
        files.write_atomically(self.folder / DESCRIPTION_FILE, found.lines())
        return found

    def tokens(self) -> int:
        return sum(record["tokens"] for record in self._done.values())


def tokenise(config: TokeniseConfig) -> None:
    """Runs `--mode=tokenise`, and prints the corpus's numbers of documents and tokens. Raises the errors of `prepare`."""
    documents = config.documents()
    if config.conversations:
        from spmd_trainer.inputs.chat_text import Chat  # whose module imports this one

        documents = dataclasses.replace(documents, processor=Chat(**config.of_conversations()))
    task = Preparation(documents, config.tokenizer, config.output, config.bad_records)
    with access.outages_explained(epath.Path(config.output)):
        found = prepare(task, workers=config.workers or os.cpu_count() or 1)
    counts = found.statistics
    per_document = counts["tokens"] / max(1, counts["documents"])
    lines = [
        f"{config.output}: {counts['documents']:,} documents, {counts['tokens']:,} tokens ({per_document:.1f} per document, "
        f"{counts['bytes'] / max(1, counts['tokens']):.2f} bytes per token), {counts['empty']:,} empty, "
        f"{counts['skipped']:,} left out",
        *(f"  left out: {text}" for text in counts["named"]),
    ]
    terminal.write("\n".join([*lines, ""]))


def prepare(preparation: Preparation, *, workers: int = 1) -> Description:
    """Tokenizes a corpus into a token store with `workers` processes, and returns the content of the store's `corpus.json`.

    Raises:
      UserError: the corpus, the tokenizer or the output can't be used, or a record is bad and `bad_records` is 'raise'.
    """
    preparing = Preparing(preparation)
    missing, total = preparing.missing, len(preparing.task.parts)
    if len(missing) < total:
        logging.info("%s of %d are there from before", count_text(total - len(missing), "part"), total)
    if missing:  # the folder is incomplete until all parts match
        (preparing.folder / DESCRIPTION_FILE).unlink(missing_ok=True)
    progress = Progress(preparing)
    for _ in preparing.make(missing, workers, threading.Event()):
        progress.log()
    return preparing.finish()


def _serve(
    worker: Worker, waiting: queue.SimpleQueue[int], made: queue.SimpleQueue[tuple[int, dict[str, Any]] | Exception]
) -> None:
    """Lets a worker make the parts in `waiting` until none is left. Puts each result, or the first error, into `made`."""
    while True:
        try:
            number = waiting.get_nowait()
        except queue.Empty:
            return
        try:
            made.put((number, worker.make(number)))
        except Exception as error:  # raised by the thread that reads `made`
            made.put(error)
            return


def _output_folder(preparation: Preparation) -> epath.Path:
    folder = directory("--output", preparation.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = reading.problem(os.fspath(folder), error)
        raise UserError(f"--output={preparation.output} can't be used: {problem}") from error
    return folder


def deciding(documents: Documents, source: FileSource, tokenizer: Any, bad_records: str) -> list[Any]:
    """Returns everything that determines the tokens in a store, as JSON values."""
    settings: list[Any] = [
        documents.column,
        documents.kind,
        documents.separator,
        documents.max_record_bytes,
        bad_records,
    ]
    if documents.processor is not None:
        settings.append(documents.processor.fingerprint())
    return [FORMAT, source.fingerprint(), tokenizer.fingerprint(), settings]


class Progress:
    """Logs the progress of making a token store: finished parts, tokens per second, and remaining time."""

    def __init__(self, preparing: Preparing):
        self._preparing = preparing
        self._total = len(preparing.task.parts)
        self._before, self._tokens = self._total - len(preparing.missing), preparing.tokens()
        self._start = self._last = time.monotonic()

    def log(self) -> None:
        """Logs a line if 10 seconds have passed since the last line, or if all parts are finished."""
        now, left = time.monotonic(), len(self._preparing.missing)
        if now - self._last < _LINE_EVERY and left:
            return
        self._last = now
        passed, done = now - self._start, self._total - left - self._before
        tokens = self._preparing.tokens() - self._tokens
        logging.info(
            "%d of %d parts are tokenised, %s tokens, %s tokens/s, %s left",
            self._total - left,
            self._total,
            f"{tokens:,}",
            f"{tokens / max(passed, 1e-9):,.0f}",
            format_seconds(passed / max(1, done) * left),
        )
