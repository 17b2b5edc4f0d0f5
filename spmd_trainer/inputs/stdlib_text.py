"""Real text that every machine already has: the source files of the running interpreter's standard library.

About 12 MB in 700 files (Python 3.11). A file belongs to the held-out part when a checksum of its path relative to the
library says so, about 1 in 20; so a file never changes sides, whatever else a Python version adds or drops.
"""

from __future__ import annotations

import os
import sysconfig
import zlib

from spmd_trainer.errors import UserError

# Tests are left out (they repeat the library's text), and what is not the library: installed packages, caches.
_LEFT_OUT_DIRS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
# Written when this interpreter was built: full of the builder's paths, and different on every machine.
_BUILD_PREFIXES = ("config-", "_sysconfigdata")
_ONE_IN = 20


def stdlib_train_files() -> tuple[str, ...]:
    """Paths of the training part, sorted. Raises as `stdlib_files`."""
    return tuple(path for relative, path in stdlib_files() if not is_heldout(relative))


def stdlib_heldout_files() -> tuple[str, ...]:
    """Paths of the held-out part, sorted. Raises as `stdlib_files`."""
    return tuple(path for relative, path in stdlib_files() if is_heldout(relative))


def is_heldout(relative_path: str) -> bool:
    """Whether a file belongs to the held-out part.

    Args:
      relative_path: relative to the library, with '/' between its parts, e.g. 'json/decoder.py'.
    """
    return zlib.crc32(relative_path.encode()) % _ONE_IN == 0


def stdlib_files(root: str | None = None) -> list[tuple[str, str]]:
    """The library's source files.

    Args:
      root: the library's directory; None for that of the running interpreter.

    Returns:
      (path relative to `root` with '/' between its parts, full path), sorted by the first.

    Raises:
      UserError: there are no source files, as in a Python whose library is packed into an archive.
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
