"""The faults of `tests/planted/faults.toml` can be planted: each text is where it should be, and each test that is named exists.

Planting them, and seeing that a test notices each, takes an hour: `python tests/planted/run.py`.
"""

import ast
import collections
import re
from pathlib import Path

import pytest
from planted import run

FAULTS = run.read_faults()
PACKAGE = run.ROOT / "spmd_trainer"
LEFT_OUT = {"pytest.mark.full", "pytest.mark.slow", "pytest.mark.installed", "pytest.mark.docs"}
# Lines of a room from which on it has at least two faults.
LARGE = 600
# The most faults of a room and of a file.
MOST, MOST_OF_FILE = 20, 4


def lines_of(room: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in room.rglob("*.py"))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: re.sub(r"\W+", "-", fault.name))
def test_a_fault_can_be_planted_and_is_one_line_of_valid_code(fault):
    changed = fault.changed(run.ROOT)
    ast.parse(changed)
    assert "\n" not in fault.old + fault.new
    before = (run.ROOT / fault.file).read_text(encoding="utf-8").splitlines()
    assert sum(a != b for a, b in zip(before, changed.splitlines(), strict=True)) == 1


def in_make_test(path: str) -> list[str]:
    """The names of a file's tests, without those that `make test` leaves out."""
    tree = ast.parse((run.ROOT / path).read_text(encoding="utf-8"))
    marks = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    of_all = [part for mark in marks for part in (mark.elts if isinstance(mark, ast.List) else [mark])]
    tests = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return [test.name for test in tests if LEFT_OUT.isdisjoint(map(ast.unparse, [*of_all, *test.decorator_list]))]


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.tests], ids=lambda fault: fault.tests)
def test_the_test_that_should_notice_it_exists_and_is_one_of_make_test(fault):
    for node in fault.tests.split():
        path, _, name = node.partition("::")
        tests = in_make_test(path)
        assert name.partition("[")[0] in tests if name else tests


def test_there_are_enough_and_each_has_a_name_of_its_own():
    assert len(FAULTS) >= 80
    assert [name for name, count in collections.Counter(fault.name for fault in FAULTS).items() if count > 1] == []


def test_they_are_spread_over_all_rooms():
    counts = collections.Counter(fault.room for fault in FAULTS)
    for fault in FAULTS:
        assert fault.file.startswith((f"spmd_trainer/{fault.room}/", f"spmd_trainer/{fault.room}.py"))
    large = {path.name for path in PACKAGE.iterdir() if path.is_dir() and lines_of(path) > LARGE}
    assert {room for room in large if counts[room] < 2} == set()
    assert max(counts.values()) <= MOST
    assert max(collections.Counter(fault.file for fault in FAULTS).values()) <= MOST_OF_FILE


def test_a_text_that_is_not_there_once_is_named_with_its_fault(tmp_path):
    (tmp_path / "x.py").write_text("a = 1\na = 1\n")
    for old in ("a = 1", "b"):
        with pytest.raises(ValueError, match=f"'lost': x.py has '{old}' . times"):
            run.Fault("lost", "room", "x.py", old, "a = 2").changed(tmp_path)
