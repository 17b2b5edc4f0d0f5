"""Fixtures that the multi-process tests share."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Iterator

import pytest
from faults import Table
from job_helpers import FIELDS, RunningJob, Settings, run


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A compilation cache directory for all jobs."""
    return str(tmp_path_factory.mktemp("jax_cache"))


@pytest.fixture(scope="session")
def one_process(tmp_path_factory: pytest.TempPathFactory, cache: str) -> RunningJob:
    """A finished, uninterrupted job of one process."""
    return run(Settings(tmp_path_factory.mktemp("one") / "run", 1, cache, FIELDS))


@pytest.fixture(scope="session")
def table() -> Iterator[Table]:
    """The table of all faults, printed at the end."""
    result = Table()
    yield result
    if result.tried:
        sys.stdout.write(f"\n{result}\n")


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets jobs import the modules of this directory and of the one above."""
    here = pathlib.Path(__file__).parent
    paths = [str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
