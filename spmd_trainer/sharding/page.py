"""What all self-contained HTML pages share: the document around a page, and how data and texts get into it."""

from __future__ import annotations

import functools
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
"""


@functools.cache
def asset(package: str, name: str) -> str:
    """Returns the text of a file that lies in a package.

    Args:
      package: e.g. 'spmd_trainer.watch.pages'.
      name: the file's name, with slashes.
    """
    return importlib.resources.files(package).joinpath(name).read_text(encoding="utf-8")


def document(
    title: str, body: str, *, styles: Iterable[str], data: object = None, scripts: Iterable[str] = (), head: str = ""
) -> str:
    """Returns a page.

    Args:
      title: its title, as text.
      body: the HTML of its body.
      styles: its style sheets.
      data: what its scripts find as JSON in the element `data`; None: the page has no scripts.
      scripts: its scripts, which become one strict script.
      head: more HTML for the head.

    Raises:
      ValueError: the data has NaN or Infinity, which JSON has not.
    """
    drawn = (
        ""
        if data is None
        else f'<script type="application/json" id="data">{script_json(data)}</script>\n'
        f'<script>\n"use strict";\n{"".join(scripts)}</script>\n'
    )
    return (
        f"{_START}{head}<title>{html.escape(title)}</title>\n<style>\n{''.join(styles)}</style>\n</head>\n<body>\n{body}"
        f"{drawn}</body>\n</html>\n"
    )


def script_json(data: object) -> str:
    """Returns data as JSON that can stand in a script element, whatever texts it has.

    Raises:
      ValueError: it has NaN or Infinity, which JSON has not.
    """
    return json.dumps(data, separators=(",", ":"), allow_nan=False).translate(_UNSAFE)


def fill(template: str, parts: Mapping[str, str]) -> str:
    """Returns a template with its marks, such as __PAGE_TITLE__, replaced.

    All in one pass: a text that looks like a mark stays as it is.

    Args:
      template: the template.
      parts: {'TITLE': HTML}, of all marks.
    """
    return _MARK.sub(lambda mark: parts[mark[1]], template)
