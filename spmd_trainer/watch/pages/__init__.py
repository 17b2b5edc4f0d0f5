"""Self-contained HTML pages: their shared parts, the page of one or more runs, and the page of data.

page.css, page.js           shared by all pages: the look, HTML elements and the formatting of numbers
run_page.py                 the page of runs; its parts are run_page.html, run_page.css, run_curves.js, run_parts.js, run_page.js
run_reader.py               reads the data of one run for that page; run_facts.py computes the numbers at the top of the page
run_scalars.py              reads a run's scalars, also during training, and thins them; run_charts.py chooses the curves
run_texts.py                reads decoded texts, and the warnings in the logs
page_mode.py                `--mode=page`: writes the page of runs, or serves it while a run trains
show_data.py                `--mode=data`: shows rows of each dataset; corpus_summary.py measures corpora, and writes their page
vendor/                     uPlot, which draws the curves
"""

import html

from spmd_trainer.sharding import page


def shared(name: str) -> str:
    """Returns the text of a file in this package, e.g. 'page.css', the style sheet that the pages share."""
    return page.asset(__package__, name)


def fact(name: str, value: str, note: str, tone: str = "") -> str:
    """Returns the HTML of a number at the top of a page, with its name and a note. `tone`: 'good', 'bad' or ''."""
    return (
        f'<div class="fact {tone}"><span>{html.escape(name)}</span><b>{html.escape(value)}</b>'
        f"<small>{html.escape(note)}</small></div>"
    )
