"""What `--mode=data` found out about corpora as a self-contained page, `data.html`."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from spmd_trainer.sharding import page
from spmd_trainer.watch.pages import shared
from spmd_trainer.watch.pages.corpus_summary import CorpusSummary, SourceSummary

FILE = "data.html"
_STYLE = """
.bars { display: flex; align-items: flex-end; gap: 2px; height: 150px; margin: 10px 0 0; border-bottom: 1px solid var(--soft); }
.bars div { flex: 1 1 0; min-width: 0; background: var(--accent); border-radius: 3px 3px 0 0; }
.ticks { display: flex; gap: 2px; margin: 3px 0 0; color: var(--soft); font-size: 11.5px; font-variant-numeric: tabular-nums; }
.ticks span { flex: 1 1 0; min-width: 0; overflow: visible; white-space: nowrap; text-align: center; }
.scroll { overflow-x: auto; }
.scroll table { min-width: 820px; }
section > h2 { margin: 22px 0 8px; font-size: 17px; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 14px; }
.share { display: block; height: 5px; margin: 3px 0 0; background: var(--line); border-radius: 2px; }
.share i { display: block; height: 5px; background: var(--accent); border-radius: 2px; }
"""
# Labels that fit below a histogram on a phone.
_MOST_TICKS = 8


def data_page(experiment: str, found: Mapping[str, CorpusSummary]) -> str:
    """Returns the page.

    Args:
      experiment: its name.
      found: {name of the dataset: what was measured}.
    """
    datasets = "".join(_dataset(name, summary) for name, summary in found.items())
    head = f'<header><p class="kicker">Data</p><h1>{html.escape(experiment)}</h1></header>'
    return page.document(
        f"{experiment}: data", f"{head}\n<main>\n{datasets}</main>\n", styles=(shared("page.css"), _STYLE)
    )


def _dataset(name: str, found: CorpusSummary) -> str:
    facts = [
        ("Positions filled", f"{found.tokens / max(1, found.positions):.1%}", f"{found.tokens:,} tokens"),
        (
            "Reading",
            f"{found.tokens / max(found.seconds, 1e-9):,.0f} tokens/s",
            f"for {found.seconds:.1f} s, in one process",
        ),
        ("Segments", f"{found.segments:,}", f"{found.tokens / max(1, found.segments):,.0f} tokens on average"),
        ("Left out", f"{sum(one.skipped for one in found.sources):,}", "bad records"),
    ]
    cards = "".join(
        f'<div class="fact"><span>{title}</span><b>{value}</b><small>{note}</small></div>'
        for title, value, note in facts
    )
    lengths = [(f"{length:,}", count) for length, count in _between(found.lengths)]
    fills = _tenths(found.fills)
    return (
        f'<section><h2>{html.escape(name)}</h2><div class="facts">{cards}</div>'
        f'<div class="card scroll"><h2>Sources</h2>{_sources(found.sources)}</div><div class="pair">'
        f'<div class="card"><h2>Segments by length</h2>{_histogram(lengths, "segments")}'
        '<p class="note">tokens: each bar from its number to the next</p></div>'
        f'<div class="card"><h2>Rows by filled positions</h2>{_histogram(fills, "rows")}'
        '<p class="note">percent of the positions of a row: each bar from its number to the next</p></div></div></section>'
    )


def _sources(sources: Sequence[SourceSummary]) -> str:
    tokens = sum(one.tokens for one in sources) or 1
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
    for one in sources:
        share = one.tokens / tokens
        cells = [
            f"{one.wanted:.2%}",
            f'{share:.2%}<span class="share"><i style="width:{100 * share:.1f}%"></i></span>',
            f"{one.documents:,}",
            f"{one.tokens:,}",
            f"{one.tokens / max(1, one.documents):,.1f}",
            f"{one.skipped:,}",
        ]
        rows.append(
            f'<tr><th scope="row">{html.escape(one.name)}</th>'
            + "".join(f'<td class="num">{cell}</td>' for cell in cells)
            + f"<td>{html.escape(one.size_text)}</td></tr>"
        )
    return f"<table><thead><tr>{header}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _histogram(bars: Sequence[tuple[str, int]], what: str) -> str:
    """Returns a histogram of (label, count); a text that names all of it stands for it where it can't be seen."""
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


def _between(lengths: Mapping[int, int]) -> list[tuple[int, int]]:
    """Returns the counts of all powers of two from the smallest to the largest, those without a segment too."""
    if not lengths:
        return []
    length, found = min(lengths), []
    while length <= max(lengths):
        found.append((length, lengths.get(length, 0)))
        length *= 2
    return found


def _tenths(fills: Mapping[int, int]) -> list[tuple[str, int]]:
    """Returns the rows by tenths of filled positions; full rows are a bar of their own."""
    counts = [0] * 11
    for percent, count in fills.items():
        counts[percent // 10] += count
    return [(f"{10 * n}" if n == 10 else f"{10 * n}+", count) for n, count in enumerate(counts)]
