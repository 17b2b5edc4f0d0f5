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
import contextlib
import functools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import data_files
import model_files
import odd_files
from cases import Command, Maker, Place, training_command
from processes import Ended, run_forked, run_new
from results import Result, table

# One round of all kinds in so many runs in new interpreters.
_NEW_EVERY = 10
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
        start = run_forked if (number // len(self._kinds) + 1) % _NEW_EVERY else run_new
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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 1 if any case had a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", nargs="?", type=int, default=300)
    parser.add_argument("seed", nargs="?", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--case", type=int)
    args = parser.parse_args(argv)
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # ends as Ctrl-C does: with the table, and no process left behind
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
