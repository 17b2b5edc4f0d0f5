"""Builds self-contained HTML pages: puts a page's body into a document, with styles, scripts and data inlined."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import importlib.resources
import json
import re
from collections.abc import Iterable, Mapping

_MARK = re.compile(r"__PAGE_(\w+?)__")
# Characters that could end the script element that holds the data. `json.dumps` escapes all non-ASCII characters.
_UNSAFE = str.maketrans({char: f"\\u{ord(char):04x}" for char in "<>&"})
_START = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="__POLICY__">
<link rel="icon" href="data:,">
"""
# Allows only the page's own scripts and style sheets, by their hashes. If text from a run became HTML, it could neither run
# scripts nor load anything. Style attributes are allowed because the scripts draw with them; images are inlined.
_POLICY = (
    "default-src 'none'; script-src {scripts}; style-src {styles}; style-src-attr 'unsafe-inline'; img-src data:; "
    "connect-src {server}; base-uri 'none'; form-action 'none'"
)


@functools.cache
def asset(package: str, name: str) -> str:
    """Returns the text of a package's data file."""
    return importlib.resources.files(package).joinpath(name).read_text(encoding="utf-8")


def document(
    title: str,
    body: str,
    *,
    styles: Iterable[str],
    data: object = None,
    scripts: Iterable[str] = (),
    libraries: Iterable[str] = (),
    asks_server: bool = False,
) -> str:
    """Returns an HTML page whose Content-Security-Policy allows only the scripts and style sheets given as arguments.

    Args:
      title: the page's title, plain text.
      body: the HTML of the body.
      styles: texts of style sheets.
      data: JSON-serializable data, which scripts find in the element with id `data`. None for a page without scripts.
      scripts: texts of scripts, which are concatenated into one script in strict mode.
      libraries: texts of scripts that run before `scripts`, each in its own script element.
      asks_server: True if the scripts fetch data from the page's own server.

    Raises:
      ValueError: the data has NaN or Infinity, which JSON does not allow.
    """
    run: list[str] = []
    drawn = ""
    if data is not None:
        run = [*(f"\n{library}" for library in libraries), f'\n"use strict";\n{"".join(scripts)}']
        drawn = f'<script type="application/json" id="data">{script_json(data)}</script>\n'
        drawn += "".join(f"<script>{script}</script>\n" for script in run)
    style = f"\n{''.join(styles)}"
    policy = _POLICY.format(scripts=_hashes(run), styles=_hashes([style]), server="'self'" if asks_server else "'none'")
    return (
        f"{_START.replace('__POLICY__', policy)}<title>{html.escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"{body}{drawn}</body>\n</html>\n"
    )


def _hashes(texts: Iterable[str]) -> str:
    """Returns the hashes of inline scripts or style sheets as a source list of a Content-Security-Policy."""
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"


def script_json(data: object) -> str:
    """Returns data as JSON that is safe in a script element, even if texts in it contain HTML.

    Raises:
      ValueError: the data has NaN or Infinity, which JSON does not allow.
    """
    return json.dumps(data, separators=(",", ":"), allow_nan=False).translate(_UNSAFE)


def fill(template: str, parts: Mapping[str, str]) -> str:
    """Fills a template: replaces its marks, such as __PAGE_TITLE__, with the values in `parts`, such as {'TITLE': HTML}.

    All marks are replaced in one pass, so marks inside `parts` are not replaced.
    """
    return _MARK.sub(lambda mark: parts[mark[1]], template)
