"""Sets up every test run on 8 host devices. Must run before JAX is imported.

SPMD_TEST_XLA_OPTIMISATION=normal compiles as users do (`make nightly`); the default, "cheap", compiles much faster.
"""

import atexit
import ctypes
import gc
import importlib.metadata
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator

import pytest
from xla_flags import xla_flags

# Under nohup, SIGHUP is ignored, and in a script's background SIGINT, also by the processes that tests start; tests send both.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["JAX_PLATFORMS"] = "cpu"
# With an arena of memory for each thread, a worker would hold a quarter more. Workers are started after this.
os.environ.setdefault("MALLOC_ARENA_MAX", "2")
os.environ["XLA_FLAGS"] = xla_flags(
    os.environ.get("XLA_FLAGS", ""),
    os.environ.get("SPMD_TEST_XLA_OPTIMISATION", "cheap"),
    importlib.metadata.version("jaxlib"),
)
# pytest-xdist workers and the processes that tests start share one compilation cache.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="spmd-trainer-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


def pytest_collection_finish() -> None:
    """Makes garbage collection rare, and keeps what the imports made out of it: of a million objects, each takes a second."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


# How much a worker may grow before it drops JAX's compiled programs.
_MAY_GROW_BYTES = 300 * 2**20
_after_last_drop: list[int] = []


def _resident_bytes() -> int:
    """Memory of this process; 0 where the system doesn't say."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/statm") as sizes:
        return int(sizes.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module", autouse=True)
def _frees_compiled_programs() -> Iterator[None]:
    """Drops what JAX keeps of a module's compiled programs after it: a worker would grow by gigabytes over the suite."""
    if not _after_last_drop:
        _after_last_drop.append(_resident_bytes())
    yield
    # A drop takes a second or two, as long as the tests of many a module.
    if sys.platform == "linux" and _resident_bytes() < _after_last_drop[0] + _MAY_GROW_BYTES:
        return
    if (jax := sys.modules.get("jax")) is not None:
        jax.clear_caches()
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    _after_last_drop[0] = _resident_bytes()
