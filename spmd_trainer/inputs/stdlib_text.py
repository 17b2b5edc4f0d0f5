"""Source files of the running interpreter's standard library: real text that every machine has.

About 12 MB in 700 files (Python 3.11). A checksum of a file's path relative to the library decides whether it is held
out; about 1 in 20 is. A file therefore keeps its part when another Python version adds or drops other files.
"""

from __future__ import annotations

import os
import sysconfig
import zlib

from spmd_trainer.errors import UserError

# Left out: tests, because they repeat the library's text; installed packages and caches, because they are not the library.
_LEFT_OUT_DIRS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
# Generated when the interpreter was built; contain paths of the build machine.
_BUILD_PREFIXES = ("config-", "_sysconfigdata")
_ONE_IN = 20


def stdlib_train_files() -> tuple[str, ...]:
    """Returns the paths of the training part, sorted. Raises the errors of `stdlib_files`."""
    return tuple(path for relative, path in stdlib_files() if not is_heldout(relative))


def stdlib_heldout_files() -> tuple[str, ...]:
    """Returns the paths of the held-out part, sorted. Raises the errors of `stdlib_files`."""
    return tuple(path for relative, path in stdlib_files() if is_heldout(relative))


def is_heldout(relative_path: str) -> bool:
    """True if a file belongs to the held-out part. `relative_path` has '/' between its parts, e.g. 'json/decoder.py'."""
    return zlib.crc32(relative_path.encode()) % _ONE_IN == 0


def stdlib_files(root: str | None = None) -> list[tuple[str, str]]:
    """Lists the library's source files as (relative path with '/' between its parts, full path), sorted by the first.

    Args:
      root: the library's directory; None for the running interpreter's.

    Raises:
      UserError: there are no source files, e.g. because the library is in an archive.
    """
    root = root or sysconfig.get_paths()["stdlib"]
    found = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in _LEFT_OUT_DIRS and not _is_build(name)]
        for name in names:
            if name.endswith(".py") and not _is_build(name):
                path = os.path.join(directory, name)
                found.append((os.path.relpath(path, root).replace(os.sep, "/"), path))
    if not found:
        raise UserError(
            f"there are no .py files in {root}, where this Python says its standard library is; use a Python with its "
            "library as source files, or give the input text files of your own"
        )
    return sorted(found)


def _is_build(name: str) -> bool:
    return name.startswith(_BUILD_PREFIXES)
