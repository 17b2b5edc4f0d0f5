"""A directory of checkpoints to start from."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
from checkpoint_helpers import make_mesh, partition_specs, place, specs_for, train_state

from spmd_trainer.checkpointing import Checkpointer


@pytest.fixture
def saved(tmp_path: Path) -> types.SimpleNamespace:
    """Checkpoints 10, 20 and 30 of three different states on mesh (1, 4, 2), written by a run that has ended."""
    mesh = make_mesh(1, 4, 2)
    directory = tmp_path / "checkpoints"
    states = {step: train_state(step) for step in (10, 20, 30)}
    variables = specs_for(states[10], partition_specs(states[10]), mesh)
    with Checkpointer(directory) as checkpoints:
        for step, state in states.items():
            checkpoints.save(
                step, place(state, variables, mesh), variables, input_state={"position": step}, metadata={"run": "test"}
            )
    return types.SimpleNamespace(directory=directory, mesh=mesh, states=states, variables=variables)
