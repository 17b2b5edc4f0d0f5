"""The pages of the documentation, README among them, and their code blocks."""

from __future__ import annotations

import dataclasses
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"))
}
# A fence, with what stands above it: a marker, or a line that names a file.
_BLOCK = re.compile(r"(?P<above>[^\n]*\n?[^\n]*)\n```(?P<kind>\w*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
_NOT_RUN = re.compile(r"<!-- not run: (.+) -->$")
_FILE = re.compile(r"`([\w/]+\.\w+)`")


@dataclasses.dataclass(frozen=True)
class Block:
    """A code block.

    Attributes:
      kind: bash, python, toml, text, ...
      code: what is between the fences.
      not_run: why it is not run by the tests; empty if it is.
      file: the file that the line above says it is, such as 'my_pkg/tiny.py'; empty for none.
    """

    kind: str
    code: str
    not_run: str
    file: str


def blocks(page: str) -> list[Block]:
    """Returns the code blocks of a page.

    Args:
      page: its path below the repository, a key of PAGES.
    """
    found = []
    for match in _BLOCK.finditer(PAGES[page]):
        not_run, file = _NOT_RUN.search(match["above"]), _FILE.search(match["above"])
        found.append(Block(match["kind"], match["code"], not_run[1] if not_run else "", file[1] if file else ""))
    return found


def block(text: str) -> str:
    """Returns the one Python block of all pages that contains `text`."""
    codes = {b.code for page in PAGES for b in blocks(page) if b.kind == "python" and text in b.code}
    (found,) = codes
    return found
