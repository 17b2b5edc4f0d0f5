"""Which step of a directory is the newest whole one, by the files of made-up steps."""

import pytest
from etils import epath

from spmd_trainer.checkpointing import manifest, steps


@pytest.fixture
def directory(tmp_path):
    for step in (2, 10, 9):
        (tmp_path / str(step)).mkdir()
        (tmp_path / str(step) / "data").write_text(f"of step {step}")
        manifest.write(epath.Path(tmp_path / str(step)), step)
    (tmp_path / "refused-30").mkdir()
    return epath.Path(tmp_path)


def test_the_newest_whole_step_by_number(directory):
    assert steps.present(directory) == [2, 9, 10]
    assert steps.newest_whole(directory) == 10
    assert steps.newest_whole(directory, newer_than=9) == 10
    assert steps.newest_whole(directory, newer_than=10) is None


def test_a_damaged_step_gives_way_to_the_one_before(directory):
    (directory / "10" / "data").write_text("shorter")
    assert steps.newest_whole(directory) == 9
    assert steps.whole(directory) == [2, 9]


def test_a_step_that_is_deleted_is_gone_and_its_deletion_can_be_finished(directory):
    steps.delete(directory, 10)
    assert steps.newest_whole(directory) == 9
    (directory / "9").rename(directory / f"{steps.DELETING_PREFIX}9")
    assert steps.newest_whole(directory) == 2
    steps.finish_deletions(directory)
    assert sorted(path.name for path in directory.iterdir()) == ["2", "refused-30"]
