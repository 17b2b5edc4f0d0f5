"""The documentation: its commands run, its pictures are the script's, the site builds strictly."""

import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest
from docs_page import MARKS, PAGES, ROOT, SHELL, blocks, is_valid

BLOCKS = {page: blocks(page) for page in PAGES}
# A page's blocks and checks, in a process of their own: several trainings beside other tests' programs can stand still.
RUNNER = pathlib.Path(__file__).with_name("docs_page.py")


def runs(page, slow):
    """Returns True if the page has a block that runs only with `slow`, or without it."""
    return any(
        block.language in (*SHELL, "python") and block.is_run(slow) and (not slow or "slow" in block.marks)
        for block in BLOCKS[page]
    )


def run_page(page, folder, *flags):
    """Runs a page in a folder, and shows what its commands printed if one fails."""
    done = subprocess.run(
        [sys.executable, str(RUNNER), page, *flags], cwd=folder, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, f"{done.stderr[-6000:]}"


@pytest.mark.docs
@pytest.mark.parametrize("page", [page for page in PAGES if runs(page, slow=False)])
def test_the_commands_of_a_page_run(page, tmp_path):
    run_page(page, tmp_path)


@pytest.mark.slow
@pytest.mark.docs
@pytest.mark.parametrize("page", [page for page in PAGES if runs(page, slow=True)])
def test_the_slow_commands_of_a_page_run(page, tmp_path):
    run_page(page, tmp_path, "--slow")


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_are_valid(page):
    for block in BLOCKS[page]:
        assert block.marks.keys() <= MARKS, f"{page}:{block.line}"
        assert block.language in (*SHELL, "python", "toml", "text", "check", "needs"), f"{page}:{block.line}"
        assert is_valid(block), f"{page}:{block.line}"


@pytest.mark.parametrize("page", PAGES)
def test_a_block_that_is_not_run_says_why(page):
    for block in BLOCKS[page]:
        for mark in ("not run", "slow"):
            assert len(block.marks.get(mark, "a reason").split()) > 1, f"{page}:{block.line}"


def test_most_blocks_run():
    of_commands = [block for page in PAGES for block in BLOCKS[page] if block.language in (*SHELL, "python")]
    assert sum("not run" in block.marks for block in of_commands) < len(of_commands) / 2


def test_the_pictures_are_what_the_script_draws():
    spec = importlib.util.spec_from_file_location("draw_docs", ROOT / "tools/draw_docs.py")
    script = importlib.util.module_from_spec(spec)
    sys.modules["draw_docs"] = script
    spec.loader.exec_module(script)
    drawn = {name: draw() for name, draw in script.DRAWINGS.items()}
    assert drawn == {path.name: path.read_text() for path in (ROOT / "docs/pictures").glob("*.svg")}


@pytest.mark.docs
def test_the_site_builds_strictly_and_fetches_nothing(tmp_path):
    pytest.importorskip("mkdocs", reason="the dependency group docs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    for page in ("index.html", "start.html", "errors.html", "api/sharding.html"):
        text = (tmp_path / page).read_text()
        fetched = re.findall(r'<(?:script|img|link)[^>]* (?:src|href)="(https?:[^"]*)"', text)
        assert [url for url in fetched if "rel=canonical" not in url] == []
    assert "spmd_trainer.sharding.padding.pad_uneven" in (tmp_path / "api/sharding.html").read_text()
