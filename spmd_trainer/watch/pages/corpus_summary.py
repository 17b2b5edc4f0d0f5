"""What `--mode=data` says about a `CorpusInput`: rate, fill, and the shares of its sources, from its first windows."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import numpy as np

from spmd_trainer.inputs.corpus.corpus_input import CorpusInput
from spmd_trainer.sharding.messages import count_text, table_lines

# Reading ends after this many batches, or seconds.
_BATCHES, _SECONDS = 200, 10.0
# Lengths are counted in buckets of 2^n to 2^(n+1) - 1 tokens.
_BUCKETS = 24


@dataclasses.dataclass(frozen=True)
class SourceSummary:
    """One source of an input, as far as it was read.

    Attributes:
      name: its name in the mixture.
      size_text: what it is: '3 files of 15,000 bytes'.
      wanted: its share of the mixture.
      documents, tokens: how many were read.
      skipped: bad records that were left out.
    """

    name: str
    size_text: str
    wanted: float
    documents: int
    tokens: int
    skipped: int


@dataclasses.dataclass(frozen=True)
class CorpusSummary:
    """What was measured.

    Attributes:
      sources: the sources, in order.
      seconds: how long reading took.
      tokens: tokens in the rows that were given.
      positions: positions of these rows.
      segments: segments of these rows.
      lengths: {2^n: segments of 2^n to 2^(n+1) - 1 tokens}.
      fills: {percent: rows with so many percent of their positions filled, rounded down}.
    """

    sources: tuple[SourceSummary, ...]
    seconds: float
    tokens: int
    positions: int
    segments: int
    lengths: dict[int, int]
    fills: dict[int, int]


def measure(source: CorpusInput) -> CorpusSummary:
    """Reads an input from its beginning, and leaves it there.

    Args:
      source: the input.

    Raises:
      UserError: a source can't be read, or has a bad record and these are errors.
    """
    source.reset()
    lengths, fills = np.zeros(_BUCKETS, np.int64), np.zeros(101, np.int64)
    tokens = positions = segments = 0
    began = time.monotonic()
    for _ in range(_BATCHES):
        try:
            batch = source.get_next()
        except StopIteration:
            break
        ids = np.asarray(batch.segment_ids)
        ids = ids[ids.any(axis=1)]
        filled = np.count_nonzero(ids, axis=1)
        tokens, positions = tokens + int(filled.sum()), positions + ids.size
        np.add.at(fills, 100 * filled // max(1, ids.shape[1]), 1)
        for row in ids:
            of_row = np.bincount(row[row > 0])[1:]
            segments += len(of_row)
            np.add.at(lengths, np.minimum(np.log2(of_row).astype(np.int64), _BUCKETS - 1), 1)
        if time.monotonic() - began > _SECONDS:
            break
    seconds = time.monotonic() - began
    read = zip(
        source.sources, source.documents_of.values(), source.tokens_of.values(), source.skipped.values(), strict=True
    )
    summary = CorpusSummary(
        sources=tuple(
            SourceSummary(one.name, one.source.size_text, one.share, documents, of_source, skipped)
            for one, documents, of_source, skipped in read
        ),
        seconds=seconds,
        tokens=tokens,
        positions=positions,
        segments=segments,
        lengths={2**n: int(count) for n, count in enumerate(lengths) if count},
        fills={n: int(count) for n, count in enumerate(fills) if count},
    )
    source.reset()
    return summary


def lines(found: CorpusSummary) -> Iterator[str]:
    """Yields the summary as text: a line for all, and a table of the sources."""
    if not found.positions:
        return
    yield (
        f"read for {found.seconds:.1f} s: {found.tokens:,} tokens ({found.tokens / max(found.seconds, 1e-9):,.0f} per second), "
        f"{found.tokens / found.positions:.1%} of the positions filled, {count_text(found.segments, 'segment')} of "
        f"{found.tokens / max(1, found.segments):.0f} tokens on average"
    )
    all_tokens = sum(one.tokens for one in found.sources) or 1
    header = (
        "source",
        "share",
        "of tokens",
        "documents",
        "tokens",
        "tokens/document",
        "left out",
        "files",
    )
    cells = [
        (
            one.name,
            f"{one.wanted:.2%}",
            f"{one.tokens / all_tokens:.2%}",
            f"{one.documents:,}",
            f"{one.tokens:,}",
            f"{one.tokens / max(1, one.documents):.1f}",
            f"{one.skipped:,}",
            one.size_text,
        )
        for one in found.sources
    ]
    yield from table_lines([header, *cells], right=range(1, len(header) - 1))
