"""Eight host devices for every test, whatever the machine has. Must act before JAX is imported."""

import atexit
import os
import shutil
import tempfile

# Compiling is most of what tests do. How much LLVM optimizes, and by which of XLA's two ways fusions become code (the newer
# one, by MLIR, takes most of a compilation), changes none of the results that tests look at.
CHEAP_COMPILATION = ("--xla_backend_optimization_level=0", "--xla_cpu_use_fusion_emitters=false")
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [
        flag
        for flag in os.environ.get("XLA_FLAGS", "").split()
        if not flag.startswith("--xla_force_host_platform_device_count")
    ]
    + ["--xla_force_host_platform_device_count=8", *CHEAP_COMPILATION]
)
# What one process has compiled, the others need not: workers and the processes that tests start share a cache.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="spmd-trainer-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
