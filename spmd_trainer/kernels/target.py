"""The device that a program is compiled for."""

from __future__ import annotations

import dataclasses

import jax

from spmd_trainer.kernels import chips


@dataclasses.dataclass(frozen=True)
class Target:
    """The device that a program is compiled for.

    Attributes:
      platform: 'cpu', 'tpu', 'cuda' or 'rocm'.
      kind: `jax.Device.device_kind`, e.g. 'NVIDIA H100 80GB HBM3'.
      compute_capability: of a CUDA GPU, e.g. (9, 0); None if unknown.
    """

    platform: str
    kind: str = ""
    compute_capability: tuple[int, int] | None = None


def current() -> Target:
    """Returns the device of the ambient mesh (`jax.set_mesh`), which may be a topology's. Without a mesh, the first device."""
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    kind = device.device_kind
    return Target(_platform(device.platform, kind), kind, chips.compute_capability(kind))


def _platform(platform: str, kind: str) -> str:
    """Returns the platform's name; JAX says 'gpu' for CUDA and ROCm alike."""
    if platform != "gpu":
        return platform
    return "rocm" if kind.startswith(("AMD", "gfx")) else "cuda"
