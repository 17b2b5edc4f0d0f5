"""Plants faults into a copy of the checkout, one after the other, and says which test notices each of them.

    python tests/planted/run.py                        all faults: an hour
    python tests/planted/run.py --only 'padding|mask'  those whose name or room matches
    python tests/planted/run.py --hints-only           only the test that each entry names

`faults.toml` lists the faults. The tests that an entry names run first; if they pass, the whole suite runs until its first
failure. The checkout itself is never changed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FAULTS = HERE / "faults.toml"
# What `make test` runs, and how.
MARKED = ("-m", "not full and not slow and not installed and not docs")
# Without the test that each fault can still be planted: it fails wherever one is.
SUITE = ("-x", "-n", "2", "--dist", "loadgroup", "--ignore=tests/test_planted.py", *MARKED)
# A planted fault may make a test wait for ever.
HINT_SECONDS, SUITE_SECONDS = 600, 5400
# pytest's exit statuses: all passed, and some failed. Any other means that it could not run the tests.
PASSED, FAILED = 0, 1


@dataclasses.dataclass(frozen=True)
class Fault:
    """A change of one line of product code that brings a fault back.

    Attributes:
      name: what goes wrong, in plain English.
      room: the package (or the module) of `spmd_trainer/` that it is in.
      file: the file, relative to the checkout.
      old: text that the file has exactly once.
      new: what takes its place.
      tests: the test that should fail first, as pytest takes it; empty if none is known.
    """

    name: str
    room: str
    file: str
    old: str
    new: str
    tests: str = ""

    def changed(self, root: Path) -> str:
        """Returns the file's text with the fault.

        Raises:
          ValueError: the file doesn't have `old` exactly once; names fault and file.
        """
        text = (root / self.file).read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name!r}: {self.file} has {self.old!r} {count} times; it must have it once")
        return text.replace(self.old, self.new)


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of a fault: the test that caught it, or None, and how many seconds all tests took."""

    fault: Fault
    caught_by: str | None
    seconds: float

    def __str__(self) -> str:
        if self.caught_by is None:
            return f"MISSED  {self.seconds:6.1f} s  {self.fault.room}: {self.fault.name}"
        return f"caught  {self.seconds:6.1f} s  {self.fault.room}: {self.fault.name}  by {self.caught_by}"


def read_faults(path: Path = FAULTS) -> list[Fault]:
    """Returns the faults of a file, in order."""
    with path.open("rb") as file:
        return [Fault(**entry) for entry in tomllib.load(file)["fault"]]


def copy_checkout(target: Path) -> None:
    """Copies the files that git tracks, and those that it would, as they are now, into a new folder.

    The environment is not copied: `run_tests` uses this process's own.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():  # a deleted file is still listed
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def environment(copy: Path) -> dict[str, str]:
    """Returns the environment in which tests, and the processes that they start, import the copy's `spmd_trainer`.

    The installed one is a `.pth` file that names the checkout. Python reads PYTHONPATH before such files, so the copy wins.
    """
    return {**os.environ, "PYTHONPATH": str(copy)}


def check_imports(copy: Path) -> None:
    """Checks that Python in the copy's environment imports the copy.

    Raises:
      RuntimeError: it imports another `spmd_trainer`; names its file.
    """
    code = "import importlib.util; print(importlib.util.find_spec('spmd_trainer').origin)"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=copy.parent, env=environment(copy), check=True, capture_output=True, text=True
    ).stdout.strip()
    if Path(found).resolve() != (copy / "spmd_trainer/__init__.py").resolve():
        raise RuntimeError(f"tests in {copy} would import {found} instead of the copy")


def run_tests(copy: Path, arguments: Sequence[str], seconds: float) -> str | None:
    """Runs pytest in the copy.

    Args:
      copy: the copy.
      arguments: pytest's.
      seconds: after which it is stopped; a test that waits for ever has noticed the fault.

    Returns:
      The first test that failed; None if all passed.

    Raises:
      RuntimeError: pytest could not run the tests, such as for a test that doesn't exist.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfE", "--tb=no", *arguments]
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=environment(copy),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # and the processes that tests have started
        process.communicate()
        return f"{' '.join(arguments)} (not done after {seconds:.0f} s)"
    if process.returncode == PASSED:
        return None
    failed = re.search(r"^(?:FAILED|ERROR|ImportError while loading conftest) (.+?)(?: - .*)?$", output, re.MULTILINE)
    if process.returncode != FAILED and failed is None:
        raise RuntimeError(f"{' '.join(command)} exits with {process.returncode}:\n{output[-4000:]}")
    return failed[1] if failed else "a test without a name"


def try_fault(fault: Fault, copy: Path, *, hints_only: bool) -> Result:
    """Plants a fault into the copy, runs tests until one fails, and takes the fault out again."""
    path, start = copy / fault.file, time.monotonic()
    original = path.read_text(encoding="utf-8")
    _write(path, fault.changed(copy))
    try:
        caught = run_tests(copy, ["-x", *MARKED, *fault.tests.split()], HINT_SECONDS) if fault.tests else None
        if caught is None and not hints_only:
            caught = run_tests(copy, SUITE, SUITE_SECONDS)
    finally:
        _write(path, original)
    return Result(fault, caught, time.monotonic() - start)


def _write(path: Path, text: str) -> None:
    """Writes a module, and removes its bytecode: Python takes a file of the same second and size for the same."""
    path.write_text(text, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def try_faults(faults: Sequence[Fault], folder: Path, *, hints_only: bool, jobs: int) -> Iterator[Result]:
    """Tries all faults, several at a time if asked, each in a copy that no other uses; yields results as they come."""
    copies = [folder / str(number) for number in range(min(jobs, len(faults)))]
    for copy in copies:
        copy_checkout(copy)
        check_imports(copy)
    free = list(copies)

    def one(fault: Fault) -> Result:
        copy = free.pop()
        try:
            return try_fault(fault, copy, hints_only=hints_only)
        finally:
            free.append(copy)

    with concurrent.futures.ThreadPoolExecutor(len(copies)) as pool:
        for done in concurrent.futures.as_completed([pool.submit(one, fault) for fault in faults]):
            yield done.result()


def main(arguments: Sequence[str] | None = None) -> int:
    """Tries the faults that the command line asks for; returns 0 if tests caught all of them."""
    parser = argparse.ArgumentParser(description="Plants faults into a copy of the code, and runs the tests.")
    parser.add_argument("--only", metavar="REGEX", default="", help="only faults whose name, room or file matches")
    parser.add_argument("--hints-only", action="store_true", help="run only the tests that the entries name")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="faults that are tried at a time (default 1)")
    options = parser.parse_args(arguments)
    only = re.compile(options.only)
    faults = [fault for fault in read_faults() if any(map(only.search, (fault.name, fault.room, fault.file)))]
    if not faults or options.jobs < 1:
        parser.error("--jobs must be at least 1" if faults else f"--only={options.only}: no fault matches")
    for fault in faults:
        fault.changed(ROOT)
    return report(faults, hints_only=options.hints_only, jobs=options.jobs)


def report(faults: Sequence[Fault], *, hints_only: bool, jobs: int) -> int:
    """Tries faults, and prints what became of each; returns 0 if tests caught all of them."""
    results = []
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        for result in try_faults(faults, Path(folder), hints_only=hints_only, jobs=jobs):
            _say(str(result))
            results.append(result)
    missed = [result.fault.name for result in results if result.caught_by is None]
    _say(
        f"{len(results) - len(missed)} of {len(results)} faults caught"
        + "; missed: " * bool(missed)
        + "; ".join(missed)
    )
    return 1 if missed else 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
