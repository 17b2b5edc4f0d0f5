"""Memory and peak FLOP/s of a device, by its name in JAX, and the FLOPs of a training step.

JAX only has data for TPUs, for its own kernels (`jax.experimental.pallas.tpu.get_tpu_info`), and none for GPUs.
"""

from __future__ import annotations

import dataclasses

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One JAX device (for TPU v2, v3 and 7x, half a chip).

    Attributes:
      kind: beginning of `jax.Device.device_kind`.
      peak_flops: peak bfloat16 FLOP/s without sparsity.
      memory: device memory in GiB.
      topology: the chip's name in a TPU topology such as v5e:16x16; None if the trainer makes no plans for it.
    """

    kind: str
    peak_flops: float
    memory: int
    topology: str | None = None


# TPUs: https://cloud.google.com/tpu/docs/system-architecture-tpu-vm. GPUs: NVIDIA's data sheets, halved if they assume
# sparsity. The first entry whose kind begins the device's name applies.
CHIPS = (
    Chip("TPU v2", 22.5e12, 8),
    Chip("TPU v3", 61.5e12, 16),
    Chip("TPU v4", 275e12, 32, "v4"),
    Chip("TPU v5 lite", 197e12, 16, "v5e"),
    Chip("TPU v5e", 197e12, 16),
    Chip("TPU v5", 459e12, 95, "v5p"),
    Chip("TPU v6", 918e12, 32, "v6e"),
    Chip("TPU7x", 1153.5e12, 96),
    Chip("NVIDIA A100 80GB", 312e12, 80),
    Chip("NVIDIA A100-SXM4-80GB", 312e12, 80),
    Chip("NVIDIA A100", 312e12, 40),
    Chip("NVIDIA H100 PCIe", 756e12, 80),
    Chip("NVIDIA H100 NVL", 835e12, 94),
    Chip("NVIDIA H100", 989e12, 80),
    Chip("NVIDIA H200 NVL", 835e12, 141),
    Chip("NVIDIA H200", 989e12, 141),
    Chip("NVIDIA B200", 2250e12, 180),
)
BY_TOPOLOGY = {chip.topology: chip for chip in CHIPS if chip.topology}
# An inference chip with another peak, whose name begins like v4's.
_UNKNOWN = ("TPU v4 lite",)


def chip(device_kind: str) -> Chip | None:
    """Returns the chip with this `device_kind`; None for unknown chips and CPUs."""
    if device_kind in _UNKNOWN:
        return None
    return next((c for c in CHIPS if device_kind.startswith(c.kind)), None)


def peak_flops(device_kind: str, count: int) -> float | None:
    """Returns the peak bfloat16 FLOP/s of `count` devices; None for unknown chips."""
    known = chip(device_kind)
    return None if known is None else known.peak_flops * count


def model_flops(num_params: int, tokens: int, *, num_frozen: int = 0) -> float:
    """Returns a training step's FLOPs as 6 * parameters * tokens (Kaplan et al. 2020, arXiv:2001.08361).

    Frozen parameters (`num_frozen`) count 4 * parameters * tokens: they have no gradient of their own. It counts the forward and
    the backward pass, but neither attention's own matrix products nor rematerialisation. All parameters count, also those of
    experts that a token does not use. The compiler's count is not used, because it counts a loop's body once.
    """
    return (6.0 * num_params + 4.0 * num_frozen) * tokens
