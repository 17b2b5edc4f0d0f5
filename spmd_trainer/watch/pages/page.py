"""What the pages share: reading their parts, and putting data and texts into them."""

from __future__ import annotations

import functools
import importlib.resources
import json
import re
from collections.abc import Mapping

_MARK = re.compile(r"__PAGE_(\w+?)__")
# Characters that could end the script element that holds the data. JSON's own escapes cover those that are no ASCII.
_UNSAFE = str.maketrans({char: f"\\u{ord(char):04x}" for char in "<>&"})


@functools.cache
def asset(package: str, name: str) -> str:
    """Returns the text of a file that lies in a package.

    Args:
      package: e.g. 'spmd_trainer.watch.pages'.
      name: the file's name, with slashes.
    """
    return importlib.resources.files(package).joinpath(name).read_text(encoding="utf-8")


def shared(name: str) -> str:
    """Returns the text of a file of this package, e.g. 'page.css'."""
    return asset(__package__, name)


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
