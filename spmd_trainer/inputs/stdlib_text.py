"""Source files of the running Python's standard library, as real text that every machine has.

Python 3.11 has about 12 MB in 700 files. About 1 file in 20 is held out for evaluation, the others are for training. Each
file is assigned by a checksum of its relative path, so it stays in its set when a Python version adds or drops other files.
"""

from __future__ import annotations

import os
import sysconfig
import zlib

from spmd_trainer.errors import UserError

# Left out: tests, because they repeat the library's text; installed packages and caches, which are not part of the library.
_LEFT_OUT_DIRS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
# Generated when the interpreter was built; contain paths of the build machine.
_BUILD_PREFIXES = ("config-", "_sysconfigdata")
_ONE_IN = 20


def stdlib_train_files() -> tuple[str, ...]:
    """Returns the sorted paths of the standard library's training files. Raises UserError as `stdlib_files` does."""
    return tuple(path for relative, path in stdlib_files() if not is_heldout(relative))


def stdlib_heldout_files() -> tuple[str, ...]:
    """Returns the sorted paths of the standard library's held-out files. Raises UserError as `stdlib_files` does."""
    return tuple(path for relative, path in stdlib_files() if is_heldout(relative))


def is_heldout(relative_path: str) -> bool:
    """Returns True if a library file is held out for evaluation. `relative_path` has '/' separators: 'json/decoder.py'."""
    return zlib.crc32(relative_path.encode()) % _ONE_IN == 0


def stdlib_files(root: str | None = None) -> list[tuple[str, str]]:
    """Returns (relative path with '/' as separator, full path) of the standard library's source files, sorted.

    Args:
      root: directory of the standard library; None for the directory of the running Python's library.

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
