"""Eight host devices for every test, whatever the machine has. Must act before JAX is imported."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [
        flag
        for flag in os.environ.get("XLA_FLAGS", "").split()
        if not flag.startswith("--xla_force_host_platform_device_count")
    ]
    # Compiling is most of what tests do; how much LLVM optimizes changes none of the results they look at.
    + ["--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"]
)
