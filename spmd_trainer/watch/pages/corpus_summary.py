"""Summary of a `CorpusInput`'s first batches, for `--mode=data`: reading rate, share of filled positions, sources' shares.

Inputs of conversations and of preference pairs are `CorpusInput`s too. The summary is printed; `data.html` is a self-contained
page of all corpora of an experiment.
"""

from __future__ import annotations

import dataclasses
import html
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from spmd_trainer.inputs.corpus.corpus_input import CorpusInput
from spmd_trainer.sharding import page
from spmd_trainer.sharding.messages import count_text, table_lines
from spmd_trainer.watch.pages import fact, shared

# Reading ends after this many batches, or seconds.
_BATCHES, _SECONDS = 200, 10.0
# Lengths are counted in buckets of 2^n to 2^(n+1) - 1 tokens.
_BUCKETS = 24
FILE = "data.html"
# Maximum number of labels below a histogram, so that they fit on a phone.
_MOST_TICKS = 8


@dataclasses.dataclass(frozen=True)
class SourceSummary:
    """What was read from one source of a corpus.

    Attributes:
      size_text: size of the whole source as text, e.g. '3 files of 15,000 bytes'.
      wanted: the source's configured share of the mixture; its initial share if that changes during training.
      documents, tokens: number of documents and tokens that were read.
      skipped: number of bad records that were left out.
    """

    name: str
    size_text: str
    wanted: float
    documents: int
    tokens: int
    skipped: int


@dataclasses.dataclass(frozen=True)
class CorpusSummary:
    """Measurements of the first batches of an input.

    Attributes:
      seconds: seconds that reading took.
      tokens: number of tokens in the rows that were read.
      counted: number of these tokens that count in the loss.
      positions: number of positions in these rows, filled or not.
      segments: number of segments in these rows.
      lengths: {2^n: number of segments of 2^n to 2^(n+1) - 1 tokens}.
      fills: {percentage of filled positions, rounded down: number of rows}.
    """

    sources: tuple[SourceSummary, ...]
    seconds: float
    tokens: int
    counted: int
    positions: int
    segments: int
    lengths: dict[int, int]
    fills: dict[int, int]

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def mean_length(self) -> float:
        """Tokens per segment."""
        return self.tokens / max(1, self.segments)


def measure(source: CorpusInput) -> CorpusSummary:
    """Measures an input from its beginning, for at most 200 batches or 10 seconds, and resets it to its beginning.

    Raises:
      UserError: a source can't be read, or has a bad record and the input's settings treat bad records as errors.
    """
    source.reset()
    lengths, fills = np.zeros(_BUCKETS, np.int64), np.zeros(101, np.int64)
    tokens = counted = positions = segments = 0
    began = time.monotonic()
    for _ in range(_BATCHES):
        try:
            batch = source.get_next()
        except StopIteration:
            break
        parts = [batch.chosen, batch.rejected] if "chosen" in batch else [batch]
        ids, weights = (
            np.concatenate([np.asarray(part[name]) for part in parts]) for name in ("segment_ids", "weights")
        )
        ids, counted = ids[ids.any(axis=1)], counted + int(np.count_nonzero(weights))
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
            SourceSummary(one.name, one.source.size_text, one.first_share, documents, of_source, skipped)
            for one, documents, of_source, skipped in read
        ),
        seconds=seconds,
        tokens=tokens,
        counted=counted,
        positions=positions,
        segments=segments,
        lengths={2**n: int(count) for n, count in enumerate(lengths) if count},
        fills={n: int(count) for n, count in enumerate(fills) if count},
    )
    source.reset()
    return summary


def lines(found: CorpusSummary) -> Iterator[str]:
    """Yields the lines of the summary: one about the whole corpus, and a table of its sources."""
    if not found.positions:
        return
    yield (
        f"read for {found.seconds:.1f} s: {found.tokens:,} tokens ({found.rate:,.0f} per second), "
        f"{found.tokens / found.positions:.1%} of the positions filled, {count_text(found.segments, 'segment')} of "
        f"{found.mean_length:.0f} tokens on average"
        + (f"; {found.counted / found.tokens:.1%} of the labels count" if found.counted < found.tokens else "")
    )
    header = ("source", "share", "of tokens", "documents", "tokens", "tokens/document", "left out", "files")
    yield from table_lines([header, *_cells(found)], right=range(1, len(header) - 1))


def _cells(found: CorpusSummary) -> list[tuple[str, ...]]:
    all_tokens = sum(one.tokens for one in found.sources) or 1
    return [
        (
            one.name,
            f"{one.wanted:.2%}",
            f"{one.tokens / all_tokens:.2%}",
            f"{one.documents:,}",
            f"{one.tokens:,}",
            f"{one.tokens / max(1, one.documents):,.1f}",
            f"{one.skipped:,}",
            one.size_text,
        )
        for one in found.sources
    ]


def data_page(experiment: str, found: Mapping[str, CorpusSummary], rows: Mapping[str, str]) -> str:
    """Returns the HTML page of an experiment's corpora.

    Args:
      found: the measurements of each dataset, by name.
      rows: the first rows of each dataset as text.
    """
    datasets = "".join(_dataset(name, summary, rows.get(name, "")) for name, summary in found.items())
    head = f'<header><p class="kicker">Data</p><h1>{html.escape(experiment)}</h1></header>'
    return page.document(
        f"{experiment}: data", f"{head}\n<main>\n{datasets}</main>\n", styles=map(shared, ("page.css", "data_page.css"))
    )


def _dataset(name: str, found: CorpusSummary, rows: str) -> str:
    cards = "".join(
        (
            fact("Positions filled", f"{found.tokens / max(1, found.positions):.1%}", f"{found.tokens:,} tokens"),
            fact("Reading", f"{found.rate:,.0f} tokens/s", f"for {found.seconds:.1f} s, in one process"),
            fact("Segments", f"{found.segments:,}", f"{found.mean_length:,.0f} tokens on average"),
            fact("Left out", f"{sum(one.skipped for one in found.sources):,}", "bad records"),
        )
    )
    # All powers of two from the smallest to the largest, those without a segment too.
    powers = range(min(found.lengths, default=1).bit_length() - 1, max(found.lengths, default=0).bit_length())
    lengths = [(f"{2**n:,}", found.lengths.get(2**n, 0)) for n in powers]
    tenths = [0] * 11  # full rows are a bar of their own
    for percent, count in found.fills.items():
        tenths[percent // 10] += count
    fills = [(f"{10 * n}" if n == 10 else f"{10 * n}+", count) for n, count in enumerate(tenths)]
    text = (
        '<div class="card"><h2>First rows</h2><p class="note">Labels that count in the loss are in brackets.</p>'
        f'<pre class="mono rows">{html.escape(rows)}</pre></div>'
        if rows
        else ""
    )
    return (
        f'<section><h2>{html.escape(name)}</h2><div class="facts">{cards}</div>{text}'
        f'<div class="card scroll"><h2>Sources</h2>{_sources(found)}</div><div class="pair">'
        f'<div class="card"><h2>Segments by length</h2>{_histogram(lengths, "segments")}'
        '<p class="note">tokens: each bar from its number to the next</p></div>'
        f'<div class="card"><h2>Rows by filled positions</h2>{_histogram(fills, "rows")}'
        '<p class="note">percent of the positions of a row: each bar from its number to the next</p></div></div></section>'
    )


def _sources(found: CorpusSummary) -> str:
    names = (
        "Source",
        "Share wanted",
        "Share of tokens",
        "Documents",
        "Tokens",
        "Tokens per document",
        "Left out",
        "Files",
    )
    header = "".join(
        f'<th scope="col"{"" if name in ("Source", "Files") else " class=num"}>{name}</th>' for name in names
    )
    rows = []
    for name, wanted, share, *numbers, files in _cells(found):
        bar = f'{share}<span class="share"><i style="width:{share}"></i></span>'
        cells = "".join(f'<td class="num">{cell}</td>' for cell in (wanted, bar, *numbers))
        rows.append(f'<tr><th scope="row">{html.escape(name)}</th>{cells}<td>{html.escape(files)}</td></tr>')
    return f"<table><thead><tr>{header}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _histogram(bars: Sequence[tuple[str, int]], what: str) -> str:
    """Returns the HTML of a histogram with (label, count) `bars`, and a text for screen readers. `what`: unit of the counts."""
    most = max((count for _, count in bars), default=0) or 1
    every = -(-len(bars) // _MOST_TICKS)
    spoken = ", ".join(f"{label}: {count:,}" for label, count in bars)
    columns = "".join(
        f'<div style="height:{100 * count / most:.2f}%" title="{label}: {count:,} {what}"></div>'
        for label, count in bars
    )
    ticks = "".join(f"<span>{label if n % every == 0 else ''}</span>" for n, (label, _) in enumerate(bars))
    return (
        f'<div class="bars" role="img" aria-label="{html.escape(spoken)}">{columns}</div>'
        f'<div class="ticks" aria-hidden="true">{ticks}</div>'
    )
