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


_events: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def _frees_compiled_programs() -> Iterator[None]:
    """Drops what JAX keeps of a module's compiled programs after it: a worker would grow by gigabytes over the suite."""
    yield
    if (jax := sys.modules.get("jax")) is None:
        return
    if not _events:  # it is asked from the first module on that imports JAX
        jax.monitoring.register_event_duration_secs_listener(lambda event, duration, **kwargs: _events.append(event))
        _events.append("compile")
    if any("compile" in event for event in _events):
        jax.clear_caches()
        gc.collect()
        if sys.platform == "linux":
            ctypes.CDLL("libc.so.6").malloc_trim(0)
    _events[:] = ["listening"]
