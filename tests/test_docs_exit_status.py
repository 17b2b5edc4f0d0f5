"""docs/exit_status.md has the exit statuses of the code, and says of each what the launchers do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import yaml
from facts import assert_names

from spmd_trainer.checkpointing import errors as checkpoint_errors
from spmd_trainer.cli import log_lines
from spmd_trainer.errors import UserError
from spmd_trainer.multihost import loss
from spmd_trainer.watch.link import STATUS_HANG
from spmd_trainer.watch.replica_check import ReplicaError
from tools.launch import supervise

_ROOT = Path(__file__).parents[1]
_PAGE = _ROOT / "docs" / "exit_status.md"


def _rows() -> dict[int, tuple[str, str]]:
    """Returns the meaning and the advice of each status in the page's table."""
    cells = re.findall(r"^\| (\d+) \| (.*) \| (.*) \|$", _PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {int(status): (meaning, advice) for status, meaning, advice in cells}


def _literal_statuses(source: str) -> Iterator[int]:
    """Yields numbers that code exits with: arguments of `SystemExit`, `_exit` and `exit`, also in a conditional expression."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("SystemExit", "_exit", "exit"):
            for inner in (n for argument in node.args for n in ast.walk(argument)):
                if isinstance(inner, ast.Constant) and type(inner.value) is int:
                    yield inner.value


def _statuses_of_errors() -> set[int]:
    errors = [value for value in vars(checkpoint_errors).values() if isinstance(value, type)]
    return {UserError.exit_status, *(error.exit_status for error in errors if hasattr(error, "exit_status"))}


def test_table_has_the_statuses_of_the_code_and_no_others() -> None:
    literal = {
        status
        for path in (_ROOT / "spmd_trainer").rglob("*.py")
        for status in _literal_statuses(path.read_text(encoding="utf-8"))
    }
    named = {
        log_lines.STATUS_INTERRUPTED,
        loss.STATUS_LOST_PROCESS,
        ReplicaError.exit_status,
        STATUS_HANG,
    } | _statuses_of_errors()
    uncaught = {0, 1}  # Python's own: the end of the program, and an error that nobody catches
    assert set(_rows()) == literal | named | uncaught


def test_meanings_are_those_of_the_constants() -> None:
    rows = _rows()
    assert_names(rows[UserError.exit_status][0], "mistake", "command")
    assert "process was lost" in rows[loss.STATUS_LOST_PROCESS][0]
    assert "no progress" in rows[STATUS_HANG][0]
    assert "none is whole" in rows[checkpoint_errors.NoWholeCheckpointError.exit_status][0]
    assert "damaged" in rows[checkpoint_errors.DamagedCheckpointError.exit_status][0]
    assert "Ctrl-C" in rows[log_lines.STATUS_INTERRUPTED][0]


def test_page_says_to_stop_where_the_launchers_stop() -> None:
    stops = {status for status, (_, advice) in _rows().items() if advice.startswith("Stop")}
    assert stops == supervise._FINAL_STATUSES
    jobset = yaml.safe_load((_ROOT / "tools" / "launch" / "jobset.yaml").read_text(encoding="utf-8"))
    rules = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    assert stops == set(rules[0]["onExitCodes"]["values"])


def test_statuses_in_code_are_found() -> None:
    source = "raise SystemExit(0 if fine else 7)\nos._exit(STATUS)\nos._exit(9)\nprint(4)"
    assert set(_literal_statuses(source)) == {0, 7, 9}
