"""NVIDIA GPUs that are not here, for XLA's compiler: it needs the `cuda12` or `cuda13` extra, but neither a GPU nor a driver."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence

import jax

from spmd_trainer.errors import MissingCompilerError
from spmd_trainer.kernels.chips import Gpu

# JAX's plugins for CUDA, by the extra that installs them.
_PLUGINS = {"cuda12": "jax_plugins.xla_cuda12", "cuda13": "jax_plugins.xla_cuda13"}


def gpu_devices(gpu: Gpu, num_slices: int, hosts: int, gpus: int) -> Sequence[jax.Device]:
    """Returns compile-only devices: `num_slices` groups of `hosts` hosts with `gpus` GPUs each.

    Raises:
      MissingCompilerError: no extra for CUDA is installed.
    """
    from jax.experimental import topologies

    # At its registration the plugin looks for GPUs to check their driver. The compiler needs neither.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

    def description() -> Sequence[jax.Device]:
        devices: Sequence[jax.Device] = topologies.get_topology_desc(
            "", "cuda", target_config=target_config(gpu), topology=f"{num_slices}x{hosts}x{gpus}"
        ).devices
        return devices

    try:
        return description()
    except (
        NotImplementedError
    ):  # there is no plugin, or JAX has left it out: it was in use before, and no driver answered
        _register_plugin()
        return description()


def _register_plugin() -> None:
    """Registers JAX's plugin for CUDA."""
    for module in _PLUGINS.values():
        try:
            plugin = importlib.import_module(module)
        except ImportError:
            continue
        plugin.initialize()
        return
    raise MissingCompilerError(
        "--topology needs the GPU compiler: install it with `uv sync --extra cuda12` (or cuda13), or use --plan to plan for "
        "the available devices"
    )


def target_config(gpu: Gpu) -> str:
    """Returns XLA's description of a GPU, a `GpuTargetConfigProto` as text.

    Limits that are the same for all GPUs from compute capability 8.0 on are written here.
    """
    major, minor = gpu.compute_capability
    # From Hopper on, code for exactly this capability (sm_90a) may use instructions that others don't have, as on the GPU itself.
    extension = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_bytes}
  shared_memory_per_block_optin: {gpu.shared_bytes - 1024}
  threads_per_core_limit: 2048
  core_count: {gpu.multiprocessors}
  fpus_per_core: {gpu.lanes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {gpu.bandwidth}
  l2_cache_size: {gpu.l2_bytes}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} {extension} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
device_description_str: "{gpu.name}"
"""
