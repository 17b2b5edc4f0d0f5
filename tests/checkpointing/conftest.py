"""Fixtures of the checkpoint tests."""

from __future__ import annotations

import gc
import shutil
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_helpers import make_mesh, partition_specs, place, specs_for, train_state

from spmd_trainer.checkpointing import Checkpointer


@pytest.fixture(scope="module", autouse=True)
def _ends_abandoned_reads() -> Iterator[None]:
    """Collects reads that Orbax abandoned before the next module: collected during an import, they break it (gh-106176)."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> types.SimpleNamespace:
    """Saves what each test gets a copy of: saving takes longer than most of the tests."""
    mesh = make_mesh(1, 4, 2)
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    states = {step: train_state(step) for step in (10, 20, 30)}
    variables = specs_for(states[10], partition_specs(states[10]), mesh)
    with Checkpointer(directory) as checkpoints:
        for step, state in states.items():
            checkpoints.save(
                step, place(state, variables, mesh), variables, input_state={"position": step}, metadata={"run": "test"}
            )
    return types.SimpleNamespace(directory=directory, mesh=mesh, states=states, variables=variables)


@pytest.fixture
def saved(tmp_path: Path, saved_once: types.SimpleNamespace) -> types.SimpleNamespace:
    """Returns a directory with checkpoints 10, 20 and 30 of three different states on mesh (1, 4, 2)."""
    directory = tmp_path / "checkpoints"
    shutil.copytree(saved_once.directory, directory)
    return types.SimpleNamespace(**{**vars(saved_once), "directory": directory})
