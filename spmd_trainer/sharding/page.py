"""What all self-contained HTML pages share: the document around a page, and how data and texts get into it."""

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
# Characters that could end the script element that holds the data. JSON's own escapes cover those that are no ASCII.
_UNSAFE = str.maketrans({char: f"\\u{ord(char):04x}" for char in "<>&"})
_START = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="__POLICY__">
<link rel="icon" href="data:,">
"""
# The page's own scripts and style sheets alone, by their hashes: a text of the run that became HTML could not run, nor ask for
# anything. The scripts draw with style attributes; pictures stand in the page.
_POLICY = (
    "default-src 'none'; script-src {scripts}; style-src {styles}; style-src-attr 'unsafe-inline'; img-src data:; "
    "connect-src {server}; base-uri 'none'; form-action 'none'"
)


@functools.cache
def asset(package: str, name: str) -> str:
    """Returns the text of a file that lies in a package."""
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
    """Returns a page, with a policy that lets a browser run and load what is named here alone.

    Args:
      title: its title, as text.
      body: the HTML of its body.
      styles: its style sheets.
      data: what its scripts find as JSON in the element `data`; None: the page has no scripts.
      scripts: its scripts, which become one strict script.
      libraries: scripts before these, each by itself.
      asks_server: whether the scripts ask the page's own server for data.

    Raises:
      ValueError: the data has NaN or Infinity, which JSON has not.
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
    """Returns a policy's list of inline scripts or style sheets that may act."""
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"


def script_json(data: object) -> str:
    """Returns data as JSON that can stand in a script element, whatever texts it has.

    Raises:
      ValueError: it has NaN or Infinity, which JSON has not.
    """
    return json.dumps(data, separators=(",", ":"), allow_nan=False).translate(_UNSAFE)


def fill(template: str, parts: Mapping[str, str]) -> str:
    """Returns a template with its marks, such as __PAGE_TITLE__, replaced by `parts`, e.g. {'TITLE': HTML}.

    All in one pass: a text that looks like a mark stays as it is.
    """
    return _MARK.sub(lambda mark: parts[mark[1]], template)
