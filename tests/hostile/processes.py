"""Runs a command of the trainer in a process that is ended when it takes too long or too much memory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from cases import IMPORT_PAX, Command

ROOT = Path(__file__).resolve().parents[2]
_TOOL = ROOT / "tools" / "import_pax_checkpoint.py"
# A process that takes longer, or more memory, is ended.
_END_AFTER_SECONDS, _END_AT_MIB = 20, 3_072
_POLL_SECONDS = 0.05
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
      status: its exit status; below 0 the signal.
      seconds: how long it took, without the time for which its threads waited for a processor that others used.
      cpu_seconds: the processor's time that it took.
      mib: most memory that one of its processes had at once.
      killed: why it was ended; '' if it ended by itself.
    """

    status: int
    seconds: float
    cpu_seconds: float
    mib: float
    killed: str


def run_new(command: Command, root: Path, most_seconds: float = _END_AFTER_SECONDS) -> Ended:
    """Runs a command in a new interpreter, as a user would. Its output goes to the files stdout and stderr of `root`."""
    program = [str(_TOOL)] if command.program == IMPORT_PAX else ["-m", "spmd_trainer.main"]
    with (root / "stdout").open("wb") as out, (root / "stderr").open("wb") as err:
        given = [sys.executable, *program, *map(os.fsencode, command.arguments)]
        env = {**os.environ, **_environment(root), "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            given, cwd=root / "in", env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )
        ended = _watch(process.pid, most_seconds)
    process.returncode = ended.status  # it has been waited for
    return ended


def run_forked(command: Command, root: Path, most_seconds: float = _END_AFTER_SECONDS) -> Ended:
    """Runs a command in a fork of this process, which has imported the trainer: that saves seconds. Output as in `run_new`."""
    program = _programs()[command.program]
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _be_the_trainer(program, command.arguments, root)
    return _watch(pid, most_seconds)


@functools.cache
def _programs() -> dict[str, Callable[[Sequence[str]], int]]:
    """Imports the trainer, with what its modes import later. Starts no thread and no device."""
    sys.path.insert(0, str(ROOT))
    os.environ["JAX_PLATFORMS"] = "cpu"
    import spmd_trainer.main
    import spmd_trainer.training.train
    from spmd_trainer.cli import launch  # noqa: F401
    from spmd_trainer.experiments.lm import finetune, own_text  # noqa: F401
    from spmd_trainer.hf import export_mode  # noqa: F401
    from spmd_trainer.planner import inspect_sharding  # noqa: F401
    from spmd_trainer.watch.pages import page_mode, show_data  # noqa: F401

    spec = importlib.util.spec_from_file_location("import_pax_checkpoint", _TOOL)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)

    def trainer(arguments: Sequence[str]) -> int:
        sys.argv = ["spmd-trainer", *arguments]
        spmd_trainer.main.run()
        return 0

    return {"trainer": trainer, IMPORT_PAX: tool.main}


def _be_the_trainer(program: Callable[[Sequence[str]], int], arguments: Sequence[str], root: Path) -> None:
    """Becomes the command's process; never returns."""
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        for number, name in enumerate(("stdout", "stderr"), 1):
            os.dup2(os.open(root / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(root / "in")
        os.environ.update(_environment(root))
        tempfile.tempdir = None
        status = program(arguments)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(status)


def _environment(root: Path) -> dict[str, str]:
    # What is compiled is run once at most.
    return {
        **dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME"), str(root / "tmp")),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }


def _watch(pid: int, most_seconds: float) -> Ended:
    try:
        return _watched(pid, most_seconds)
    except BaseException:  # Ctrl-C
        _kill(_family(pid))
        raise


def _watched(pid: int, most_seconds: float) -> Ended:
    begin = seen = time.monotonic()
    killed, most, starved, waits = "", 0.0, 0.0, _Waits()
    while True:
        found, status, used = os.wait4(pid, os.WNOHANG)
        now = time.monotonic()
        if found:
            cpu = used.ru_utime + used.ru_stime
            return Ended(
                os.waitstatus_to_exitcode(status), now - begin - starved, cpu, max(most, used.ru_maxrss / 1024), killed
            )
        family = _family(pid)
        most = max([most, *(_numbers(f"/proc/{one}/statm")[1] * _PAGE / 2**20 for one in family)])
        starved += min(now - seen, waits.longest_of(family))
        seen = now
        if now - begin - starved > most_seconds or most > _END_AT_MIB:
            killed = "took too much memory" if most > _END_AT_MIB else "took too long"
            _kill(family)
        time.sleep(_POLL_SECONDS)


class _Waits:
    """How long threads have waited for a processor."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def longest_of(self, pids: Sequence[int]) -> float:
        """Returns for how many seconds any one thread of processes has waited since the last call."""
        paths = [f"/proc/{pid}/task/{thread}/schedstat" for pid in pids for thread in _names(f"/proc/{pid}/task")]
        now = {path: _numbers(path)[1] / 1e9 for path in paths}
        longest = max((seconds - self._seconds.get(path, 0.0) for path, seconds in now.items()), default=0.0)
        self._seconds = now
        return max(0.0, longest)


def _kill(family: Sequence[int]) -> None:
    for one in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


def _family(pid: int) -> list[int]:
    """Returns a process and its descendants."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, _names("/proc")):
        # The name of the program is in brackets, and may hold anything; the state and the parent follow.
        with contextlib.suppress(OSError):
            parent = int(Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    family = [pid]
    for one in family:
        family += children.get(one, [])
    return family


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # the process has ended
        return []


def _numbers(path: str) -> list[int]:
    """Returns the first numbers in a file of /proc; zeros if the process has ended."""
    try:
        return [int(text) for text in Path(path).read_text().split()[:2]]
    except OSError:
        return [0, 0]
