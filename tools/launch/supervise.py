"""Runs a job of several processes on this machine, and starts it again with what is left when a process is lost.

    python -m tools.launch.supervise --processes=4 --spare=0 --global_batch=32 -- \
        --exp=lm.stdlib.StdlibBytes --job_log_dir=runs/mine --mesh=data:-1

Everything behind `--` goes to each `spmd-trainer` process. On a cluster the scheduler does this (see README.md here).
"""

from __future__ import annotations

import argparse
import signal
import socket
import subprocess
import sys
import time
import types

# Of `spmd_trainer.cli`: a mistake that another try would repeat.
_STATUS_USER_ERROR = 2
# A job that ran for less than this has not got anywhere; the next try waits.
_SHORT_SECONDS = 60.0


class Supervisor:
    """Starts jobs until one has done its work."""

    def __init__(self, options: argparse.Namespace):
        """`options` as `parse` returns them."""
        self._options = options
        self._processes: list[subprocess.Popen[bytes]] = []
        self._terminated = False

    def run(self) -> int:
        """Runs jobs, each with as many processes as are left; returns the status to end with."""
        processes, spare = self._options.processes, self._options.spare
        for attempt in range(self._options.max_restarts + 1):
            began = time.monotonic()
            statuses = self._run_job(processes)
            if not any(statuses):
                return 0
            if _STATUS_USER_ERROR in statuses or self._terminated:
                return next(status for status in statuses if status)
            # Those ended by a signal died by themselves; the others left because of them.
            lost = max(1, sum(status < 0 for status in statuses))
            replaced = min(spare, lost)
            spare -= replaced
            processes = self._fitting(processes - lost + replaced)
            if not processes:
                say("no process is left")
                return 1
            say(f"the job ended with {statuses}; try {attempt + 2} with {processes} processes")
            if time.monotonic() - began < _SHORT_SECONDS:
                time.sleep(self._options.wait_seconds)
            if self._terminated:
                return 1
        say(f"given up after {self._options.max_restarts} restarts")
        return 1

    def terminate(self, number: int, frame: types.FrameType | None) -> None:
        """Passes a SIGTERM on to one process, which is enough: all of them save and leave."""
        self._terminated = True
        for process in self._processes[:1]:
            process.send_signal(signal.SIGTERM)

    def _fitting(self, count: int) -> int:
        """The largest number of processes, `count` or fewer, that share the global batch evenly."""
        batch = self._options.global_batch
        return next((n for n in range(count, 0, -1) if not batch or batch % n == 0), 0)

    def _run_job(self, count: int) -> list[int]:
        port = free_port()
        arguments = list(self._options.trainer)
        if self._options.global_batch:
            arguments.append(f"--fdl.set=train_datasets[0].batch_size={self._options.global_batch // count}")
        command = [sys.executable, "-m", "spmd_trainer.main", *arguments]
        several = [f"--coordinator_address=localhost:{port}", f"--num_processes={count}"] if count > 1 else []
        self._processes = [
            subprocess.Popen([*command, *several, *([f"--process_id={index}"] if several else [])])
            for index in range(count)
        ]
        return [process.wait() for process in self._processes]


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return int(s.getsockname()[1])


def say(text: str) -> None:
    """Tells the person who watches."""
    print(f"supervise: {text}", file=sys.stderr, flush=True)


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line; ends the program with a message and status 2 when it is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, required=True, help="how many to start with")
    parser.add_argument("--spare", type=int, default=0, help="how many lost ones can be replaced")
    parser.add_argument(
        "--global_batch",
        type=int,
        default=0,
        help="rows of the global batch: each process gets its share as train_datasets[0].batch_size, so that the loss curve "
        "stays the same with fewer processes; 0 leaves batch sizes alone",
    )
    parser.add_argument("--max_restarts", type=int, default=20)
    parser.add_argument("--wait_seconds", type=float, default=10.0, help="before the next try after a short job")
    parser.add_argument("trainer", nargs="*", help="flags of spmd-trainer, behind --")
    options = parser.parse_args(argv)
    if options.processes < 1:
        parser.error(f"--processes={options.processes}; give 1 or more")
    if options.global_batch and options.global_batch % options.processes:
        parser.error(f"--global_batch={options.global_batch} is not shared evenly by {options.processes} processes")
    return options


def main(argv: list[str]) -> int:
    """Runs the supervisor."""
    supervisor = Supervisor(parse(argv))
    signal.signal(signal.SIGTERM, supervisor.terminate)
    return supervisor.run()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
