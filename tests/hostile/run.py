"""Draws hostile files by seed, gives each to the trainer's command line, and prints a table of what became of them.

    python tests/hostile/run.py                     300 files of seed 0: a quarter of an hour
    python tests/hostile/run.py 1000 7              1000 files of seed 7
    python tests/hostile/run.py --kinds=templates   of one kind (several: separated by commas)
    python tests/hostile/run.py --case=41 300 0     number 41 again; its files and its output are kept, and their folder is named

Case N of a seed is the same whatever COUNT is, and with the same --kinds. Each case has a folder of its own and runs in a process
that is ended after 20 seconds or at 3 GiB: in a fork of this process, which has imported the trainer, or, one of ten rounds, in a
new interpreter. The exit status is 1 if any case took more than 10 seconds or 2 GiB, ended with a traceback or an undocumented
status, wrote anywhere but into the run's folder, sent commands to the terminal, or was accepted though its file is damaged.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import data_files
import model_files
import odd_files
from cases import Command, Maker, Place, training_command
from processes import Ended, run_forked, run_new

MOST_SECONDS, MOST_MIB = 10, 2_048
# One round of all kinds in so many runs in new interpreters.
_NEW_EVERY = 10
_DOCUMENTED = frozenset({0, 2, 5})
_TRACEBACK = b"Traceback (most recent call last)"
# Controls of C0 and C1 but tabs and line ends, marks of direction, and bytes that are not UTF-8.
_ACTS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\udc80-\udcff]")
_MAY_CHANGE = ("run", "out", "tmp")
_ESCAPED = Path("/tmp/executed.txt")  # where a member of an archive names itself

KINDS: dict[str, Maker] = {
    "safetensors_header": model_files.safetensors_header,
    "safetensors_damage": model_files.safetensors_damage,
    "index_json": model_files.index_json,
    "config_json": model_files.config_json,
    "tokenizer_json": model_files.tokenizer_json,
    "tokenizer_config": model_files.tokenizer_config,
    "adapter_config": model_files.adapter_config,
    "pax_tree": model_files.pax_tree,
    "run_markers": model_files.run_markers,
    "step_markers": model_files.step_markers,
    "no_regular_file": odd_files.no_regular_file,
    "escape_names": odd_files.escape_names,
    "settings": odd_files.settings,
    "templates": data_files.templates,
    "huge_lines": data_files.huge_lines,
    "tar_members": data_files.tar_members,
    "records": data_files.records,
    "port_sources": data_files.sources,
}


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of a case.

    Attributes:
      kind: its kind.
      number: its number among those of the seed.
      command: what ran.
      ended: how it ended.
      written: what it wrote outside of the folders that it may write to.
      output: what it wrote to stdout and stderr.
    """

    kind: str
    number: int
    command: Command
    ended: Ended
    written: Sequence[str]
    output: bytes

    @property
    def traceback(self) -> bool:
        return _TRACEBACK in self.output

    @property
    def commands_terminal(self) -> bool:
        return _ACTS.search(self.output.decode("utf-8", "surrogateescape")) is not None

    @property
    def accepted(self) -> bool:
        return self.command.must_refuse and self.ended.status == 0

    def faults(self) -> Iterator[str]:
        """Yields what should not have happened."""
        documented = _DOCUMENTED | ({1} if "--mode=port" in self.command.arguments else set())
        if self.ended.killed:
            yield self.ended.killed
        elif self.ended.status not in documented:
            yield f"status {self.ended.status}"
        if self.ended.seconds > MOST_SECONDS:
            yield f"{self.ended.seconds:.0f} s"
        if self.ended.mib > MOST_MIB:
            yield f"{self.ended.mib:,.0f} MiB"
        if self.traceback:
            yield f"traceback: {self.output.decode(errors='replace').rstrip().splitlines()[-1][:120]}"
        if self.commands_terminal:
            yield "commands to the terminal"
        if self.written:
            yield f"wrote {', '.join(self.written)}"
        if self.accepted:
            yield "accepted though damaged"


class Cases:
    """Makes and runs cases in a scratch folder."""

    def __init__(self, scratch: Path, seed: int, kinds: Sequence[str]):
        self._scratch, self._seed, self._kinds = scratch, seed, kinds
        self._trained: Path | None = None

    def run(self, number: int) -> Result:
        """Makes a case's files and runs its command."""
        kind = self._kinds[number % len(self._kinds)]
        place = self._place(f"case_{number}")
        command = KINDS[kind](random.Random(f"{self._seed} {kind} {number}"), place)
        start = run_new if number // len(self._kinds) % _NEW_EVERY == 0 else run_forked
        return self._run(kind, number, place, command, start)

    def _place(self, name: str) -> Place:
        root = self._scratch / name
        for folder in ("in", "run", "out", "tmp"):
            (root / folder).mkdir(parents=True)
        return Place(root, self._copy_trained)

    def _run(self, kind: str, number: int, place: Place, command: Command, start: Callable[..., Ended]) -> Result:
        before = self._snapshot(place)
        ended = start(command, place.root)
        after = self._snapshot(place)
        written = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        output = b"".join((place.root / name).read_bytes() for name in ("stdout", "stderr"))
        return Result(kind, number, command, ended, written, output)

    def _snapshot(self, place: Place) -> dict[str, tuple[int, ...]]:
        """Returns the kind, size and time of all that a case must leave alone."""
        found = [self._scratch / name for name in os.listdir(self._scratch)] + [_ESCAPED] * _ESCAPED.exists()
        for folder, names, files in os.walk(place.root):
            if Path(folder) == place.root:
                names[:] = [name for name in names if name not in _MAY_CHANGE]
                files = [name for name in files if name not in ("stdout", "stderr")]
            else:
                found.append(Path(folder))
            found += [Path(folder) / name for name in files]
        return {str(path.relative_to(self._scratch)) if path != _ESCAPED else str(path): _state(path) for path in found}

    def _copy_trained(self, target: Path) -> None:
        if self._trained is None:
            place = self._place("trained")
            place.model_folder()
            start = functools.partial(run_forked, most_seconds=300)
            result = self._run("", -1, place, Command("training", training_command()), start)
            if result.ended.status != 0:
                raise SystemExit(f"the run to damage could not be made:\n{result.output.decode(errors='replace')}")
            self._trained = place.run
        shutil.copytree(self._trained, target)


def _state(path: Path) -> tuple[int, ...]:
    found = path.lstat()
    is_file = path.is_file() and not path.is_symlink()
    return (found.st_mode, found.st_size, found.st_mtime_ns) if is_file else (found.st_mode,)


def table(results: Sequence[Result]) -> str:
    """Returns a row for each kind: how its cases ended, the worst time and memory, and the faults."""
    rows = [
        "| kind | cases | statuses | worst s | worst MiB | tracebacks | to the terminal | written outside | accepted |",
        "|---" * 9 + "|",
    ]
    names = [*dict.fromkeys(result.kind for result in results), ""]
    for kind in names:
        found = [result for result in results if kind in ("", result.kind)]
        counts = collections.Counter(result.ended.killed or str(result.ended.status) for result in found)
        statuses = ", ".join(f"{status}: {count}" for status, count in sorted(counts.items()))
        cells = [
            kind or "all",
            len(found),
            statuses,
            f"{max(result.ended.seconds for result in found):.1f}",
            f"{max(result.ended.mib for result in found):,.0f}",
            sum(result.traceback for result in found),
            sum(result.commands_terminal for result in found),
            sum(bool(result.written) for result in found),
            sum(result.accepted for result in found),
        ]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 1 if any case had a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", nargs="?", type=int, default=300)
    parser.add_argument("seed", nargs="?", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--case", type=int)
    args = parser.parse_args(argv)
    scratch = Path(tempfile.mkdtemp(prefix="hostile-"))
    cases = Cases(scratch, args.seed, args.kinds.split(","))
    results: list[Result] = []
    begin = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt):  # the table is of the cases so far
        for number in range(args.count) if args.case is None else [args.case]:
            results.append(result := cases.run(number))
            if (faults := "; ".join(result.faults())) or args.case is not None:
                print(
                    f"{number} {result.kind}: {result.command.what!a}: {faults or 'no fault'} ({result.ended})",
                    flush=True,
                )
            if args.case is None:
                shutil.rmtree(scratch / f"case_{number}")
    if args.case is not None:
        print(f"{result.command.arguments!a}\n{result.output[-4_000:].decode(errors='replace')!a}\nfiles: {scratch}")
    else:
        shutil.rmtree(scratch)
        print(f"\nseed {args.seed}, {len(results)} files in {time.monotonic() - begin:.0f} s\n\n{table(results)}")
    return int(any(True for result in results for _ in result.faults()))


if __name__ == "__main__":
    sys.exit(main())
