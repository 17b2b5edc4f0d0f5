"""Runs all benchmarks, one after the other, each in a process of its own; writes what they give to a folder.

    python -m benchmarks [--results benchmarks/results] [--only steady_step,growth]

For each: NAME.json and NAME.log there, and growth's plots. A benchmark that fails, or takes more than its time, ends none of
the others; the exit status is 1 then. About 45 minutes on 2 cores that do nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

# Name: options that keep the whole within its time.
BENCHMARKS: dict[str, list[str]] = {
    "steady_step": [],
    "first_step": [],
    "growth": [],
    "input_rate": [],
    "checkpoint": [],
    "padding": ["--rounds=10"],
    "decode": [],
    "shard_map": [],
    "resharding": ["--rounds=3", "--mib=256"],
    "sharding_scale": [],
}
TIMEOUT_SECONDS = 1800


def run(name: str, results: pathlib.Path) -> bool:
    """Runs one benchmark, its output on the screen and in its log. Returns whether it ended well."""
    command = [sys.executable, "-m", f"benchmarks.{name}", f"--json={results / f'{name}.json'}", *BENCHMARKS[name]]
    if name == "growth":
        command.append(f"--plots={results}")
    print(f"\n== {name}", flush=True)
    started = time.perf_counter()
    with (results / f"{name}.log").open("w") as log:
        # A session of its own, so that the processes which it starts end with it. What it says of its progress goes to
        # stderr, into the log alone.
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
        try:
            output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
            status = f"exit status {process.returncode}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            status = f"no end after {TIMEOUT_SECONDS} s"
        finally:
            # However this ends, by Ctrl-C or SIGTERM too: nothing of it goes on.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        log.write(output)
    print(f"{output}-- {name}: {status}, {time.perf_counter() - started:.0f} s", flush=True)
    return status == "exit status 0"


def main() -> int:
    """Runs those that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path("benchmarks/results"))
    parser.add_argument("--only", default=",".join(BENCHMARKS), help="names, with commas between")
    args = parser.parse_args()
    # Ended as by Ctrl-C, so that what runs is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    names = args.only.split(",")
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"--only: no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    args.results.mkdir(parents=True, exist_ok=True)
    failed = [name for name in names if not run(name, args.results)]
    print(f"\nfigures and plots: {args.results}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
