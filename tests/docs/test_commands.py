"""Every command of README and of the documentation runs as pasted, with fewer steps."""

from __future__ import annotations

import os
import pathlib
import stat
import subprocess
import sys

import pytest
from pages import PAGES, ROOT, blocks

pytestmark = pytest.mark.docs  # runs by `make test-docs`
SHELLS = ("bash", "sh", "console")
# Pages whose runs end where they say; the runs of the others take so many steps.
AS_THEY_ARE = ("docs/callbacks.md", "docs/start.md", "docs/own_project.md")
STEPS = 4
# What a reader has done before, by page.
BEFORE = {
    "README.md": "spmd-trainer --exp=lm.stdlib.StdlibBytes --job_log_dir=runs/stdlib_bytes  # make train",
    "docs/fine_tuning.md": "\n".join(blocks("docs/hugging_face.md")[0].code.splitlines()[:2]),
}
# Stands for the command of an installation; more flags for training come from the environment.
COMMAND = """#!/bin/bash
case "$*" in
  *--mode=train*) more=$SPMD_DOCS_FLAGS;;
  *--mode=*|*--list*|*--dump*|*--doctor*|*--help*) more=;;
  *) more=$SPMD_DOCS_FLAGS;;
esac
exec {python} -m spmd_trainer.main "$@" $more
"""
# `uv run [--extra NAME] COMMAND ...`
UV = """#!/bin/bash
shift
while [ "$1" = --extra ]; do shift 2; done
exec "$@"
"""
WITH_COMMANDS = sorted(
    page for page in PAGES if any(block.kind in SHELLS and not block.not_run for block in blocks(page))
)


@pytest.fixture
def folder(tmp_path):
    """A user's folder, with what a checkout has that commands name."""
    for name in ("tools", "README.md", "experiments"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def environment(bin_directory: pathlib.Path, page: str) -> dict[str, str]:
    bin_directory.mkdir()
    python = f'#!/bin/bash\nexec {sys.executable} "$@"\n'
    commands = {"spmd-trainer": COMMAND.format(python=sys.executable), "uv": UV, "python": python, "python3": python}
    for name, text in commands.items():
        (bin_directory / name).write_text(text)
        (bin_directory / name).chmod(stat.S_IRWXU)
    flags = "" if page in AS_THEY_ARE else f"--fdl.set=task.train.num_train_steps={STEPS}"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "SPMD_DOCS_FLAGS": flags}
    # As users compile, and with as many devices as each experiment asks for.
    del env["XLA_FLAGS"]
    return env | {"PATH": f"{bin_directory}:{env['PATH']}"}


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_the_commands_of_a_page_run_in_order(page, folder, tmp_path_factory):
    script = ["set -eo pipefail", BEFORE.get(page, "")]
    for block in blocks(page):
        if block.not_run:
            continue
        if block.file and block.kind in ("python", "toml"):
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            (path.parent / "__init__.py").touch()
            path.write_text(block.code)
        elif block.kind in SHELLS:
            script.append(block.code)
    env = environment(tmp_path_factory.mktemp("commands") / "bin", page)
    ran = subprocess.run(
        ["bash", "-c", "\n".join(script)], cwd=folder, env=env, capture_output=True, text=True, timeout=900
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]


@pytest.mark.parametrize("page", sorted(PAGES))
def test_a_block_that_is_not_run_says_why(page):
    for block in blocks(page):
        assert block.kind, f"{page}: a block without a language: {block.code[:80]}"
        assert not block.not_run or len(block.not_run) > 10
