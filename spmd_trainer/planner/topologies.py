"""Compile-only devices for TPU and GPU topologies: programs can be compiled for these devices, but not run."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Sequence

import jax

from spmd_trainer.errors import MissingCompilerError, UserError, did_you_mean, installation
from spmd_trainer.kernels.chips import BY_TOPOLOGY, Gpu

_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    # Only the compiler is used, so another process on this machine may keep its TPU chips.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_SHAPE, _GPU_SHAPE = re.compile(r"\d+(x\d+)+"), re.compile(r"[1-9]\d*x[1-9]\d*")
# JAX's plugins for CUDA, by the package extra that installs them.
_PLUGINS = {"cuda12": "jax_plugins.xla_cuda12", "cuda13": "jax_plugins.xla_cuda13"}


def run_on_host() -> None:
    """Makes JAX use the CPU in this process, which then neither takes an accelerator's memory nor waits for an accelerator.

    For processes that only compile programs. Call this function before JAX initializes any device.
    """
    jax.config.update("jax_platforms", "cpu")


def has_gpu_compiler() -> bool:
    """Returns True if JAX's plugin for CUDA, which compiles for GPUs, is installed. Does not import the plugin."""
    return bool(importlib.util.find_spec("jax_plugins")) and any(map(importlib.util.find_spec, _PLUGINS.values()))


def topology_devices(topology: str, num_slices: int = 1) -> Sequence[jax.Device]:
    """Returns the compile-only devices of a topology.

    Args:
      topology: chip and shape. For TPUs, e.g. 'v5e:16x16' or 'v5p:8x8x8'; for NVIDIA GPUs, hosts x GPUs per host, e.g.
        'h100:32x8'.
      num_slices: number of slices with this shape, connected by the data-center network. For GPUs, multiplies the host count.

    Raises:
      UserError: the chip or the shape is unknown, or a host doesn't have that many GPUs.
      MissingCompilerError: the package extra with the compiler for these chips is not installed.
    """
    name, _, shape = topology.partition(":")
    chip = BY_TOPOLOGY.get(name)
    if chip is None or not (_GPU_SHAPE if chip.gpu else _SHAPE).fullmatch(shape):
        meant = did_you_mean(name.lower(), BY_TOPOLOGY, otherwise="") if chip is None else ""
        raise UserError(
            f"--topology={topology} is not of the form CHIP:SHAPE, e.g. v5e:16x16, or h100:32x8 for 32 hosts with 8 GPUs "
            f"each; known chips: {', '.join(BY_TOPOLOGY)}{meant}"
        )
    if chip.gpu is not None:
        hosts, gpus = map(int, shape.split("x"))
        if gpus > chip.gpu.per_host:
            raise UserError(
                f"--topology={topology}: {gpus} GPUs per host; a host has at most {chip.gpu.per_host}. The form is HOSTSxGPUS, "
                f"e.g. {name}:{max(1, hosts * gpus // chip.gpu.per_host)}x{chip.gpu.per_host}"
            )
        return _gpu_devices(chip.gpu, num_slices, hosts, gpus)
    return _tpu_devices(topology, num_slices)


def _tpu_devices(topology: str, num_slices: int) -> Sequence[jax.Device]:
    from jax.experimental import topologies

    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    options = {"num_slices": num_slices} if num_slices > 1 else {}
    try:
        devices: Sequence[jax.Device] = topologies.get_topology_desc(
            platform="tpu", topology_name=topology, **options
        ).devices
    except Exception as error:
        text = str(error)
        if "TPU support not installed" in text or "libtpu" in text:
            raise MissingCompilerError(
                f"--topology needs the TPU compiler: install it with `{installation.install_extra('tpu')}`, or use --plan to "
                "plan for the available devices"
            ) from error
        raise UserError(
            f"--topology={topology}: the TPU compiler does not support this topology ({text.splitlines()[0]})"
        ) from error
    return devices


def _gpu_devices(gpu: Gpu, num_slices: int, hosts: int, gpus: int) -> Sequence[jax.Device]:
    """Returns the devices of `num_slices` groups of `hosts` hosts with `gpus` GPUs each."""
    from jax.experimental import topologies

    # When registered, the plugin looks for GPUs and checks their driver. The compiler needs neither.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

    def description() -> Sequence[jax.Device]:
        devices: Sequence[jax.Device] = topologies.get_topology_desc(
            "", "cuda", target_config=target_config(gpu), topology=f"{num_slices}x{hosts}x{gpus}"
        ).devices
        return devices

    try:
        return description()
    except NotImplementedError:
        # There is no plugin, or JAX was in use before and skipped the plugin because no driver answered.
        _register_plugin()
        return description()


def _register_plugin() -> None:
    for module in _PLUGINS.values():
        try:
            plugin = importlib.import_module(module)
        except ImportError:
            continue
        plugin.initialize()
        return
    raise MissingCompilerError(
        f"--topology needs the GPU compiler: install it with `{installation.install_extra('plan-gpu')}`, or use "
        "--plan to plan for the available devices"
    )


def target_config(gpu: Gpu) -> str:
    """Returns XLA's description of a GPU, a `GpuTargetConfigProto` as text.

    Limits that are equal for all GPUs of compute capability 8.0 and later are constants in the text.
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
