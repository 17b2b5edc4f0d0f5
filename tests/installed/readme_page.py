"""The page "Your own project" of the documentation, as a user pastes from it."""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Page:
    """The code blocks of the page.

    Attributes:
      files: the package's files, by path: the blocks whose title is a path.
      uv_tables: the lines for a uv project's pyproject.toml.
      entry_point: the lines that announce my_pkg.
      cells: the notebook's cells.
      commands: every line of every command block.
    """

    def __init__(self) -> None:
        text = (ROOT / "docs/your_project.md").read_text()
        blocks = re.findall(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', text, re.DOTALL | re.MULTILINE)
        self.files = {title: code for _, title, code in blocks if title}
        self.cells = [code for kind, title, code in blocks if kind == "python" and not title]
        self.uv_tables, self.entry_point = [code for kind, _, code in blocks if kind == "toml"]
        self.commands = [line for kind, _, code in blocks if not kind for line in code.splitlines()]

    def command(self, *words: str) -> str:
        """Returns the one command that has all of these words."""
        (found,) = [line for line in self.commands if all(word in line for word in words)]
        return found


PAGE = Page()
