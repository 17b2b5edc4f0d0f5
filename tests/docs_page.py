"""The code blocks of README and of the pages in docs/, and a runner for them: `python docs_page.py PAGE [--slow]`.

A page's blocks run in order in the working directory. Shell blocks run in bash, Python blocks in one interpreter. A block with
`title="my_pkg/tiny.py"` is that file. A comment in the line above a block changes how it runs, and readers do not see it:

<!-- test: not run: REASON -->     not here, e.g. because it needs an accelerator; the block must still be valid
<!-- test: slow: REASON -->        only with --slow
<!-- test: adds: FLAGS -->         each spmd-trainer command gets these flags too, e.g. fewer steps
<!-- test: ends with: N -->        the exit status
<!-- test: output: -->             each line of the block is in the output of the block before

Several are joined by '; '.

`<!-- needs: PAGE -->` writes the files of another page. `<!-- check: EXPRESSION -->` must be true where it stands; `out` is the
output of the last shell block.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import pathlib
import re
import stat
import subprocess
import sys
import tomllib
from collections.abc import Mapping

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md"))]
SHELL = ("", "bash", "console")
MARKS = {"not run", "slow", "adds", "ends with", "output"}
_BLOCK = re.compile(
    r'(?:^<!-- test: (?P<mark>[^\n]*) -->\n+)?^```(?P<language>\w*)(?: title="(?P<title>[^"]*)")?\n(?P<code>.*?)^```$'
    r"|^<!-- (?P<note>check|needs): (?P<text>[^\n]*) -->$",
    re.DOTALL | re.MULTILINE,
)
# Added to the environment of a block's commands; the words of FLAGS.
_ADDED = "SPMD_DOCS_FLAGS"


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block, or a check.

    Attributes:
      page: path below the checkout.
      line: of the block's first line.
      language: as after the fence; 'check' or 'needs' for such a comment.
      title: a file that the block is; empty if it is none.
      code: the text.
      marks: {mark: what follows its colon}.
    """

    page: str
    line: int
    language: str
    title: str
    code: str
    marks: Mapping[str, str]

    def is_run(self, slow: bool) -> bool:
        """Returns True if the block runs."""
        return "not run" not in self.marks and (slow or "slow" not in self.marks)


def blocks(page: str) -> list[Block]:
    """Returns the blocks and checks of a page, with the parts of other files that it shows."""
    text = _with_snippets((ROOT / page).read_text())
    found = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        if match["note"]:
            found.append(Block(page, line, match["note"], "", match["text"], {}))
        else:
            marks = dict(part.partition(":")[::2] for part in (match["mark"] or "").split("; ") if part)
            marks = {name: text.strip() for name, text in marks.items()}
            found.append(Block(page, line, match["language"], match["title"] or "", match["code"], marks))
    return found


def _with_snippets(text: str) -> str:
    def included(match: re.Match[str]) -> str:
        path, _, section = match[1].partition(":")
        whole = (ROOT / path).read_text()
        if not section:
            return whole
        return whole.split(f"[start:{section}] -->\n")[1].split(f"<!-- --8<-- [end:{section}]")[0]

    return re.sub(r'^--8<-- "(.*)"$', included, text, flags=re.MULTILINE)


def _commands(folder: pathlib.Path) -> pathlib.Path:
    """Writes the programs that pages call, for this interpreter and this checkout, and returns their folder."""
    folder.mkdir()
    python = sys.executable
    programs = {
        "spmd-trainer": f'case "$*" in *--exp=*) set -- "$@" ${_ADDED};; esac; exec {python} -m spmd_trainer.main "$@"',
        "python": f'exec {python} "$@"',
        "python3": f'exec {python} "$@"',
        "uv": '[ "$1" = run ] || exit 64; shift; [ "$1" = --extra ] && shift 2; exec "$@"',
        "make": f'exec /usr/bin/make -s -f {ROOT}/Makefile -o setup RUN= "TRAIN_FLAGS=${_ADDED}" "$@"',
    }
    for name, line in programs.items():
        program = folder / name
        program.write_text(f"#!/bin/bash\n{line}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return folder


class Runner:
    """Runs a page's blocks in the working directory."""

    def __init__(self) -> None:
        """Puts the checkout's folders and the programs into the working directory."""
        here = pathlib.Path.cwd()
        for name in ("tools", "benchmarks", "README.md"):
            (here / name).symlink_to(ROOT / name)
        path = f"{_commands(here / '.programs')}:{os.environ['PATH']}"
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
        self._names: dict[str, object] = {"__name__": "page"}
        self._output = ""
        sys.path[:0] = [str(here), str(ROOT)]

    def run(self, block: Block, slow: bool = False) -> None:
        """Runs one block; raises what is wrong with it."""
        if block.language == "check":
            self._check(block.code)
        elif block.language == "needs":
            for file in blocks(block.code):
                if file.title:
                    self.run(file)
        elif "output" in block.marks:
            self._compare(block.code)
        elif not block.is_run(slow):
            pass
        elif block.title:
            path = pathlib.Path(block.title)
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".py" and path.parent != pathlib.Path():
                (path.parent / "__init__.py").touch()
            path.write_text(block.code)
        elif block.language == "python":
            exec(compile(block.code, f"{block.page}:{block.line}", "exec"), self._names)
        elif block.language in SHELL:
            self._shell(block)

    def _check(self, expression: str) -> None:
        names = {**self._names, "out": self._output, "pathlib": pathlib, "json": json}
        if not eval(expression, names):
            raise AssertionError(f"not true: {expression}\n{self._output[-3000:]}")

    def _compare(self, lines: str) -> None:
        absent = [line for line in lines.splitlines() if line.strip() not in self._output]
        if absent:
            raise AssertionError(f"not in the output: {absent}\n{self._output[-3000:]}")

    def _shell(self, block: Block) -> None:
        added, expected = block.marks.get("adds", ""), int(block.marks.get("ends with", 0))
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", block.code],
            env={**self._environment, _ADDED: added},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        self._output = done.stdout
        sys.stdout.write(done.stdout)
        if done.returncode != expected:
            raise AssertionError(f"exit status {done.returncode}, not {expected}:\n{block.code}\n{done.stdout[-3000:]}")


def is_valid(block: Block) -> bool:
    """Returns True if a block can be read as its language."""
    try:
        if block.language == "python":
            ast.parse(block.code)
        elif block.language == "toml":
            tomllib.loads(block.code)
        elif block.language == "check":
            ast.parse(block.code, mode="eval")
    except (SyntaxError, tomllib.TOMLDecodeError):
        return False
    return True


def main(page: str, *flags: str) -> None:
    """Runs a page and names the block that fails."""
    runner = Runner()
    for block in blocks(page):
        try:
            runner.run(block, slow="--slow" in flags)
        except BaseException:
            sys.stderr.write(f"failed: {block.page}, line {block.line}:\n{block.code}\n")
            raise


if __name__ == "__main__":
    main(*sys.argv[1:])
