"""What one process alone finds wrong with a checkpoint ends a read on all. Two threads stand for two processes."""

from __future__ import annotations

import concurrent.futures
import threading
import types
from collections.abc import Callable

import jax
import pytest
from etils import epath
from facts import assert_names

from spmd_trainer import multihost
from spmd_trainer.checkpointing import (
    LOAD_ALL,
    CheckpointError,
    CheckpointLoadingRules,
    CheckpointMismatchError,
    DamagedCheckpointError,
    records,
    restore,
    rule_matching,
)
from spmd_trainer.checkpointing.loading_rules import resolve_rules
from spmd_trainer.checkpointing.own_steps import OwnStep, find_step, open_step

Call = Callable[[], object]


@pytest.fixture
def as_two(monkeypatch: pytest.MonkeyPatch) -> Callable[[Call], list[object]]:
    """Returns a function that makes a call as process 0 and as process 1; returns what it returned or raised on each."""
    own, barrier, values = threading.local(), threading.Barrier(2, timeout=20), [None, None]

    def gather(name: str, value: object, **_: object) -> list[object]:
        values[own.index] = (name, value)
        barrier.wait()
        told = list(values)
        barrier.wait()
        assert {name} == {told_name for told_name, _ in told}, "the processes do not make the same calls"
        return [value for _, value in told]

    monkeypatch.setattr(multihost, "gather", gather)
    monkeypatch.setattr(multihost, "broadcast", lambda value, **_: gather("broadcast", value)[0])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: getattr(own, "index", 0))

    def outcome(index: int, call: Call) -> object:
        own.index = index
        try:
            return call()
        except Exception as error:
            return error

    def both(call: Call) -> list[object]:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda index: outcome(index, call), range(2)))

    return both


def on_process_1(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, instead: Callable[..., object]) -> None:
    """Replaces a function on process 1 alone."""
    on_others = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kw: (instead if jax.process_index() else on_others)(*args, **kw))


def test_a_record_that_one_process_finds_malformed_is_passed_over_by_both(saved, as_two, monkeypatch, caplog):
    read = records.read

    def malformed(step_dir: object, step: int) -> object:
        if step == 30:
            raise DamagedCheckpointError("record.json is malformed")
        return read(step_dir, step)

    on_process_1(monkeypatch, records, "read", malformed)
    found = as_two(lambda: find_step(saved.directory, None, check_contents=False))
    assert [source.step for source in found if isinstance(source, OwnStep)] == [20, 20]
    assert_names(caplog.text, "step 30", "is refused", "malformed")
    for error in as_two(lambda: find_step(saved.directory, 30, check_contents=False)):
        assert isinstance(error, DamagedCheckpointError)
        assert_names(str(error), "step 30", "malformed")


def test_a_mismatch_that_one_process_finds_ends_the_restore_on_both(saved, as_two, monkeypatch):
    def misfit(*args: object, **kwargs: object) -> None:
        raise CheckpointMismatchError("w is reshaped")

    on_process_1(monkeypatch, OwnStep, "require_fit", misfit)
    monkeypatch.setattr(OwnStep, "read", lambda *args: pytest.fail("an array was read"))
    layout = types.SimpleNamespace(variables=saved.variables, mesh=saved.mesh)
    first, second = as_two(lambda: restore(open_step(epath.Path(saved.directory), 10), layout))
    assert isinstance(first, CheckpointError)
    assert_names(str(first), "process 1", "w is reshaped")
    assert isinstance(second, CheckpointMismatchError)


def test_rules_that_one_process_finds_unfit_end_the_warm_start_on_both(saved, as_two, monkeypatch):
    on_process_1(monkeypatch, rule_matching, "without_match", lambda *args: ["no variable"])
    rules = {str(saved.directory): CheckpointLoadingRules(load_rules=[LOAD_ALL])}
    first, second = as_two(lambda: resolve_rules(saved.variables, rules, check_contents=False))
    assert isinstance(first, CheckpointError)
    assert_names(str(first), "process 1", "no variable")
    assert isinstance(second, CheckpointMismatchError)
