"""Damages files of real checkpoints: the step is refused by name, the newest whole one is used, nothing good is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from checkpoint_helpers import assert_restored, files_problem, make_mesh, place, specs_for
from etils import epath
from facts import assert_names, raises_naming
from jax.sharding import PartitionSpec as P

from spmd_trainer.checkpointing import Checkpointer, CheckpointNotFoundError, DamagedCheckpointError, manifest, records


def files_of(step_dir: Path) -> list[Path]:
    return sorted(p for p in step_dir.rglob("*") if p.is_file())


def data_file(step_dir: Path) -> Path:
    """Returns the file that holds the arrays."""
    return max((step_dir / "state" / "ocdbt.process_0" / "d").iterdir(), key=lambda p: p.stat().st_size)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def flip_one_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def swap_with_neighbour(path: Path) -> None:
    other = next(p for p in files_of(path.parent) if p != path)
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)


DAMAGES = [truncate, zero, flip_one_bit, empty, swap_with_neighbour, Path.unlink]


def check_falls_back(saved, caplog, at: int = 20) -> str:
    """Checks that step `at` is restored instead of the damaged newer ones; returns the log."""
    caplog.clear()
    with Checkpointer(saved.directory) as checkpoints, caplog.at_level("WARNING"):
        restored = checkpoints.restore(saved.variables, saved.mesh)
        assert restored.step == at
        assert_restored(restored.state, saved.variables, saved.states[at], saved.mesh)
        # The numbers of the damaged steps can be used again, and their files still exist.
        assert checkpoints.save(30, restored.state, saved.variables, input_state=None, metadata={})
    assert (saved.directory / "refused-30").exists()
    assert "Checkpoint step 30" in caplog.text
    assert Checkpointer(saved.directory).latest_step() == 30
    return caplog.text


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_arrays(saved, caplog, damage):
    path = data_file(saved.directory / "30")
    damage(path)
    with pytest.raises(DamagedCheckpointError, match=r"step 30 in .* is damaged: state/"):
        Checkpointer(saved.directory).restore(saved.variables, saved.mesh, step=30)
    assert "is refused: state/" in check_falls_back(saved, caplog)


@pytest.mark.parametrize("damage", [truncate, zero, Path.unlink])
@pytest.mark.parametrize("name", ["record/record.json", "state/manifest.ocdbt", "state/_METADATA", "manifest.json"])
def test_damaged_descriptions(saved, caplog, name, damage):
    damage(saved.directory / "30" / name)
    assert name in check_falls_back(saved, caplog)


DESCRIPTIONS = ["manifest.json", "record/record.json"]


@pytest.mark.parametrize("name", DESCRIPTIONS)
@pytest.mark.parametrize("text", ["[" * 200_000, '{"step": 1e400}', '{"format": 1, "format": 1e400}', "[]"])
def test_descriptions_that_are_absurd_json(saved, name, text):
    path = saved.directory / "30" / name
    path.write_text(text)
    with raises_naming(DamagedCheckpointError, name) as raised:
        Checkpointer(saved.directory).restore(saved.variables, saved.mesh, step=30)
    assert raised.value.exit_status == 5


@pytest.mark.parametrize("sizes", [[1e400], [2.5], "34", [-3], [True], None])
def test_a_shape_in_the_record_that_is_none(saved, sizes):
    path = saved.directory / "30" / "record" / "record.json"
    record = json.loads(path.read_text())
    name = next(iter(record["variables"]))
    record["variables"][name]["shape"] = sizes
    path.write_text(json.dumps(record))
    with raises_naming(DamagedCheckpointError, path, "malformed"):
        records.read(epath.Path(saved.directory / "30"), 30)


@pytest.mark.parametrize("name", [*DESCRIPTIONS, "state/_METADATA", "arrays"])
def test_a_named_pipe_is_not_waited_for(saved, name):
    path = data_file(saved.directory / "30") if name == "arrays" else saved.directory / "30" / name
    path.unlink()
    os.mkfifo(path)
    with raises_naming(DamagedCheckpointError, path.name):
        Checkpointer(saved.directory).restore(saved.variables, saved.mesh, step=30)


def restore_or_refusal(directory, saved):
    """Returns what was restored (and saved again as step 31) and None, or None and the refusal's message."""
    try:
        with Checkpointer(directory) as checkpoints:
            restored = checkpoints.restore(saved.variables, saved.mesh)
            checkpoints.save(31, restored.state, saved.variables, input_state=None, metadata={})
    except CheckpointNotFoundError as error:
        return None, str(error)
    return restored, None


@pytest.mark.full
def test_every_file_matters_or_is_not_needed(saved):
    """If any file is deleted or zeroed, the result is the right state or a refusal."""
    original = saved.directory / "30"
    copy = saved.directory.parent / "copy" / "30"
    for name in [p.relative_to(original) for p in files_of(original)]:
        for damage in (Path.unlink, zero):
            shutil.rmtree(copy.parent, ignore_errors=True)
            shutil.copytree(original, copy)
            damage(copy / name)
            restored, refusal = restore_or_refusal(copy.parent, saved)
            if restored is None:
                assert "step 30 is refused" in refusal
                assert name.name not in ("_CHECKPOINT_METADATA", "commit_success.txt") or len(name.parts) > 1
            else:
                assert_restored(restored.state, saved.variables, saved.states[30], saved.mesh)


def test_files_swapped_between_steps(saved, caplog):
    # Files that only name the arrays are the same in both steps: swapping them damages nothing. Nor does it with a file that a
    # save left behind, so that all others are swapped.
    data = {step: saved.directory / str(step) / "state" / "ocdbt.process_0" / "d" for step in (20, 30)}
    same = {p.read_bytes() for p in data[20].iterdir()} & {p.read_bytes() for p in data[30].iterdir()}
    by_size = (
        sorted((p for p in files.iterdir() if p.read_bytes() not in same), key=lambda p: -p.stat().st_size)
        for files in data.values()
    )
    for a, b in zip(*by_size, strict=False):
        content = a.read_bytes()
        a.write_bytes(b.read_bytes())
        b.write_bytes(content)
    check_falls_back(saved, caplog, at=10)
    assert "Checkpoint step 20" in caplog.text


def test_steps_swapped(saved, caplog):
    (saved.directory / "30").rename(saved.directory / "x")
    (saved.directory / "20").rename(saved.directory / "30")
    (saved.directory / "x").rename(saved.directory / "20")
    assert "belongs to step 20" in check_falls_back(saved, caplog, at=10)


def test_directory_of_another_program(saved, caplog):
    (saved.directory / "40" / "default").mkdir(parents=True)
    with Checkpointer(saved.directory, read_only=True) as checkpoints, caplog.at_level("WARNING"):
        assert checkpoints.all_steps() == [10, 20, 30]
        assert checkpoints.latest_step() == 30
        assert checkpoints.restore(saved.variables, saved.mesh).step == 30
    assert (saved.directory / "40").exists()
    assert "step 40 in" in caplog.text


def test_nothing_whole_left(saved):
    for step in (10, 20, 30):
        zero(data_file(saved.directory / str(step)))
    with pytest.raises(
        CheckpointNotFoundError, match=r"(?s)step 30 is refused: .*step 20 is refused: .*step 10 is refused: "
    ):
        Checkpointer(saved.directory).restore(saved.variables, saved.mesh)
    assert sorted(p.name for p in saved.directory.iterdir()) == ["10", "20", "30"]


def test_damaged_steps_do_not_count_as_kept(saved):
    """With save_max_to_keep=2 and two damaged steps, the good step must not be deleted."""
    for step in (20, 30):
        truncate(data_file(saved.directory / str(step)))
    with Checkpointer(saved.directory, save_max_to_keep=2, save_keep_interval_duration=None) as checkpoints:
        state = checkpoints.restore(saved.variables, saved.mesh).state
        checkpoints.save(15, state, saved.variables, input_state=None, metadata={})
    assert Checkpointer(saved.directory).all_steps() == [10, 15]
    assert sorted(p.name for p in saved.directory.glob("refused-*")) == ["refused-20", "refused-30"]


def test_same_number_refused_twice(saved):
    for _ in range(2):
        with Checkpointer(saved.directory) as checkpoints:
            zero(data_file(saved.directory / "30"))
            state = checkpoints.restore(saved.variables, saved.mesh).state
            checkpoints.save(30, state, saved.variables, input_state=None, metadata={})
    assert {p.name for p in saved.directory.glob("refused-*")} == {"refused-30", "refused-30-2"}


def test_large_files_are_sampled(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "WHOLE_STEP", 5000)
    monkeypatch.setattr(manifest, "WHOLE_FILE", 1000)
    monkeypatch.setattr(manifest, "SAMPLES", 5)
    monkeypatch.setattr(manifest, "SAMPLE_BYTES", 10)
    content = np.random.default_rng(0).bytes(10_000)
    path = tmp_path / "1" / "state" / "d"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    step_dir = epath.Path(tmp_path / "1")
    manifest.write(step_dir, 1)
    monkeypatch.undo()  # The manifest holds its own settings.
    assert files_problem(step_dir, 1) is None
    for damaged in (bytes(10_000), content[:-1] + b"?", b"?" + content[1:], content[5000:] + content[:5000]):
        path.write_bytes(damaged)
        assert_names(files_problem(step_dir, 1), "state/d", "checksum")
        assert manifest.quick_problem(step_dir, 1) is None
    path.write_bytes(content[:-1])
    assert manifest.quick_problem(step_dir, 1) == "state/d has 9999 bytes, not the 10000 that were written"


def test_processes_share_the_files(tmp_path):
    for name in "abc":
        path = tmp_path / "1" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    step_dir = epath.Path(tmp_path / "1")
    manifest.write(step_dir, 1)
    (tmp_path / "1" / "b").write_text("x")
    problems = [files_problem(step_dir, 1, share, 2) for share in range(2)]
    assert [p is None for p in problems] == [True, False]


def test_manifest_of_a_later_format(saved, caplog):
    path = saved.directory / "30" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    assert "format 99" in check_falls_back(saved, caplog)


SAVE_FOREVER = """
import sys, jax, numpy as np
sys.path.insert(0, sys.argv[2])
from checkpoint_helpers import make_mesh, place, specs_for
from jax.sharding import PartitionSpec as P
from spmd_trainer.checkpointing import Checkpointer
mesh = make_mesh(1, 4, 2)
with Checkpointer(sys.argv[1], save_max_to_keep=2, save_keep_interval_duration=None) as checkpoints:
    for step in range((checkpoints.latest_step() or 0) + 1, 100000):
        logical = {"w": np.full((1021, 64), step, np.float32), "b": np.full(7, step, np.float32)}
        variables = specs_for(logical, {"w": P("data", "mdl"), "b": P()}, mesh)
        checkpoints.save(step, place(logical, variables, mesh), variables, input_state={"n": step}, metadata={})
        print(step, flush=True)
"""


def test_killed_at_any_moment(tmp_path):
    """After each SIGKILL the newest step is whole, at most one save older than the last one started, and restorable."""
    here = Path(__file__).parent
    rng = np.random.default_rng(0)
    mesh = make_mesh(1, 4, 2)
    for _ in range(3):
        command = [sys.executable, "-c", SAVE_FOREVER, str(tmp_path), str(here)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=here.parents[1]) as child:
            for _ in range(3):
                started = int(child.stdout.readline())
            time.sleep(rng.uniform(0, 0.3))
            child.send_signal(signal.SIGKILL)
            started = int((child.stdout.read().split() or [started])[-1])
        with Checkpointer(tmp_path, read_only=True) as checkpoints:
            latest = checkpoints.latest_step()
            assert latest is not None
            assert latest >= started - 1
            logical = {"w": np.full((1021, 64), latest, np.float32), "b": np.full(7, latest, np.float32)}
            variables = specs_for(logical, {"w": P("mdl", "data"), "b": P()}, mesh)
            restored = checkpoints.restore(variables, mesh)
            assert (restored.step, restored.input_state) == (latest, {"n": latest})
            assert_restored(restored.state, variables, logical, mesh)
            assert place(logical, variables, mesh)["w"].shape == restored.state["w"].shape
