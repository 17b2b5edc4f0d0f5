"""What a traced program was made from besides its settings: code, files that were opened, environment variables that were read.

Tracing runs the code of the experiment, its layers and the libraries below. `Recorder` notes what they read while they run;
`Reads.changed` says what has changed since.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import io
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, ModuleType
from typing import Any

from spmd_trainer.errors import user_code

# Files whose content is compared; of larger ones, size and time.
_READ_WHOLE = 16 * 2**20
# Not what a program is made from: devices, the system's state.
_SYSTEM = ("/proc/", "/sys/", "/dev/")
# A module's own file is compared as code.
_CODE = (".py", ".pyc", ".so", ".pth")
_LIBRARIES = tuple(f"{os.path.realpath(sysconfig.get_path(name))}{os.sep}" for name in ("purelib", "platlib", "stdlib"))
# Frames to look at for the reader of an environment variable: `os.environ`, `Mapping.get`, and a helper or two.
_DEPTH = 6

_Environ = type(os.environ)
_plain_open: Callable[..., Any] = builtins.open
_plain_getitem: Callable[[os._Environ[str], str], str] = _Environ.__getitem__
_recorders: list[Recorder] = []
_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Reads:
    """What was read while a program was traced.

    Attributes:
      modules: {name: (file, stamp)} of all imported modules.
      files: {path: stamp} of the files that were opened.
      environment: {name: value, None if it was not set} of the variables that the user's code read.
    """

    modules: Mapping[str, tuple[str, str]]
    files: Mapping[str, str]
    environment: Mapping[str, str | None]

    def changed(self) -> str:
        """Returns what differs now, as a clause; empty for nothing."""
        for name, (path, stamp) in self.modules.items():
            if stamp_of(path) != stamp:
                return f"{path} has changed"
            now = _file_of(sys.modules[name]) if name in sys.modules else path
            if now != path:
                return f"{name} is imported from {now} now, and not from {path}"
        if moved := self._found_elsewhere():
            return moved
        for name, module in list(sys.modules.items()):
            file = _file_of(module)
            if name not in self.modules and file and name != "__main__" and not _is_installed(file):
                return f"{name} ({file}) was not imported then"
        for path, stamp in self.files.items():
            if stamp_of(path) != stamp:
                return f"{path} has changed"
        for name, value in self.environment.items():
            if os.environ.get(name) != value:
                return f"the environment variable {name} has changed"
        return ""

    def _found_elsewhere(self) -> str:
        """Returns where a package that isn't imported yet would be found now, if that is another place."""
        for name, (path, _) in self.modules.items():
            if "." in name or name in sys.modules or _is_installed(path):
                continue
            spec = importlib.util.find_spec(name)
            if spec is None or spec.origin != path:
                return f"{name} is found at {spec and spec.origin} now, and not at {path}"
        return ""


class Recorder:
    """Notes which files are opened and which environment variables the user's code reads, on the threads that ask for it."""

    def __init__(self) -> None:
        self._files: dict[str, str] = {}
        self._environment: dict[str, str | None] = {}
        self._threads: set[int] = set()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Context manager: notes what this thread reads."""
        thread = threading.get_ident()
        self._threads.add(thread)
        try:
            with _told_of_reads(self):
                yield
        finally:
            self._threads.discard(thread)

    def reads(self, without: str) -> Reads:
        """Returns what was read so far.

        Args:
          without: leaves out files below this directory: the run's own.
        """
        files = {path: stamp for path, stamp in self._files.items() if not path.startswith(without)}
        return Reads(_modules(), files, dict(self._environment))

    def opened(self, file: object, mode: str) -> None:
        """Notes a file that is opened."""
        if threading.get_ident() not in self._threads or not mode.startswith("r") or "+" in mode:
            return
        if not isinstance(file, str | bytes | os.PathLike):
            return
        path = os.path.abspath(os.fsdecode(file))
        if path in self._files or path.startswith(_SYSTEM) or path.endswith(_CODE) or _is_installed(path):
            return
        self._files[path] = stamp_of(path)

    def asked(self, name: object, value: str | None, frame: FrameType | None) -> None:
        """Notes an environment variable that is read, if the user's code asks for it: the libraries' are among the settings."""
        if threading.get_ident() not in self._threads or not isinstance(name, str) or name in self._environment:
            return
        for _ in range(_DEPTH):
            if frame is None:
                return
            if user_code.is_users(frame.f_code.co_filename):
                self._environment[name] = value
                return
            frame = frame.f_back


def stamp_of(path: str) -> str:
    """Returns what identifies a file's content: of installed packages and large files size and time, else its checksum."""
    try:
        found = os.stat(path)
        if found.st_size > _READ_WHOLE or _is_installed(path):
            return f"{found.st_size} {found.st_mtime_ns}"
        with _plain_open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return "absent"


def _modules() -> dict[str, tuple[str, str]]:
    found = {}
    for name, module in list(sys.modules.items()):
        if (path := _file_of(module)) and name != "__main__":
            found[name] = (path, stamp_of(path))
    return found


def _file_of(module: ModuleType) -> str:
    # `vars` and `getattr` would import a module that is imported when it is first used.
    names = ModuleType.__getattribute__(module, "__dict__") if isinstance(module, ModuleType) else {}
    path = names.get("__file__")
    return path if isinstance(path, str) else ""


def _is_installed(path: str) -> bool:
    return path.startswith(_LIBRARIES)


@contextlib.contextmanager
def _told_of_reads(recorder: Recorder) -> Iterator[None]:
    """Context manager: `recorder` is told of every `open` and every look at `os.environ`, on all threads."""
    with _lock:
        _recorders.append(recorder)
        if len(_recorders) == 1:
            builtins.open = io.open = _open
            _Environ.__getitem__ = _getitem  # type: ignore[method-assign]
    try:
        yield
    finally:
        with _lock:
            _recorders.remove(recorder)
            if not _recorders:
                builtins.open = io.open = _plain_open
                _Environ.__getitem__ = _plain_getitem  # type: ignore[method-assign]


@functools.wraps(_plain_open)
def _open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    for recorder in tuple(_recorders):
        recorder.opened(file, mode)
    return _plain_open(file, mode, *args, **kwargs)


def _getitem(environ: os._Environ[str], name: str) -> str:
    try:
        value = _plain_getitem(environ, name)
    except KeyError:
        value = None
    for recorder in tuple(_recorders):
        recorder.asked(name, value, sys._getframe(1))
    if value is None:
        raise KeyError(name)
    return value
