"""Runs a job of several processes on this machine, and restarts it with the remaining processes when one is lost or hangs.

    python -m tools.launch.supervise --processes=4 --spare=0 --global_batch=32 -- \
        --exp=lm.stdlib.StdlibBytes --job_log_dir=runs/mine --mesh=data:-1

Everything after `--` is passed to each `spmd-trainer` process. On a cluster the scheduler restarts jobs (see README.md here).
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import types

# Exit statuses of `spmd-trainer` that need a person: a wrong command, no intact checkpoint, a device with wrong results.
_FINAL_STATUSES = {2, 5, 6}
# Exit status of a hung process, if the others waited for it or the culprit is unknown.
_HUNG = 4
# Default arguments, overridden by the command line.
_HANG_SECONDS = 1800
_POLL_SECONDS = 0.2
# After a job shorter than this, wait before the next attempt.
_SHORT_SECONDS = 60.0


class Supervisor:
    """Restarts a job until it succeeds, fails for good, or has no processes left."""

    def __init__(self, options: argparse.Namespace):
        self._options = options
        self._processes: list[subprocess.Popen[bytes]] = []
        self._terminated = False

    def run(self) -> int:
        """Runs the job, restarting it with the remaining processes. Returns the program's exit status."""
        processes, spare = self._options.processes, self._options.spare
        for attempt in range(self._options.max_restarts + 1):
            began = time.monotonic()
            statuses = self._run_job(processes)
            if not any(statuses):
                return 0
            if _FINAL_STATUSES & set(statuses) or self._terminated:
                return next(status for status in statuses if status)
            lost = _lost(statuses)
            replaced = min(spare, lost)
            spare -= replaced
            processes = self._fit_processes(processes - lost + replaced)
            if not processes:
                log("no process is left")
                return 1
            log(f"the job ended with statuses {statuses}; try {attempt + 2} with {processes} processes")
            if time.monotonic() - began < _SHORT_SECONDS:
                time.sleep(self._options.wait_seconds)
            if self._terminated:
                return 1
        log(f"giving up after {self._options.max_restarts} restarts")
        return 1

    def terminate(self, number: int, frame: types.FrameType | None) -> None:
        """Sends SIGTERM to one process, which makes all of them save and exit."""
        self._terminated = True
        for process in self._processes[:1]:
            process.send_signal(signal.SIGTERM)

    def _fit_processes(self, count: int) -> int:
        """Largest number of processes, at most `count`, that divides the global batch; 0 if there is none."""
        batch = self._options.global_batch
        return next((n for n in range(count, 0, -1) if not batch or batch % n == 0), 0)

    def _run_job(self, count: int) -> list[int]:
        port = free_port()
        arguments = [f"--hang_seconds={_HANG_SECONDS}", *self._options.trainer]
        if self._options.global_batch:
            arguments.append(f"--fdl.set=train_datasets[0].batch_size={self._options.global_batch // count}")
        command = [sys.executable, "-m", "spmd_trainer.main", *arguments]
        several = [f"--coordinator_address=localhost:{port}", f"--num_processes={count}"] if count > 1 else []
        env = os.environ | {"SPMD_TRAINER_JOB_TOKEN": secrets.token_hex(16)}
        self._processes = [
            subprocess.Popen([*command, *several, *([f"--process_id={index}"] if several else [])], env=env)
            for index in range(count)
        ]
        return self._wait()

    def _wait(self) -> list[int]:
        """Waits for all processes. After one fails, kills the stuck ones that have not ended within the grace period."""
        deadline = None
        while running := [process for process in self._processes if process.poll() is None]:
            if deadline is None and any(process.returncode for process in self._processes):
                deadline = time.monotonic() + self._options.grace_seconds
            if deadline is not None and time.monotonic() > deadline:
                ids = ", ".join(str(process.pid) for process in running)
                log(f"killing what has not ended {self._options.grace_seconds:g} s after the first: pids {ids}")
                for process in running:
                    process.kill()
                    process.wait()
            time.sleep(_POLL_SECONDS)
        return [process.returncode for process in self._processes]


def _lost(statuses: list[int]) -> int:
    """Number of processes to leave out of the next job.

    A negative status is death by a signal: a lost process, or a stuck one that was killed. A hung process exits with
    its own status. The others exited because of these. If all have hung, none is to blame.
    """
    if set(statuses) == {_HUNG}:
        return 0
    return max(1, sum(status < 0 or status == _HUNG for status in statuses))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return int(s.getsockname()[1])


def log(text: str) -> None:
    print(f"supervise: {text}", file=sys.stderr, flush=True)


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line. Exits with a message and status 2 if it is invalid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, required=True, help="number of processes at the start")
    parser.add_argument("--spare", type=int, default=0, help="number of lost processes that can be replaced")
    parser.add_argument(
        "--global_batch",
        type=int,
        default=0,
        help="rows of the global batch. Each process gets its share as train_datasets[0].batch_size, so that the loss curve "
        "stays the same with fewer processes. 0: do not set batch sizes",
    )
    parser.add_argument("--max_restarts", type=int, default=20)
    parser.add_argument(
        "--wait_seconds", type=float, default=10.0, help="pause before the next attempt, after a short job"
    )
    parser.add_argument(
        "--grace_seconds",
        type=float,
        default=120.0,
        help="when one process of a job has ended badly, how long the others have to end too; then they are killed, and count "
        "as lost",
    )
    parser.add_argument("trainer", nargs="*", help="flags of spmd-trainer, after --")
    options = parser.parse_args(argv)
    if options.processes < 1:
        parser.error(f"--processes={options.processes}: must be 1 or more")
    if options.global_batch and options.global_batch % options.processes:
        parser.error(f"--global_batch={options.global_batch} is not divisible by {options.processes} processes")
    return options


def main(argv: list[str]) -> int:
    """Runs the supervisor."""
    supervisor = Supervisor(parse(argv))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, supervisor.terminate)
    return supervisor.run()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
