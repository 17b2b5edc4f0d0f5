"""Hostile files leave the command line with a message and a documented status, in seconds, and nothing else behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cases import Command
from processes import Ended
from results import Result, table

RUN = Path(__file__).with_name("run.py")
QUICK = Ended(status=2, seconds=1.0, cpu_seconds=1.0, mib=300.0, killed="")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    return subprocess.run(
        [sys.executable, RUN, *arguments], capture_output=True, text=True, check=False, env=environment
    )


def result(
    ended: Ended = QUICK, output: bytes = b"", written: tuple[str, ...] = (), *flags: str, damaged: bool = True
) -> Result:
    return Result("kind", 0, Command("what", flags, must_refuse=damaged), ended, written, output)


# All kinds: `python tests/hostile/run.py`.
def test_a_sample_does_no_harm():
    ran = run("5", "0", "--kinds=templates,port_sources,config_json,escape_names,tar_members")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "| all | 5 | " in ran.stdout


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (result(Ended(1, 1.0, 1.0, 1.0, "")), "status 1"),
        (result(Ended(-11, 1.0, 1.0, 1.0, "")), "status -11"),
        (result(Ended(-9, 20.0, 0.0, 1.0, "took too long")), "took too long"),
        (result(Ended(2, 11.0, 1.0, 1.0, "")), "11 s"),
        (result(Ended(2, 1.0, 1.0, 2_500.0, "")), "2,500 MiB"),
        (result(Ended(0, 1.0, 1.0, 1.0, "")), "accepted"),
        (result(output=b"Traceback (most recent call last):\n  ...\nKeyError: 'x'"), "KeyError"),
        (result(output=b"a\x1b[2Jb"), "terminal"),
        (result(output="a\u202eb".encode()), "terminal"),
        (result(output=b"a\x9bb"), "terminal"),
        (result(written=("case_0/executed",)), "case_0/executed"),
    ],
)
def test_a_fault_is_named(fault, named):
    assert named in " ".join(fault.faults())


def test_what_is_no_fault():
    shown = "a line\n\tand one with \\x1b[2J of Zoë".encode()
    assert not list(result(output=shown).faults())
    assert not list(result(Ended(0, 1.0, 1.0, 1.0, ""), damaged=False).faults())
    # It says that the file needs changes.
    assert not list(result(Ended(1, 1.0, 1.0, 1.0, ""), b"", (), "--mode=port").faults())


def test_the_table_has_the_worst_of_each_kind():
    rows = table([result(), result(Ended(0, 12.0, 1.0, 2_500.0, ""), b"\x1b[2J")]).splitlines()
    assert rows[2] == "| kind | 2 | 0: 1, 2: 1 | 12.0 | 2,500 | 0 | 1 | 0 | 1 |"
