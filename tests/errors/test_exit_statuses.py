"""The exit status of each kind of error, by which launchers decide whether to start a job again (docs/exit_status.md)."""

import pytest

from spmd_trainer.checkpointing import errors as checkpoint_errors
from spmd_trainer.cli import log_lines
from spmd_trainer.errors import UserError
from spmd_trainer.multihost import loss
from spmd_trainer.watch.replica_check import ReplicaError
from spmd_trainer.watch.watchdog import HangError


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UserError, 2),
        (HangError, 4),
        (ReplicaError, 6),
        (checkpoint_errors.CheckpointError, 2),
        (checkpoint_errors.CheckpointReadError, 2),
        (checkpoint_errors.DamagedCheckpointError, 5),
        (checkpoint_errors.NoWholeCheckpointError, 5),
    ],
)
def test_errors_have_their_status(error, status):
    assert error("what would be right").exit_status == status


def test_an_error_may_have_the_status_of_its_cause():
    assert UserError("x", exit_status=5).exit_status == 5


def test_processes_that_end_because_of_others():
    assert (loss.STATUS_LOST_PROCESS, log_lines.STATUS_INTERRUPTED) == (3, 130)
