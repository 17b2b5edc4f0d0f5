"""What the jobs of this folder share."""

from __future__ import annotations

import pytest
from job_helpers import RunningJob, Settings, run

STEPS = 12
# Every step's loss is written; a checkpoint every fourth step; evaluation in the middle and at the end.
FIELDS = {
    "num_train_steps": STEPS,
    "save_interval_steps": 4,
    "save_max_to_keep": 3,
    "summary_interval_steps": 1,
    "eval_interval_steps": 6,
    "log_train_output_interval_steps": 1,
}


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A compilation cache for all jobs."""
    return str(tmp_path_factory.mktemp("jax_cache"))


@pytest.fixture(scope="session")
def one_process(tmp_path_factory: pytest.TempPathFactory, cache: str) -> RunningJob:
    """An uninterrupted job of one process."""
    return run(Settings(tmp_path_factory.mktemp("one") / "run", 1, cache, FIELDS))
