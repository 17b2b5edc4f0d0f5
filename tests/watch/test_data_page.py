"""`data.html`: the numbers of `--mode=data` on corpora, in a real browser."""

import dataclasses
import html

import pytest
from browser_helpers import chromium, needs_chromium
from page_checks import EVIL, assert_harmless

from spmd_trainer.watch.pages import corpus_summary
from spmd_trainer.watch.pages.corpus_summary import CorpusSummary, SourceSummary

SUMMARY = CorpusSummary(
    sources=(
        SourceSummary("web <b>", "3 files of 15,000 bytes", 0.7, 100, 7_100, 0),
        SourceSummary("code", "1 file of 900 bytes", 0.3, 50, 2_900, 4),
    ),
    seconds=2.0,
    tokens=10_000,
    counted=10_000,
    positions=10_240,
    segments=150,
    lengths={16: 40, 64: 110},
    fills={100: 8, 91: 2},
)


@needs_chromium
@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_page_shows_what_was_measured(tmp_path, dark):
    path = tmp_path / corpus_summary.FILE
    path.write_text(corpus_summary.data_page("lm.Mine", {"train": SUMMARY, "heldout": SUMMARY}, {}))
    with chromium(tmp_path / "profile") as browser:
        page = browser.open(path, width=390, dark=dark)
        assert page.texts("h1") == ["lm.Mine"]
        assert page.texts("section > h2") == ["train", "heldout"]
        assert page.texts(".fact b")[:4] == ["97.7%", "5,000 tokens/s", "150", "4"]
        assert page.texts("tbody th")[:2] == ["web <b>", "code"]
        assert page.texts("tbody tr:nth-child(2) td")[:6] == ["30.00%", "29.00%", "50", "2,900", "58.0", "4"]
        bars = ".pair .card:first-child .bars"
        assert page.evaluate(f"document.querySelector('{bars}').getAttribute('aria-label')") == "16: 40, 32: 0, 64: 110"
        heights = page.evaluate(f"[...document.querySelector('{bars}').children].map(e => e.offsetHeight)")
        assert heights[2] > 2 * heights[0] > 2 * heights[1] == 0
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.errors == []
        assert len(page.requests) == 1


def test_names_of_sources_and_datasets_are_texts():
    sources = (SourceSummary(EVIL, EVIL, 1.0, 100, 7_100, 0),)
    page = corpus_summary.data_page(EVIL, {EVIL: dataclasses.replace(SUMMARY, sources=sources)}, {EVIL: EVIL})
    assert_harmless(page, scripts=0)
    assert page.count(html.escape(EVIL)) == 6


def test_a_corpus_without_rows_has_a_page_too():
    empty = CorpusSummary((), 0.0, 0, 0, 0, 0, {}, {})
    assert "0 tokens" in corpus_summary.data_page("lm.Mine", {"train": empty}, {})
