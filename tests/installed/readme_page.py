"""The page "Your own project" of the documentation, as a user pastes from it."""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Page:
    """The code blocks of the page.

    Attributes:
      experiment: the file my_pkg/tiny.py.
      uv_tables: the lines for a uv project's pyproject.toml.
      entry_point: the lines that announce my_pkg.
      cells: the notebook's cells.
      commands: every line of every command block.
    """

    def __init__(self) -> None:
        text = (ROOT / "docs/your_project.md").read_text()
        blocks = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        self.experiment, *self.cells = [code for kind, code in blocks if kind == "python"]
        self.uv_tables, self.entry_point = [code for kind, code in blocks if kind == "toml"]
        self.commands = [line for kind, code in blocks if not kind for line in code.splitlines()]

    def command(self, *words: str) -> str:
        """Returns the one command that has all of these words."""
        (found,) = [line for line in self.commands if all(word in line for word in words)]
        return found


PAGE = Page()
