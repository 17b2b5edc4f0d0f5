"""What a traced program was made from besides its settings: code, files that were opened, environment variables that were read.

Tracing runs the code of the experiment, its layers and the libraries below. `Recorder` notes what they read while they run;
`Reads.changed` says what has changed since.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import dataclasses
import hashlib
import importlib.util
import io
import os
import sys
import sysconfig
import threading
import time
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
_ABSENT = "absent"
# As they are named, and where links lead to.
_LIBRARIES = tuple(
    f"{folder}{os.sep}"
    for name in ("purelib", "platlib", "stdlib")
    for folder in {sysconfig.get_path(name), os.path.realpath(sysconfig.get_path(name))}
)

_Environ = type(os.environ)
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
            now = _file_of(name, sys.modules[name]) if name in sys.modules else path
            if now != path:
                return f"{name} is imported from {now} now, and not from {path}"
        if moved := self._found_elsewhere():
            return moved
        for name, module in list(sys.modules.items()):
            file = _file_of(name, module)
            if name not in self.modules and file and not _is_installed(file):
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
    """Notes which code is imported, which files and environment variables are read, on the threads that ask for it."""

    def __init__(self) -> None:
        self._began = time.time()
        self._modules: dict[str, tuple[str, str]] = {}
        self._files: dict[str, str] = {}
        self._environment: dict[str, str | None] = {}
        self._threads: collections.Counter[int] = collections.Counter()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Context manager: notes what this thread reads, and the modules that are imported at its beginning and end."""
        thread = threading.get_ident()
        self._note_modules()
        self._threads[thread] += 1
        try:
            with _told_of_reads(self):
                yield
        finally:
            self._threads[thread] -= 1
            self._note_modules()

    def reads(self, without: str) -> tuple[Reads, str]:
        """Returns (what was read so far, why that can't be relied on); one of them counts.

        What was edited while it was imported, traced or compiled can't be: the program may be made from either version.

        Args:
          without: leaves out files below this directory: the run's own.
        """
        self._note_modules()
        files = {path: stamp for path, stamp in self._files.items() if not path.startswith(without)}
        for path, stamp in [*self._modules.values(), *files.items()]:
            if stamp == _ABSENT or stamp_of(path) != stamp or os.stat(path).st_mtime > self._began:
                return Reads({}, {}, {}), f"{path} can't be read or has changed since the start"
        return Reads(dict(self._modules), files, dict(self._environment)), ""

    def opened(self, file: object, mode: object) -> None:
        """Notes a file that is opened."""
        if not self._threads[threading.get_ident()] or not isinstance(file, str | bytes | os.PathLike):
            return
        if not isinstance(mode, str) or not mode.startswith("r") or "+" in mode:
            return
        path = os.path.abspath(os.fsdecode(file))
        if path in self._files or path.startswith(_SYSTEM) or path.endswith(_CODE) or _is_installed(path):
            return
        if (stamp := stamp_of(path)) != _ABSENT:
            self._files[path] = stamp

    def asked(self, name: object, value: str | None, frame: FrameType | None) -> None:
        """Notes an environment variable that is read on behalf of the user's code: the libraries' are among the settings."""
        if not self._threads[threading.get_ident()] or not isinstance(name, str) or name in self._environment:
            return
        while frame is not None:
            if user_code.is_users(frame.f_code.co_filename):
                self._environment[name] = value
                return
            frame = frame.f_back

    def _note_modules(self) -> None:
        for name, module in list(sys.modules.items()):
            if name not in self._modules and (path := _file_of(name, module)):
                self._modules[name] = (path, stamp_of(path))


def stamp_of(path: str) -> str:
    """Returns what identifies a file's content: of installed packages and large files size and time, else its checksum."""
    try:
        found = os.stat(path)
        if found.st_size > _READ_WHOLE or _is_installed(path):
            return f"{found.st_size} {found.st_mtime_ns}"
        with _patch.plain_open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return _ABSENT


def _file_of(name: str, module: ModuleType) -> str:
    """Returns the file of a module; empty for none, and for a `__main__` that is not the user's script."""
    # `vars` and `getattr` would import a module that is imported when it is first used, and `isinstance` believes what cffi's
    # objects say of themselves.
    names = ModuleType.__getattribute__(module, "__dict__") if issubclass(type(module), ModuleType) else {}
    path = names.get("__file__")
    if not isinstance(path, str) or (name == "__main__" and not user_code.is_users(path)):
        return ""
    return path


def _is_installed(path: str) -> bool:
    return path.startswith(_LIBRARIES)


@contextlib.contextmanager
def _told_of_reads(recorder: Recorder) -> Iterator[None]:
    """Context manager: `recorder` is told of every `open` and every look at `os.environ`, on all threads."""
    with _lock:
        _recorders.append(recorder)
        if len(_recorders) == 1:
            _patch.put()
    try:
        yield
    finally:
        with _lock:
            _recorders.remove(recorder)
            if not _recorders:
                _patch.take_back()


class _Open:
    """Takes the place of `open`. An object, because a function would become a method where a class has it as an attribute."""

    def __call__(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        for recorder in tuple(_recorders):
            recorder.opened(file, mode)
        return _patch.plain_open(file, mode, *args, **kwargs)


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


class _Patch:
    """Puts `_Open` and `_getitem` in place, and takes them back where nobody has put something else there meanwhile."""

    def __init__(self) -> None:
        self.plain_open: Callable[..., Any] = builtins.open
        self._plain_io: Callable[..., Any] = io.open

    def put(self) -> None:
        """Puts them in place."""
        self.plain_open, self._plain_io = builtins.open, io.open
        builtins.open = io.open = _open
        _Environ.__getitem__ = _getitem  # type: ignore[method-assign]

    def take_back(self) -> None:
        """Puts back what was there before."""
        if builtins.open is _open:
            builtins.open = self.plain_open
        if io.open is _open:
            io.open = self._plain_io
        if _Environ.__getitem__ is _getitem:
            _Environ.__getitem__ = _plain_getitem  # type: ignore[method-assign]


_open: Callable[..., Any] = _Open()
_patch = _Patch()
