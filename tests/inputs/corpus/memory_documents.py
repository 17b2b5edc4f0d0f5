"""Documents in memory, and inputs over them, for the tests of the pipeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from praxis import base_hyperparams, pax_fiddle

from spmd_trainer.inputs.corpus import corpus_input
from spmd_trainer.inputs.corpus.documents import BadRecord, Document, Documents, Record
from spmd_trainer.inputs.corpus.file_source import FileSource
from spmd_trainer.inputs.corpus.mixture import Mixture

EOS = 256


@dataclasses.dataclass
class MemoryDocuments(FileSource):
    """Chunks of texts; None is a bad record. Counts what is read."""

    paths = ()
    kind = "jsonl"
    chunks: list[list[bytes | None]]
    by_number: bool = True
    sized: bool = True
    name: str = "m"
    reads: int = 0

    @property
    def num_chunks(self) -> int:
        return len(self.chunks)

    @property
    def random_access(self) -> bool:
        return self.by_number

    @property
    def num_bytes(self) -> int:
        return sum(len(text or b"") for chunk in self.chunks for text in chunk)

    @property
    def size_text(self) -> str:
        return f"{len(self.chunks)} chunks of {self.num_bytes:,} bytes"

    def chunk_sizes(self) -> np.ndarray | None:
        return np.array([len(chunk) for chunk in self.chunks], np.int64) if self.sized else None

    def read_chunk(self, chunk: int, start: int) -> Iterator[Record]:
        for number in range(start, len(self.chunks[chunk])):
            self.reads += 1
            yield self._record(chunk, number)

    def read(self, numbers: np.ndarray) -> list[Record]:
        where = [(c, i) for c, chunk in enumerate(self.chunks) for i in range(len(chunk))]
        self.reads += len(numbers)
        return [self._record(*where[number]) for number in numbers]

    def fingerprint(self) -> dict[str, Any]:
        return {"files": self.size_text}

    def changed_text(self, before: Mapping[str, Any]) -> str:
        return f"{before['files']}, now {self.size_text}"

    def _record(self, chunk: int, number: int) -> Record:
        text, where = self.chunks[chunk][number], f"{self.name}{chunk}:{number + 1}"
        return BadRecord(where, "is broken") if text is None else Document(text, where)


def texts(count: int, *, seed: int = 0, longest: int = 40, letter: bytes = b"") -> list[bytes]:
    """Different texts of 1 to `longest` bytes and a number."""
    rng = np.random.RandomState(seed)
    return [letter + b"%d." % i + bytes(rng.randint(97, 123, rng.randint(longest)).tolist()) for i in range(count)]


def in_chunks(some: list[Any], *sizes: int) -> list[list[Any]]:
    """Divides a list: `sizes` elements in each chunk, and the rest in the last."""
    ends = np.cumsum(sizes)
    return [list(some[end - size : end]) for size, end in zip(sizes, ends, strict=True)] + [list(some[ends[-1] :])]


def documents(chunks: Any, *, by_number: bool = True, sized: bool = True, name: str = "m", **fields: Any) -> Documents:
    """Documents over texts in memory."""
    if chunks and not isinstance(chunks[0], list):
        chunks = [chunks]
    return Documents(files=MemoryDocuments(chunks, by_number and sized, sized, name), **fields)


def make(source: Any, **fields: Any) -> corpus_input.CorpusInput:
    """Builds an input for training, unless the fields say otherwise."""
    defaults = {"seq_len": 16, "batch_size": 2, "window_rows": 8, "is_training": True, "input_random_seed": 3}
    config = pax_fiddle.Config(corpus_input.CorpusInput, source=source, **{**defaults, **fields})
    return base_hyperparams.instantiate(config)


def mixture(**given: Any) -> Mixture:
    """A mixture of {name: (Documents, weight)}; `weigh_by` and the other fields go to `Mixture`."""
    names = [field.name for field in dataclasses.fields(Mixture)]
    settings = {name: given.pop(name) for name in list(given) if name in names}
    return Mixture(given, **settings)


def segments(batches: list[Any]) -> list[bytes]:
    """The labels of every segment, in order, as bytes with end-of-text as a newline."""
    found = []
    for batch in batches:
        for labels, numbers in zip(batch.labels, batch.segment_ids, strict=True):
            for number in range(1, numbers.max() + 1):
                here = labels[numbers == number]
                found.append(np.where(here == EOS, 10, here).astype(np.uint8).tobytes())
    return found
