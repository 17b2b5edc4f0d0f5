"""Tokenises a corpus ahead of training; `tools/prepare_text.py` is its command line.

Chunks are divided into parts. Several processes tokenise parts, each into a file of a token store with a small JSON file
beside it. Finished parts are kept, so a stopped preparation resumes. `corpus.json` is written last. With the same `shuffle`,
the result gives the same batches as tokenising during training.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from absl import logging
from etils import epath

from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.inputs import tokenizer_field, tokenizers
from spmd_trainer.inputs.corpus.documents import BadRecord, Documents, Record, Source
from spmd_trainer.inputs.corpus.encoding import RAISE, SKIP, Encoder
from spmd_trainer.inputs.corpus.open_source import open_documents
from spmd_trainer.inputs.corpus.row_plan import Tokens
from spmd_trainer.inputs.corpus.token_store import DESCRIPTION_FILE, FORMAT, Batch, Description, Writer, arrow_library
from spmd_trainer.sharding.messages import count_text, format_seconds, short_hash
from spmd_trainer.storage import files, is_remote, json_values, reading
from spmd_trainer.storage.paths import directory

# Most documents per part, if they can be read by number.
DOCUMENTS_PER_PART = 100_000
# Documents encoded at a time.
_BLOCK = 256
# Bad records listed per part.
_NAMED = 5
_LINE_EVERY = 10.0
# Histogram buckets of lengths: 2^n to 2^(n+1) - 1 tokens.
_BUCKETS = 32


@dataclasses.dataclass(frozen=True)
class Preparation:
    """What to prepare.

    Attributes:
      documents: the corpus.
      tokenizer: a path that every process can read, or None for bytes; see `text_base.TokenizedInput`.
      output: folder for the result; local, gs:// or s3://.
      bad_records: 'raise' stops at the first bad record; 'skip' stores an empty document instead.
      documents_per_part: see `DOCUMENTS_PER_PART`.
    """

    documents: Documents
    tokenizer: str | None
    output: str
    bad_records: str = RAISE
    documents_per_part: int = DOCUMENTS_PER_PART

    def __post_init__(self) -> None:
        if self.bad_records not in (RAISE, SKIP):
            near = did_you_mean(str(self.bad_records), (RAISE, SKIP))
            raise UserError(f"bad_records={self.bad_records!r}; set it to {RAISE!r} or {SKIP!r}{near}")
        if self.documents_per_part < 1:
            raise UserError(f"documents_per_part={self.documents_per_part}; set it to 1 or more")


@dataclasses.dataclass(frozen=True)
class Part:
    """Documents `start` to `stop` of a chunk; `stop` None: to its end."""

    chunk: int
    start: int
    stop: int | None


def parts_of(source: Source, documents_per_part: int) -> list[Part]:
    """Divides a source into parts. A chunk that can only be read in order is one part."""
    sizes = source.chunk_sizes()
    if sizes is None or not source.random_access:
        return [Part(chunk, 0, None) for chunk in range(source.num_chunks)]
    return [
        Part(chunk, start, min(start + documents_per_part, int(size)))
        for chunk, size in enumerate(sizes)
        for start in range(0, int(size), documents_per_part)
    ]


def prepare(preparation: Preparation, *, workers: int = 1) -> Description:
    """Tokenises the corpus with `workers` processes, and returns the description that it writes.

    Raises:
      UserError: the corpus, the tokenizer or the output can't be used, or a record is bad and `bad_records` is
        'raise'.
    """
    preparation = _resolved(preparation)
    source = open_documents(preparation.documents)
    tokenizer = tokenizer_field.make_tokenizer(preparation.tokenizer, None)
    parts = parts_of(source, preparation.documents_per_part)
    if not parts:
        raise UserError(f"{source.size_text} hold no document; give at least one")
    arrow_library()
    folder = _output_folder(preparation)
    key = _key(preparation, source, tokenizer)
    total = len(parts)
    done = {i: found for i in range(total) if (found := _finished(folder, i, total, key)) is not None}
    if done:
        logging.info("%s of %d are there from before", count_text(len(done), "part"), total)
    task = functools.partial(_prepare_part, preparation, key, total)
    waiting = [(i, part) for i, part in enumerate(parts) if i not in done]
    if waiting:  # the folder is incomplete until all parts match
        (folder / DESCRIPTION_FILE).unlink(missing_ok=True)
    progress = _Progress(total, len(done))
    for number, found in _run(task, waiting, workers):
        done[number] = found
        progress.add(found)
    description = _description(source, tokenizer, parts, [done[i] for i in range(total)])
    files.write_atomically(folder / DESCRIPTION_FILE, description.lines())
    return description


def _run(task: Any, waiting: Sequence[tuple[int, Part]], workers: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the number and the statistics of each part as it finishes."""
    if workers == 1 or len(waiting) < 2:
        yield from ((number, task(number, part)) for number, part in waiting)
        return
    # Not forked: threads of libraries don't survive a fork.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        min(workers, len(waiting)), mp_context=context, initializer=_use_one_thread
    ) as pool:
        running = {pool.submit(task, number, part): number for number, part in waiting}
        try:
            for future in concurrent.futures.as_completed(running):
                yield running[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _use_one_thread() -> None:
    """Limits a worker to one encoding thread; the workers together use all cores."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _resolved(preparation: Preparation) -> Preparation:
    """Replaces `files` by a tuple of paths, which other processes can unpickle."""
    given = preparation.documents.files() if callable(preparation.documents.files) else preparation.documents.files
    paths = (given,) if isinstance(given, str | os.PathLike) else tuple(given or ())
    return dataclasses.replace(preparation, documents=dataclasses.replace(preparation.documents, files=paths))


def _output_folder(preparation: Preparation) -> epath.Path:
    """Creates the output folder."""
    folder = directory("--output", preparation.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = reading.problem(os.fspath(folder), error)
        raise UserError(f"--output={preparation.output} can't be used: {problem}") from error
    return folder


@functools.lru_cache(maxsize=1)
def _opened(preparation: Preparation, key: str) -> tuple[Source, tokenizers.Tokenizer]:
    """Opens the corpus and the tokenizer once per process. `key` changes with the files."""
    del key
    return open_documents(preparation.documents), tokenizer_field.make_tokenizer(preparation.tokenizer, None)


def _prepare_part(preparation: Preparation, key: str, total: int, number: int, part: Part) -> dict[str, Any]:
    """Tokenises a part, writes it with its statistics, and returns the statistics."""
    source, tokenizer = _opened(preparation, key)
    folder = directory("--output", preparation.output)
    encoder = Encoder(tokenizer, tokenizer.vocab_size)
    record: dict[str, Any] = {
        "key": key,
        "documents": 0,
        "tokens": 0,
        "bytes": 0,
        "empty": 0,
        "skipped": 0,
        "largest": 0,
        "named": [],
    }
    lengths = np.zeros(_BUCKETS, np.int64)
    dtype = np.dtype(tokenizers.token_dtype(tokenizer.vocab_size))
    count = None if part.stop is None else part.stop - part.start
    records = itertools.islice(source.read_chunk(part.chunk, part.start), count)
    with tempfile.TemporaryDirectory(dir=None if is_remote(folder) else os.fspath(folder)) as scratch:
        path = os.path.join(scratch, "part")
        writer = Writer(path, dtype)
        while block := list(itertools.islice(records, _BLOCK)):
            for one, tokens in zip(block, encoder.encode(block), strict=True):
                writer.add(_counted(record, lengths, one, tokens, preparation.bad_records))
        record["batches"] = writer.close()
        record["lengths"] = lengths.tolist()
        # Delete old statistics first: they must never describe another part, even after a crash.
        _record_path(folder, number, total).unlink(missing_ok=True)
        target = folder / _part_name(number, total)
        if is_remote(folder):
            epath.Path(path).copy(target, overwrite=True)
        else:
            os.replace(path, os.fspath(target))
    # Written last: its presence marks the part as complete.
    files.write_atomically(_record_path(folder, number, total), [json.dumps(record)])
    return record


def _counted(
    record: dict[str, Any], lengths: np.ndarray, one: Record, tokens: Tokens | BadRecord, bad_records: str
) -> np.ndarray:
    """Adds a document to a part's statistics and returns its tokens; none if it is bad and bad records are skipped."""
    record["documents"] += 1
    if isinstance(tokens, BadRecord):
        if bad_records == RAISE:
            raise UserError(f"{tokens.where} {tokens.problem}. Fix it, or skip bad records with --bad_records=skip")
        record["skipped"] += 1
        if len(record["named"]) < _NAMED:
            record["named"].append(f"{tokens.where} {tokens.problem}")
        return np.zeros(0, np.uint8)
    assert isinstance(tokens, np.ndarray)  # a store is not prepared again
    record["tokens"] += len(tokens)
    record["bytes"] += 0 if isinstance(one, BadRecord) else len(one.content)
    if len(tokens):
        record["largest"] = max(record["largest"], int(tokens.max()))
        lengths[min(len(tokens).bit_length() - 1, _BUCKETS - 1)] += 1
    else:
        record["empty"] += 1
    return tokens


def _description(
    source: Source, tokenizer: tokenizers.Tokenizer, parts: Sequence[Part], records: Sequence[dict[str, Any]]
) -> Description:
    chunks = [0] * source.num_chunks
    for part, record in zip(parts, records, strict=True):
        chunks[part.chunk] += record["documents"]
    statistics: dict[str, Any] = {
        name: sum(record[name] for record in records) for name in ("documents", "tokens", "bytes", "empty", "skipped")
    }
    statistics["largest"] = max(record["largest"] for record in records)
    statistics["named"] = [text for record in records for text in record["named"]][: _NAMED * 4]
    lengths = np.sum([record["lengths"] for record in records], axis=0)
    statistics["lengths"] = {str(2**n): int(count) for n, count in enumerate(lengths) if count}
    return Description(
        tokenizer=tokenizer.fingerprint(),
        dtype=np.dtype(tokenizers.token_dtype(tokenizer.vocab_size)).name,
        chunks=chunks,
        parts={
            _part_name(number, len(parts)): [Batch(*batch) for batch in record["batches"]]
            for number, record in enumerate(records)
        },
        statistics=statistics,
    )


def _key(preparation: Preparation, source: Source, tokenizer: tokenizers.Tokenizer) -> str:
    """Hash of the files, the settings and the tokenizer; a finished part is kept only if its key matches."""
    documents = preparation.documents
    settings = [
        FORMAT,
        source.fingerprint(),
        tokenizer.fingerprint(),
        [documents.column, documents.kind, documents.separator],
        [preparation.bad_records, preparation.documents_per_part],
    ]
    return short_hash(json.dumps(settings, sort_keys=True, default=str))


def _finished(folder: epath.Path, number: int, total: int, key: str) -> dict[str, Any] | None:
    """Returns the statistics of a part finished earlier with this key, or None."""
    try:
        record = json_values.parse_object(json_values.content_of(_record_path(folder, number, total)))
    except (OSError, ValueError):
        return None
    return record if record.get("key") == key and (folder / _part_name(number, total)).exists() else None


def _part_name(number: int, total: int) -> str:
    return f"tokens-{number:05d}-of-{total:05d}.arrow"


def _record_path(folder: epath.Path, number: int, total: int) -> epath.Path:
    return folder / f"tokens-{number:05d}-of-{total:05d}.json"


class _Progress:
    """Logs finished parts, the rate, and the remaining time."""

    def __init__(self, total: int, before: int):
        self._total, self._done, self._before = total, before, before
        self._tokens = 0
        self._start = self._last = time.monotonic()

    def add(self, record: dict[str, Any]) -> None:
        self._done += 1
        self._tokens += record["tokens"]
        now = time.monotonic()
        if now - self._last < _LINE_EVERY and self._done < self._total:
            return
        self._last = now
        passed = now - self._start
        left = passed / (self._done - self._before) * (self._total - self._done)
        logging.info(
            "%d of %d parts, %s tokens, %s tokens/s, %s left",
            self._done,
            self._total,
            f"{self._tokens:,}",
            f"{self._tokens / max(passed, 1e-9):,.0f}",
            format_seconds(left),
        )
