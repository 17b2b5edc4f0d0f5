"""Devices of TPU and GPU topologies that are not here: programs can be compiled for them, but not run."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import jax

from spmd_trainer.errors import MissingCompilerError, UserError, did_you_mean
from spmd_trainer.kernels.chips import BY_TOPOLOGY
from spmd_trainer.planner.nvidia import gpu_devices

_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    # Only the compiler is used, so another process on this machine may keep its TPU chips.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_SHAPE, _GPU_SHAPE = re.compile(r"\d+(x\d+)+"), re.compile(r"[1-9]\d*x[1-9]\d*")


def run_on_host() -> None:
    """Lets JAX run on the CPU in this process, which only compiles: it takes no memory of an accelerator, nor waits for one.

    Call it before any device is touched.
    """
    jax.config.update("jax_platforms", "cpu")


def topology_devices(topology: str, num_slices: int = 1) -> Sequence[jax.Device]:
    """Returns the devices of a topology.

    Args:
      topology: chip and shape. For TPUs, e.g. 'v5e:16x16' or 'v5p:8x8x8'; for NVIDIA GPUs, hosts x GPUs of a host, e.g.
        'h100:32x8'.
      num_slices: number of slices of this shape, connected by the data-center network. For GPUs it multiplies the hosts.

    Raises:
      UserError: an unknown chip or shape, or more GPUs than a host has.
      MissingCompilerError: the extra with its compiler is not installed.
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
        return gpu_devices(chip.gpu, num_slices, hosts, gpus)
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
                "--topology needs the TPU compiler: install it with `uv sync --extra tpu`, or use --plan to plan for the "
                "available devices"
            ) from error
        raise UserError(
            f"--topology={topology}: the TPU compiler does not support this topology ({text.splitlines()[0]})"
        ) from error
    return devices
