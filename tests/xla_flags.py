"""The XLA_FLAGS of the tests: 8 host devices, and how much XLA optimises."""

from packaging.version import Version

DEVICES_FLAG = "--xla_force_host_platform_device_count"
LEVELS = ("cheap", "normal")


def xla_flags(flags: str, level: str, jaxlib: str) -> str:
    """Returns XLA_FLAGS with 8 host devices and the flags of an optimisation level.

    Most of a test's time is compilation. "cheap" turns LLVM's optimisations off and, where XLA still has them, uses the older
    emitters for fusions, because the newer ones (MLIR) take most of a compilation. "normal" leaves XLA's defaults.

    XLA aborts a process whose host devices wait for each other for 40 s, which happens on a busy machine; here they may wait
    for 2 minutes.

    Args:
      flags: XLA_FLAGS of the environment; other flags are kept.
      level: "cheap" or "normal".
      jaxlib: version of jaxlib.

    Raises:
      ValueError: `level` is neither.
    """
    if level not in LEVELS:
        raise ValueError(f"SPMD_TEST_XLA_OPTIMISATION={level!r}: must be {' or '.join(LEVELS)}")
    ours = [f"{DEVICES_FLAG}=8"]
    # XLA aborts the process on a flag that it doesn't know. jaxlib 0.10 knows all of these, 0.12 not all.
    older = Version(jaxlib) < Version("0.11")
    if older:
        ours.append("--xla_cpu_collective_call_terminate_timeout_seconds=120")
    if level == "cheap":
        ours.append("--xla_backend_optimization_level=0")
        if older:
            ours.append("--xla_cpu_use_fusion_emitters=false")
    kept = [flag for flag in flags.split() if not flag.startswith(DEVICES_FLAG) and flag not in ours]
    return " ".join(kept + ours)
