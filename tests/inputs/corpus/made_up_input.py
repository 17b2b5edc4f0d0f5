"""Measures an input over documents that are made up when they are read. Run by test_corpus_memory.py.

    python made_up_input.py SOURCES DOCUMENTS BY_NUMBER BATCHES

Prints {"before": bytes, "after": bytes, "threads": number, "seconds": to the first batch} as JSON. Memory is what the process
holds before the input is built, and the most that it ever held.
"""

from __future__ import annotations

import json
import pathlib
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from memory_documents import make

from spmd_trainer.inputs.corpus.documents import Document, Documents, Record
from spmd_trainer.inputs.corpus.file_source import FileSource
from spmd_trainer.inputs.corpus.mixture import Mixture

CHUNKS, TEXT = 100, b"What was made up when it was read. " * 120


class MadeUp(FileSource):
    """Documents of 4,200 bytes; only their number is real."""

    paths = ()
    num_chunks = CHUNKS
    random_access = True
    num_bytes = 1
    size_text = "made up"

    def __init__(self, count: int, by_number: bool):
        self._sizes = np.full(CHUNKS, count // CHUNKS, np.int64)
        self.random_access = by_number

    def chunk_sizes(self) -> np.ndarray:
        return self._sizes

    def read_chunk(self, chunk: int, start: int) -> Iterator[Record]:
        for number in range(start, int(self._sizes[chunk])):
            yield self._record(chunk * int(self._sizes[0]) + number)

    def read(self, numbers: np.ndarray) -> list[Record]:
        return [self._record(int(number)) for number in numbers]

    def fingerprint(self) -> dict[str, Any]:
        return {"files": 1}

    def changed_text(self, before: Mapping[str, Any]) -> str:
        return str(before)

    def _record(self, number: int) -> Record:
        return Document(b"%d " % number + TEXT, f"made up {number}")


def memory(entry: str) -> int:
    """Returns the bytes that this process holds ('VmRSS') or the most that it ever held ('VmHWM')."""
    # Not resource.getrusage: its maximum begins with that of the process that started this one.
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(entry)) * 1024


def main() -> None:
    """Measures."""
    sources, count, by_number, batches = map(int, sys.argv[1:])
    before = memory("VmRSS")
    began = time.perf_counter()
    given = {f"s{i}": (Documents(MadeUp(count, bool(by_number))), 1.0) for i in range(sources)}
    source = make(Mixture(given), seq_len=1024, window_rows=None, batch_size=8)
    source.get_next()
    seconds = time.perf_counter() - began
    for _ in range(batches):
        source.get_next()
    after = memory("VmHWM")
    threads = threading.active_count()
    sys.stdout.write(json.dumps({"before": before, "after": after, "threads": threads, "seconds": seconds}))


if __name__ == "__main__":
    main()
