"""Runs all benchmarks, one after another, each in a process of its own, and writes their results to a folder.

    python -m benchmarks [--results benchmarks/results] [--only steady_step,growth]

Each benchmark writes NAME.json and NAME.log; growth also writes its plots. If a benchmark fails or times out, the others
still run and the exit status is 1. Takes about 45 minutes on 2 idle cores.
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

# Name: options that keep the total within 45 minutes.
BENCHMARKS: dict[str, list[str]] = {
    "steady_step": [],
    "run_checks": [],
    "nnx_step": [],
    "llama_step": [],
    "lora_step": [],
    "experts_step": [],
    "chunked_step": [],
    "pax_layers": [],
    "first_step": [],
    "growth": [],
    "input_rate": [],
    "corpus_rate": [],
    "checkpoint": [],
    "padding": ["--rounds=10"],
    "decode": [],
    "generate": [],
    "lm_eval": [],
    "shard_map": [],
    "resharding": ["--rounds=3", "--mib=256"],
    "sharding_scale": [],
}
TIMEOUT_SECONDS = 1800


def run(name: str, results: pathlib.Path) -> bool:
    """Runs one benchmark, prints and logs its output, and returns True if it exited with status 0."""
    command = [sys.executable, "-m", f"benchmarks.{name}", f"--json={results / f'{name}.json'}", *BENCHMARKS[name]]
    if name == "growth":
        command.append(f"--plots={results}")
    print(f"\n== {name}", flush=True)
    started = time.perf_counter()
    with (results / f"{name}.log").open("w") as log:
        # A session of its own, so that the processes it starts can be killed with it. Benchmarks report progress on
        # stderr, which goes to the log only.
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
        try:
            output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
            status = f"exit status {process.returncode}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            status = f"timed out after {TIMEOUT_SECONDS} s"
        finally:
            # Leave no process behind, after Ctrl-C and SIGTERM too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        log.write(output)
    print(f"{output}-- {name}: {status}, {time.perf_counter() - started:.0f} s", flush=True)
    return status == "exit status 0"


def main() -> int:
    """Runs the selected benchmarks; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--results", type=pathlib.Path, default=pathlib.Path("benchmarks/results"), help="output folder"
    )
    parser.add_argument("--only", default=",".join(BENCHMARKS), help="comma-separated names; default: all")
    args = parser.parse_args()
    # SIGTERM raises SystemExit, so that `run` kills the current benchmark, as on Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    names = args.only.split(",")
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"--only: unknown benchmark {', '.join(unknown)}; choose from {', '.join(BENCHMARKS)}")
    args.results.mkdir(parents=True, exist_ok=True)
    failed = [name for name in names if not run(name, args.results)]
    print(f"\nresults and plots: {args.results}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
