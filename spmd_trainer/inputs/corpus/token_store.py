"""Token stores: tokenized documents in Arrow files, which `--mode=tokenise` writes and inputs read by byte ranges.

A store is a folder of parts and a file `corpus.json`. A part is an Arrow IPC file with the columns `tokens` (lists of uint16
or uint32) and `bytes` (int32, the size of the text in bytes). For conversations and preference pairs, a third column `counted`
(lists of booleans) marks the tokens that count toward the loss. `corpus.json` has, for each record batch, the numbers of
documents and tokens, and the byte offsets of the columns in the part's file.

An Arrow file stores the tokens of a record batch contiguously, so any part of a document is a byte range, also in object
stores. Any Arrow library can read the files.

Documents are numbered as in the original source, so each shuffle gives the same order. A document without text has no tokens.
A bad record that was left out has no tokens either, and its `bytes` is -1 minus its size.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import files as input_files
from spmd_trainer.inputs.corpus.documents import Document, LeftOut, Processor, Record
from spmd_trainer.inputs.corpus.file_source import FileSource
from spmd_trainer.inputs.corpus.tokens import StoredTokens
from spmd_trainer.inputs.shards import LRUCache, OpenFiles, ShardIndex
from spmd_trainer.storage import is_remote, json_values, reading
from spmd_trainer.storage.local_copies import cached_index

DESCRIPTION_FILE = "corpus.json"
FORMAT = 2
# In order: number of documents whose lengths are read at a time. By number: lengths this near each other are read together.
_BLOCK, _NEAR = 1024, 256
# Ranges that are this near each other are read in one request of an object store; see `_together`.
_NEAR_BYTES = 2**16
_REQUESTS = 32
# Number of parts of a remote store whose document lengths are kept in memory.
_HELD = 64


class Batch(NamedTuple):
    """Description of one record batch in a part of a token store. The byte offsets count from the beginning of the part's file.

    Attributes:
      documents: number of documents.
      tokens: number of tokens of all documents.
      offsets_at: byte offset of the array of document boundaries, little-endian int32 [documents + 1]: document i has the
        tokens from entry i to entry i + 1.
      tokens_at: byte offset of the tokens.
      sizes_at: byte offset of the column `bytes`, the sizes of the texts: little-endian int32 [documents].
      counted_at: byte offset of a bit mask, lowest bit first, of the tokens that count toward the loss; None: all tokens do.
    """

    documents: int
    tokens: int
    offsets_at: int
    tokens_at: int
    sizes_at: int
    counted_at: int | None = None


@dataclasses.dataclass(frozen=True)
class Description:
    """Content of a token store's `corpus.json`.

    Attributes:
      tokenizer: fingerprint of the tokenizer.
      dtype: dtype of the tokens, 'uint16' or 'uint32'.
      chunks: number of documents in each chunk of the original source.
      parts: {file name of the part: its record batches}, in order.
      statistics: numbers of documents, tokens, bytes and skipped records; histogram of document lengths; largest token id.
      processor: fingerprint of the processor; None for plain text.
    """

    tokenizer: dict[str, Any]
    dtype: str
    chunks: list[int]
    parts: dict[str, list[Batch]]
    statistics: dict[str, Any]
    processor: dict[str, Any] | None = None

    def lines(self) -> list[str]:
        """Returns the lines of `corpus.json`. Omits `processor` and `Batch.counted_at` if they are None."""
        parts = {name: [[n for n in one if n is not None] for one in batches] for name, batches in self.parts.items()}
        content = {"format": FORMAT, **dataclasses.asdict(self), "parts": parts}
        return json.dumps({name: value for name, value in content.items() if value is not None}).splitlines()

    @classmethod
    def read(cls, folder: str) -> Description:
        """Reads the `corpus.json` in a folder.

        Raises:
          UserError: the file is missing, has another format, or is damaged; the message names the file and the wrong entries.
        """
        path = os.path.join(folder, DESCRIPTION_FILE)
        try:
            found = json_values.parse_object(json_values.content_of(path))
        except OSError as error:
            raise UserError(
                f"{path} can't be read: {reading.problem(path, error)}{input_files.nearby_names(path)}. "
                "--mode=tokenise writes it when all documents are tokenised; if it was stopped, run it again"
            ) from error
        except ValueError as error:
            raise UserError(f"{path} is not JSON that can be read: {error}. Prepare the corpus again") from error
        if found.get("format") != FORMAT:
            raise UserError(f"{path} is not of format {FORMAT} of prepared corpora; prepare the corpus again")
        if wrong := [name for name, is_right in _CHECKS.items() if not is_right(found.get(name))]:
            listed = ", ".join(f"{name} is {found.get(name)!r:.100}" for name in wrong)
            raise UserError(f"{path} is damaged: {listed}; prepare the corpus again")
        parts = {name: [Batch(*one) for one in batches] for name, batches in found["parts"].items()}
        others = (found["statistics"], found.get("processor"))
        return cls(found["tokenizer"], found["dtype"], found["chunks"], parts, *others)


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, int) and 0 <= one < 2**63 for one in value)


def _are_parts(value: object) -> bool:
    sizes = (len(Batch._fields) - 1, len(Batch._fields))
    return isinstance(value, dict) and all(
        isinstance(batches, list) and all(_are_counts(one) and len(one) in sizes for one in batches)
        for batches in value.values()
    )


# For each entry of `corpus.json` that is read: a function that returns True for a valid value.
_CHECKS: dict[str, Callable[[Any], bool]] = {
    "tokenizer": lambda value: isinstance(value, dict),
    "dtype": lambda value: value in ("uint16", "uint32"),
    "chunks": _are_counts,
    "parts": _are_parts,
    "statistics": lambda value: isinstance(value, dict) and _are_counts([value.get("tokens"), value.get("largest")]),
    "processor": lambda value: value is None or isinstance(value, dict),
}


class TokenStore(FileSource):
    """Source of the documents of a token store. Its methods read only the documents' lengths; `tokens.fetch` reads tokens.

    Attributes:
      description: the store's `corpus.json`.
      dtype: dtype of the tokens.
    """

    kind = "tokens"
    random_access = True
    shards: ShardIndex

    def __init__(self, folder: str, *, names_left_out: bool = False):
        """Reads the `corpus.json` of a store.

        Args:
          folder: local, gs:// or s3:// folder of the store.
          names_left_out: True reads a record that was left out as a `LeftOut`; False reads it as an empty document.

        Raises:
          UserError: the folder is not a token store, or a file is missing or has other documents than `corpus.json` says.
        """
        self.description = Description.read(folder)
        self._folder, self._names_left_out = folder, names_left_out
        super().__init__([os.path.join(folder, name) for name in self.description.parts])
        self.dtype = np.dtype(self.description.dtype)
        self.shards = ShardIndex(self.description.chunks)
        self._files = OpenFiles(self.paths, self.sizes)
        self._batches = [
            (part, batch) for part, batches in enumerate(self.description.parts.values()) for batch in batches
        ]
        self._numbers = ShardIndex([batch.documents for _, batch in self._batches])
        # The document lengths of remote parts, the versions of these parts, and where the lengths of each record batch begin.
        self._ends: LRUCache[np.ndarray] = LRUCache(_HELD)
        self._versions: dict[int, str] = {}
        self._ends_at = [
            begin
            for batches in self.description.parts.values()
            for begin in np.cumsum([0, *(batch.documents + 1 for batch in batches)])[:-1].tolist()
        ]
        if len(self._numbers) != len(self.shards):
            raise UserError(
                f"{folder} holds {len(self._numbers):,} documents, and {DESCRIPTION_FILE} says {len(self.shards):,}; prepare the "
                "corpus again"
            )
        for part, batch in self._batches:
            if batch.tokens_at + batch.tokens * self.dtype.itemsize > self.sizes[part]:
                raise UserError(f"{self.paths[part]} is cut short; prepare the corpus again")

    @property
    def num_chunks(self) -> int:
        return len(self.description.chunks)

    @property
    def size_text(self) -> str:
        return f"{self.description.statistics['tokens']:,} tokens of {len(self.shards):,} documents"

    @property
    def largest(self) -> int:
        return int(self.description.statistics["largest"])

    def check_made_by(self, tokenizer: Mapping[str, Any], processor: Processor | None) -> None:
        """Checks that the store was made with an input's tokenizer (given as its fingerprint) and processor.

        Raises:
          UserError: the store was made with a different tokenizer or processor; the message lists the differences.
        """
        made, now = self.description.processor or {}, {} if processor is None else processor.fingerprint()
        for what, before, after in (("tokenizer", self.description.tokenizer, tokenizer), ("processor", made, now)):
            if different := [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]:
                how = ", ".join(f"{key} was {before.get(key)} and is {after.get(key)}" for key in different)
                raise UserError(
                    f"{self._folder} was tokenised by another {what}: {how}. Use the same {what}, or prepare the corpus again"
                )

    def read(self, numbers: np.ndarray) -> list[Record]:
        found: dict[int, Record] = {}
        for number, places, inside in self._numbers.split(numbers):
            width = self.dtype.itemsize
            for place, one, start, end in zip(
                places.tolist(), inside.tolist(), *self._spans(number, inside), strict=True
            ):
                content = StoredTokens(self, number, start, end - start, width * (end - start))
                found[place] = self._record(number, one, content)
        return [found[place] for place in range(len(numbers))]

    def read_chunk(self, chunk: int, start: int) -> Iterator[Record]:
        first, end = self.shards.span(chunk)
        for begin in range(first + start, end, _BLOCK):
            for number, _, inside in self._numbers.split(np.arange(begin, min(begin + _BLOCK, end))):
                sizes = self._sizes(number, int(inside[0]), len(inside)).tolist()
                for one, size, start, stop in zip(inside.tolist(), sizes, *self._spans(number, inside), strict=True):
                    yield self._record(number, one, StoredTokens(self, number, start, stop - start, size), size)

    def _record(self, number: int, inside: int, content: StoredTokens, size: int | None = None) -> Record:
        """Returns document number `inside` of record batch `number`. `size`: its entry in the column `bytes`, if known."""
        where = f"{self.paths[self._batches[number][0]]} document {self._numbers.span(number)[0] + inside}"
        if self._names_left_out and not len(content):
            size = int(self._sizes(number, inside, 1)[0]) if size is None else size
            if size < 0:
                return LeftOut(where, "was left out when the corpus was tokenised", -1 - size)
        return Document(content, where)

    def _sizes(self, number: int, start: int, count: int) -> np.ndarray:
        part, batch = self._batches[number]
        at = batch.sizes_at + 4 * start
        return np.frombuffer(self._files.read(part, at, at + 4 * count), "<i4")

    def _spans(self, number: int, inside: np.ndarray) -> tuple[list[int], list[int]]:
        """Returns where the tokens of each document start and end in record batch `number`.

        `inside`: the documents' numbers in the batch.
        """
        order = np.sort(inside)
        starts: dict[int, int] = {}
        ends: dict[int, int] = {}
        for run in np.split(order, np.flatnonzero(np.diff(order) > _NEAR) + 1):
            first, last = int(run[0]), int(run[-1])
            found = self._read_ends(number, first, last + 2)
            starts |= dict(zip(run.tolist(), found[run - first].tolist(), strict=True))
            ends |= dict(zip(run.tolist(), found[run - first + 1].tolist(), strict=True))
        part, batch = self._batches[number]
        for one in inside.tolist():
            if not 0 <= starts[one] <= ends[one] <= batch.tokens:
                raise UserError(
                    f"{self.paths[part]} is damaged: document {one} of a batch has tokens {starts[one]} to {ends[one]}"
                )
        return [starts[one] for one in inside.tolist()], [ends[one] for one in inside.tolist()]

    def _read_ends(self, number: int, start: int, stop: int) -> np.ndarray:
        """Returns token offsets `start` to `stop` of a record batch. Offset 0 is 0; offset n + 1 is the end of document n."""
        part, batch = self._batches[number]
        if not is_remote(self.paths[part]):
            content = self._files.read(part, batch.offsets_at + 4 * start, batch.offsets_at + 4 * stop)
            return np.frombuffer(content, "<i4")
        begin = self._ends_at[number]
        return self._ends.get(part, self._all_ends)[begin + start : begin + stop]

    def _all_ends(self, part: int) -> np.ndarray:
        """Returns the token offsets of the documents in a remote part, one record batch after another, int32.

        Reads all offsets at once and keeps them in the local cache, because a shuffle would send a request for each offset.
        """
        batches = [batch for of, batch in self._batches if of == part]

        def read() -> np.ndarray:
            spans = [(batch.offsets_at, batch.offsets_at + 4 * (batch.documents + 1)) for batch in batches]
            found = [self._files.read(part, start, stop) for start, stop in spans]
            return np.frombuffer(b"".join(found), "<i4")

        path = self.paths[part]
        with input_files.readable(path):
            if part not in self._versions:  # asking the object store takes longer than opening the index again
                self._versions[part] = reading.version(path)
            return cached_index(path, "token-ends", read, version=self._versions[part])

    def fetch(self, ranges: Sequence[tuple[int, int, int]]) -> list[np.ndarray]:
        """Returns the tokens `start` to `stop` of record batch `number`, for each (number, start, stop) in `ranges`."""
        width, dtype = self.dtype.itemsize, self.dtype.newbyteorder("<")
        spans = []
        for number, start, stop in ranges:
            part, batch = self._batches[number]
            spans.append((part, batch.tokens_at + width * start, batch.tokens_at + width * stop))
        return [np.frombuffer(content, dtype) for content in self._contents(spans)]

    def fetch_counted(self, ranges: Sequence[tuple[int, int, int]]) -> list[np.ndarray]:
        """For each range of `fetch`, returns a mask of the tokens that count toward the loss, bool [n]."""
        spans = []
        for number, start, stop in ranges:
            part, batch = self._batches[number]
            at = batch.counted_at
            spans.append((part, 0, 0) if at is None else (part, at + start // 8, at + -(-stop // 8)))
        found = []
        for content, (_, start, stop) in zip(self._contents(spans), ranges, strict=True):
            bits = np.unpackbits(np.frombuffer(content, np.uint8), bitorder="little")[start % 8 :][: stop - start]
            found.append(bits.astype(bool) if content else np.ones(stop - start, bool))
        return found

    def _contents(self, spans: Sequence[tuple[int, int, int]]) -> list[memoryview]:
        """Returns the bytes `start` to `stop` of part `part`, for each (part, start, stop) in `spans`."""
        requests = _together(spans, _NEAR_BYTES if is_remote(self._folder) else 0)

        def read(places: list[int]) -> tuple[int, bytes]:
            part, start, _ = spans[places[0]]
            return start, self._files.read(part, start, max(spans[place][2] for place in places))

        if is_remote(self._folder) and len(requests) > 1:
            with concurrent.futures.ThreadPoolExecutor(min(_REQUESTS, len(requests))) as pool:
                contents = list(pool.map(read, requests))
        else:
            contents = list(map(read, requests))
        found: dict[int, memoryview] = {}
        for places, (first, content) in zip(requests, contents, strict=True):
            for place in places:
                _, start, stop = spans[place]
                found[place] = memoryview(content)[start - first : stop - first]
        return [found[place] for place in range(len(spans))]


def _together(spans: Sequence[tuple[int, int, int]], near: int) -> list[list[int]]:
    """Groups byte ranges (file, start, stop) into requests. Returns the indices in `spans` of each request's ranges.

    Ranges share a request if the gap between them is at most `near` bytes, and at most a quarter of the bytes that are wanted.
    """
    found: list[list[int]] = []
    file, end, wanted = -1, 0, 0
    for place in sorted(range(len(spans)), key=spans.__getitem__):
        part, start, stop = spans[place]
        if found and part == file and start - end <= min(near, (wanted + stop - start) // 4):
            found[-1].append(place)
            end, wanted = max(end, stop), wanted + stop - start
        else:
            found.append([place])
            file, end, wanted = part, stop, stop - start
    return found
