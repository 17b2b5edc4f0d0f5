"""Saving, restoring onto other meshes, retention, strictness, failures."""

from __future__ import annotations

import datetime
import json
import logging
import resource
import subprocess
import sys
import traceback
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from absl import logging as absl_logging
from checkpoint_helpers import assert_restored, make_mesh, partition_specs, place, specs_for, train_state
from etils import epath
from facts import raises_naming
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd_trainer.checkpointing import (
    Checkpointer,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    NonFiniteStateError,
    input_states,
)
from spmd_trainer.checkpointing.checkpointer import parse_duration

# Orbax's writers answer an event loop that the failed save has already closed.
IGNORE_ORBAX_THREADS = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def one_variable(size: int = 8, value: float = 1.0):
    mesh = make_mesh(1, 4, 2)
    logical = {"w": np.full(size, value, np.float32)}
    variables = specs_for(logical, {"w": P("data")}, mesh)
    return place(logical, variables, mesh), variables, mesh


def save(checkpoints: Checkpointer, step: int, state, variables, **kwargs) -> bool:
    return checkpoints.save(step, state, variables, input_state=None, metadata={}, **kwargs)


def test_comes_back_as_it_was(saved):
    with Checkpointer(saved.directory) as checkpoints:
        assert checkpoints.all_steps() == [10, 20, 30]
        restored = checkpoints.restore(saved.variables, saved.mesh)
        assert (restored.step, restored.input_state, restored.metadata["metadata"]) == (
            30,
            {"position": 30},
            {"run": "test"},
        )
        assert_restored(restored.state, saved.variables, saved.states[30], saved.mesh)
        assert checkpoints.restore(saved.variables, saved.mesh, step=10).input_state == {"position": 10}


def test_four_functions_lie_between_the_call_and_orbax(saved, monkeypatch):
    ways = []
    read = ocp.PyTreeCheckpointHandler.restore

    def recording(*args, **kwargs):
        ways.append([f.name for f in traceback.extract_stack() if "/spmd_trainer/" in f.filename])
        return read(*args, **kwargs)

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", recording)
    with Checkpointer(saved.directory, read_only=True) as checkpoints:
        checkpoints.restore(saved.variables, saved.mesh)
    assert ways == [["restore", "restore", "read", "read_arrays"]]


@pytest.mark.parametrize("shape", [(1, 8, 1), (2, 2, 2), (1, 1, 8), (1, 3, 2), (1, 2, 2), (1, 1, 1)])
def test_moves_between_meshes(saved, shape):
    """8, 6, 4 and 1 devices divide the sizes 13, 10, 6 and 5 differently: paddings grow, shrink, appear and vanish."""
    mesh = make_mesh(*shape)
    variables = specs_for(saved.states[20], partition_specs(saved.states[20]), mesh)
    with Checkpointer(saved.directory, read_only=True) as checkpoints:
        restored = checkpoints.restore(variables, mesh, step=20)
    assert_restored(restored.state, variables, saved.states[20], mesh)


def test_moves_from_one_device_and_to_other_axes(tmp_path):
    logical = train_state(1)
    one = make_mesh(1, 1, 1)
    variables = specs_for(logical, jax.tree.map(lambda x: P(), logical), one)
    with Checkpointer(tmp_path) as checkpoints:
        save(checkpoints, 1, place(logical, variables, one), variables)
        mesh = make_mesh(4, 2, axes=("fsdp", "tp"))
        specs = jax.tree.map(lambda x: P(None, ("tp", "fsdp")) if np.ndim(x) == 2 else P(), logical)
        wanted = specs_for(logical, specs, mesh)
        assert_restored(checkpoints.restore(wanted, mesh).state, wanted, logical, mesh)


@pytest.mark.parametrize(
    ("saved_spec", "wanted_spec"),
    [
        (P("data", None), P("mdl", None)),  # padded to 8, wanted 6: part of the saved padding stays padding
        (P("mdl", None), P("data", None)),  # padded to 6, wanted 8
        (P("data", None), P(None, "data")),  # another dimension
        (P(("data", "mdl"), None), P()),  # padded to 8, wanted without padding
        (P(None, "mdl"), P(None, "mdl")),
    ],
)
def test_padding_is_zero_even_if_it_was_not_when_saved(tmp_path, saved_spec, wanted_spec):
    mesh = make_mesh(1, 4, 2)
    logical = {"w": np.arange(1, 16, dtype=np.float32).reshape(5, 3)}
    variables = specs_for(logical, {"w": saved_spec}, mesh)
    dirty = np.full(variables["w"].padded_shape, np.nan, np.float32)
    dirty[:5, :3] = logical["w"]
    state = {"w": jax.device_put(dirty, NamedSharding(mesh, variables["w"].spec))}
    with Checkpointer(tmp_path) as checkpoints:
        save(checkpoints, 1, state, variables)
        wanted = specs_for(logical, {"w": wanted_spec}, mesh)
        assert_restored(checkpoints.restore(wanted, mesh).state, wanted, logical, mesh)


@pytest.mark.parametrize("spec", [P("data"), P()])
def test_state_may_be_donated_as_soon_as_save_returns(tmp_path, spec):
    mesh = make_mesh(1, 4, 2)
    logical = {"w": np.zeros(1 << 20, np.float32)}
    variables = specs_for(logical, {"w": spec}, mesh)
    state = place(logical, variables, mesh)
    add_one = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    with Checkpointer(tmp_path) as checkpoints:
        for step in range(1, 4):
            state = add_one(state)
            save(checkpoints, step, state, variables)
            for _ in range(3):
                state = add_one(state)
        for step in range(1, 4):
            restored = checkpoints.restore(variables, mesh, step=step).state
            assert np.unique(restored["w"]).tolist() == [4 * step - 3]


def test_partial_restore_leaves_optimizer_states_unread(saved):
    variables = saved.variables.to_eval_state()
    with Checkpointer(saved.directory, read_only=True) as checkpoints:
        state = checkpoints.restore(variables, saved.mesh, partial=True).state
        assert_restored(state, variables, saved.states[30].to_eval_state(), saved.mesh)
        with pytest.raises(CheckpointMismatchError, match="state for evaluation"):
            checkpoints.restore(variables, saved.mesh)
        more = variables.replace(
            extra_state=(saved.variables.step.__class__("new", (2,), np.dtype("f4"), P(), (0,), ""),)
        )
        with pytest.raises(CheckpointMismatchError, match=r"missing .*: new\b.*\(2,\) float32"):
            checkpoints.restore(more, saved.mesh, partial=True)


def test_record_is_readable_without_arrays(saved):
    record = Checkpointer(saved.directory, read_only=True).read_metadata(20)
    emb = record["variables"]["mdl_vars/params/emb/w"]
    assert emb["shape"] == [13, 6]
    assert emb["dtype"] == "float32"
    assert "data" in emb["spec"]
    assert record["variables"]["mdl_vars/params/ffn/0/b"]["dtype"] == "bfloat16"
    assert record["mesh"] == {
        "axes": {"replica": 1, "data": 4, "mdl": 2},
        "devices": 8,
        "processes": 1,
        "platform": "cpu",
    }
    assert record["versions"]["jax"] == jax.__version__
    assert record["step"] == 20


def test_input_position_of_any_plain_kind(tmp_path):
    state, variables, mesh = one_variable()
    position = {"index": np.int64(5), "iterator": b"\x00\xff", "files": ["a", {"offset": 3}], "none": None}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state, variables, input_state=position, metadata={"config": {"fn": len}})
        restored = checkpoints.restore(variables, mesh)
        assert restored.input_state == {**position, "index": 5}
        with pytest.raises(CheckpointError, match="plain numbers"):
            checkpoints.save(2, state, variables, input_state={"fn": object()}, metadata={})


def test_saves_what_is_due_and_keeps_what_it_should(tmp_path):
    state, variables, _ = one_variable()
    with Checkpointer(
        tmp_path, save_interval_steps=2, save_max_to_keep=2, save_keep_interval_duration=None
    ) as checkpoints:
        started = [step for step in range(1, 9) if save(checkpoints, step, state, variables)]
        assert started == [2, 4, 6, 8]
        assert not checkpoints.should_save(8)
        assert save(checkpoints, 9, state, variables, force=True)
        assert not save(checkpoints, 9, state, variables, force=True)
    assert Checkpointer(tmp_path).all_steps() == [8, 9]
    with Checkpointer(tmp_path, save_max_to_keep=1, save_keep_interval_duration="12h") as checkpoints:
        assert save(checkpoints, 10, state, variables)
        assert save(checkpoints, 11, state, variables)
    # Step 8 begins an interval of 12 hours, and step 11 is the newest.
    assert Checkpointer(tmp_path).all_steps() == [8, 11]


def test_read_only_saves_nothing(saved):
    with Checkpointer(saved.directory, read_only=True) as checkpoints:
        assert not checkpoints.should_save(40)
        assert not save(checkpoints, 40, None, None)
        with pytest.raises(CheckpointError, match="read-only"):
            save(checkpoints, 40, None, None, force=True)


def test_missing_step_lists_those_that_exist(saved, tmp_path):
    checkpoints = Checkpointer(saved.directory, read_only=True)
    with raises_naming(CheckpointNotFoundError, saved.directory, "step 15", "10, 20, 30"):
        checkpoints.restore(saved.variables, saved.mesh, step=15)
    empty = Checkpointer(tmp_path / "nowhere")
    assert (empty.all_steps(), empty.latest_step()) == ([], None)
    with pytest.raises(CheckpointNotFoundError, match="holds no steps"):
        empty.restore(saved.variables, saved.mesh)
    with raises_naming(CheckpointNotFoundError, tmp_path / "nowhere", "no whole step"):
        empty.read_metadata(3)


def test_state_that_is_not_what_its_specs_say(tmp_path):
    state, variables, _ = one_variable()
    checkpoints = Checkpointer(tmp_path)
    with pytest.raises(CheckpointError, match="different structures"):
        save(checkpoints, 1, {**state, "x": state["w"]}, variables)
    with pytest.raises(CheckpointError, match=r"w is \(4,\) float32; its VariableSpec says \(8,\) float32"):
        save(checkpoints, 1, {"w": state["w"][:4]}, variables)
    with raises_naming(CheckpointError, "w", "ndarray", "jax.Array"):
        save(checkpoints, 1, {"w": np.ones(8, np.float32)}, variables)
    assert not list(tmp_path.iterdir())


def test_nan_is_refused_by_name(tmp_path):
    mesh = make_mesh(1, 4, 2)
    logical = train_state()
    logical.mdl_vars["params"].ffn[1].w[3, 2] = np.inf
    variables = specs_for(logical, partition_specs(logical), mesh)
    state = place(logical, variables, mesh)
    with Checkpointer(tmp_path) as checkpoints:
        with raises_naming(NonFiniteStateError, "step 1", "not saved", "mdl_vars/params/ffn/1/w") as e:
            save(checkpoints, 1, state, variables, check_finite=True)
        assert isinstance(e.value, ValueError)
        assert checkpoints.all_steps() == []
        assert save(checkpoints, 1, place(train_state(), variables, mesh), variables, check_finite=True)


@pytest.fixture
def no_room():
    """Limits files to 1 MiB, which acts like a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))

    yield fill
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@IGNORE_ORBAX_THREADS
def test_failed_save_stops_the_next_one_and_leaves_nothing(tmp_path, no_room):
    rng = np.random.default_rng(0)
    mesh = make_mesh(1, 4, 2)
    logical = {"w": rng.standard_normal(1 << 20).astype(np.float32)}
    variables = specs_for(logical, {"w": P("data")}, mesh)
    state = place(logical, variables, mesh)
    checkpoints = Checkpointer(tmp_path, save_max_to_keep=1, save_keep_interval_duration=None)
    save(checkpoints, 1, state, variables)
    checkpoints.wait_until_finished()
    no_room()
    save(checkpoints, 2, state, variables)
    with raises_naming(CheckpointError, "step 2", "failed", "whole step is 1") as e:
        save(checkpoints, 3, state, variables)
    assert e.value.__cause__ is not None
    with pytest.raises(CheckpointError, match=r"step 2 .*failed"):
        checkpoints.wait_until_finished()
    with pytest.raises(CheckpointError, match=r"step 2 .*failed"):
        checkpoints.close()
    assert Checkpointer(tmp_path).all_steps() == [1]


def save_and_fail(checkpoints, state, variables):
    save(checkpoints, 1, state, variables)
    raise KeyError("first")


@IGNORE_ORBAX_THREADS
def test_failure_at_the_end_is_raised_but_hides_no_other_error(tmp_path, no_room):
    rng = np.random.default_rng(0)
    mesh = make_mesh(1, 4, 2)
    logical = {"w": rng.standard_normal(1 << 20).astype(np.float32)}
    variables = specs_for(logical, {"w": P("data")}, mesh)
    state = place(logical, variables, mesh)
    no_room()
    with pytest.raises(CheckpointError, match=r"step 1 .*failed"), Checkpointer(tmp_path) as checkpoints:
        save(checkpoints, 1, state, variables)
    with pytest.raises(KeyError, match="first"), Checkpointer(tmp_path) as checkpoints:
        save_and_fail(checkpoints, state, variables)


def test_resume_clears_what_a_killed_save_left(tmp_path):
    state, variables, mesh = one_variable()
    with Checkpointer(tmp_path) as checkpoints:
        save(checkpoints, 1, state, variables)
    (tmp_path / "2.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.restore(variables, mesh).step == 1
        assert save(checkpoints, 2, state, variables)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_going_back_to_an_older_step_is_said(saved, caplog):
    with Checkpointer(saved.directory) as checkpoints, caplog.at_level("WARNING"):
        checkpoints.restore(saved.variables, saved.mesh, step=10)
        assert "holds newer ones (20, 30)" in caplog.text
        assert checkpoints.should_save(15)
        assert not checkpoints.should_save(20)


def test_orbax_is_quiet(tmp_path, caplog):
    state, variables, mesh = one_variable()
    before = absl_logging.get_verbosity()
    absl_logging.set_verbosity(absl_logging.INFO)
    try:
        with caplog.at_level(logging.INFO), Checkpointer(tmp_path) as checkpoints:
            save(checkpoints, 1, state, variables)
            checkpoints.restore(variables, mesh)
        assert [record for record in caplog.records if "orbax" in record.pathname] == []
    finally:
        absl_logging.set_verbosity(before)


def test_import_is_light():
    code = (
        "import sys, spmd_trainer.checkpointing\n"
        "heavy = {'orbax', 'tensorflow', 'praxis', 'tensorstore'} & {name.split('.')[0] for name in sys.modules}\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("text", "seconds"), [("12h", 43200), ("30m", 1800), ("1d12h", 129600), ("90s", 90), ("1.5h", 5400), (None, None)]
)
def test_durations(text, seconds):
    assert parse_duration(text) == (None if seconds is None else datetime.timedelta(seconds=seconds))


def test_settings_that_make_no_sense(tmp_path):
    with raises_naming(ValueError, "save_keep_interval_duration", "'12 hours'", "'12h'"):
        Checkpointer(tmp_path, save_keep_interval_duration="12 hours")
    with pytest.raises(ValueError, match="save_interval_steps"):
        Checkpointer(tmp_path, save_interval_steps=0)
    with pytest.raises(ValueError, match="save_max_to_keep"):
        Checkpointer(tmp_path, save_max_to_keep=0)


def test_a_stream_that_one_process_saved_is_not_resumed_by_two(saved, monkeypatch):
    """Before, both went on from the one position, with the same rows."""
    with Checkpointer(saved.directory) as checkpoints:
        state = place(saved.states[30], saved.variables, saved.mesh)
        position = {"state": b"stream"}
        assert checkpoints.save(
            40, state, saved.variables, input_state=position, metadata={}, shared_input_state=False, force=True
        )
        checkpoints.wait_until_finished()
        assert checkpoints.restore(saved.variables, saved.mesh).input_state == position
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    step_dir = epath.Path(saved.directory / "40")
    with raises_naming(CheckpointMismatchError, "training input", "one process", "2 processes"):
        input_states.read(step_dir, json.loads((step_dir / "record" / "record.json").read_text()))
