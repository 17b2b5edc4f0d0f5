"""Fixtures of `make interop`: transformers in an environment of its own, which SPMD_INTEROP_PYTHON names."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

import pytest

TESTS = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "interop"), str(TESTS / "tasks")]

TorchSide = Callable[..., None]


@pytest.fixture(scope="session")
def torch_side() -> TorchSide:
    """Runs a script in the environment of transformers."""
    python = os.environ.get("SPMD_INTEROP_PYTHON")
    if not python:
        raise RuntimeError("SPMD_INTEROP_PYTHON is not set; run `make interop`, which makes the environment")

    def run(script: pathlib.Path, *arguments: object) -> None:
        finished = subprocess.run(
            [python, str(script), *map(str, arguments)], capture_output=True, text=True, check=False
        )
        if finished.returncode:
            raise RuntimeError(
                f"{script.name} {arguments} failed:\n{finished.stdout[-2000:]}\n{finished.stderr[-4000:]}"
            )

    return run


@pytest.fixture(scope="session")
def folders(torch_side: TorchSide, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folders of tools/make_hf_goldens.py, made now by the installed transformers. INTEROP_FOLDERS names finished ones."""
    if made := os.environ.get("INTEROP_FOLDERS"):
        return pathlib.Path(made)
    directory = tmp_path_factory.mktemp("folders")
    torch_side(TESTS.parent / "tools" / "make_hf_goldens.py", directory)
    return directory
