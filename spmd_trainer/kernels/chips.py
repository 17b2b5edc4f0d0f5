"""Memory and peak FLOP/s of a device by its name in JAX, FLOPs of a training step, and the device that a program is compiled for.

JAX itself has such data only for TPUs (`jax.experimental.pallas.tpu.get_tpu_info`, for its own kernels).
"""

from __future__ import annotations

import dataclasses

import jax

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Properties of an NVIDIA GPU that XLA's compiler needs.

    Attributes:
      name: the full text of `jax.Device.device_kind`.
      compute_capability: major and minor version.
      multiprocessors: number of streaming multiprocessors.
      lanes: number of float32 units per multiprocessor.
      clock_ghz: maximum clock frequency of the multiprocessors.
      memory_bytes: memory that CUDA reports, which is less than the data sheet's.
      bandwidth: bandwidth of the memory in bytes per second.
      l2_bytes: size of the L2 cache.
      shared_bytes: shared memory of a multiprocessor. A thread block may use all but 1 KiB of it.
      per_host: maximum number of GPUs in a host.
    """

    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    lanes: int
    clock_ghz: float
    memory_bytes: int
    bandwidth: int
    l2_bytes: int
    shared_bytes: int
    per_host: int = 8


@dataclasses.dataclass(frozen=True)
class Chip:
    """One JAX device (for TPU v2, v3 and 7x, half a chip).

    Attributes:
      kind: prefix of `jax.Device.device_kind`.
      peak_flops: peak bfloat16 FLOP/s without sparsity.
      memory: device memory in GiB, as the data sheet says.
      topology: the chip's name in a topology such as v5e:16x16 or h100:32x8; None if the planner doesn't support it.
      gpu: properties of an NVIDIA GPU for the compiler; None for TPUs, and for GPUs without `topology`.
    """

    kind: str
    peak_flops: float
    memory: int
    topology: str | None = None
    gpu: Gpu | None = None

    @property
    def memory_bytes(self) -> int:
        """Bytes of device memory that programs can use."""
        return self.memory * GIB if self.gpu is None else self.gpu.memory_bytes


# What CUDA's device queries return, as XLA publishes it (xla/backends/gpu/target_config/specs/). Names are nvidia-smi's.
_A100 = Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41, 85_100_068_864, 2_039_040_000_000, 41_943_040, 167_936)
_H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 1.98, 84_942_979_072, 3_352_320_000_000, 52_428_800, 233_472)
_H200 = Gpu("NVIDIA H200", (9, 0), 132, 128, 1.98, 151_397_597_184, 4_800_000_000_000, 52_428_800, 233_472)
_B200 = Gpu("NVIDIA B200", (10, 0), 148, 128, 1.965, 191_514_411_008, 7_672_320_000_000, 132_644_864, 233_472)
_GB200 = Gpu("NVIDIA GB200", (10, 0), 152, 128, 2.062, 197_897_748_480, 7_928_064_000_000, 135_528_448, 233_472, 4)

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
    Chip("NVIDIA A100-SXM4-80GB", 312e12, 80, "a100", _A100),
    Chip("NVIDIA A100", 312e12, 40),
    Chip("NVIDIA H100 PCIe", 756e12, 80),
    Chip("NVIDIA H100 NVL", 835e12, 94),
    Chip("NVIDIA H100", 989e12, 80, "h100", _H100),
    Chip("NVIDIA H200 NVL", 835e12, 141),
    Chip("NVIDIA H200", 989e12, 141, "h200", _H200),
    Chip("NVIDIA B200", 2250e12, 180, "b200", _B200),
    Chip("NVIDIA GB200", 2500e12, 186, "gb200", _GB200),
)
BY_TOPOLOGY = {chip.topology: chip for chip in CHIPS if chip.topology}
# Compute capabilities by the beginning of the device's name: https://developer.nvidia.com/cuda-gpus. The first entry applies.
_CAPABILITIES = {
    "Tesla V100": (7, 0),
    "Tesla T4": (7, 5),
    "NVIDIA A100": (8, 0),
    "NVIDIA A30": (8, 0),
    "NVIDIA A10": (8, 6),
    "NVIDIA A40": (8, 6),
    "NVIDIA RTX A": (8, 6),
    "NVIDIA GeForce RTX 30": (8, 6),
    "NVIDIA L4": (8, 9),
    "NVIDIA RTX 6000 Ada": (8, 9),
    "NVIDIA GeForce RTX 40": (8, 9),
    "NVIDIA H100": (9, 0),
    "NVIDIA H20": (9, 0),
    "NVIDIA GH200": (9, 0),
    "NVIDIA B200": (10, 0),
    "NVIDIA GB200": (10, 0),
    "NVIDIA B300": (10, 3),
    "NVIDIA GB300": (10, 3),
    "NVIDIA RTX PRO": (12, 0),
    "NVIDIA GeForce RTX 50": (12, 0),
}
# An inference chip with another peak, whose name begins like v4's.
_UNKNOWN = ("TPU v4 lite",)


def chip(device_kind: str) -> Chip | None:
    """Returns the chip with this `device_kind`; None for unknown chips and CPUs."""
    if device_kind in _UNKNOWN:
        return None
    return next((c for c in CHIPS if device_kind.startswith(c.kind)), None)


def compute_capability(device_kind: str) -> tuple[int, int] | None:
    """Returns an NVIDIA GPU's compute capability, e.g. (9, 0), by its `device_kind`; None for other chips."""
    return next((version for kind, version in _CAPABILITIES.items() if device_kind.startswith(kind)), None)


def peak_flops(device_kind: str, count: int) -> float | None:
    """Returns the peak bfloat16 FLOP/s of `count` devices; None for unknown chips."""
    known = chip(device_kind)
    return None if known is None else known.peak_flops * count


def model_flops(num_params: int, tokens: int, *, num_frozen: int = 0) -> float:
    """Returns a training step's FLOPs as 6 * parameters * tokens (Kaplan et al. 2020, arXiv:2001.08361).

    `num_params` is the number of trained parameters. Frozen parameters add only 4 * num_frozen * tokens, because they need no
    gradient. Both numbers must leave out the experts that a token doesn't choose. The result covers the forward and backward
    passes, without rematerialization and without attention's products of queries, keys and values. The compiler's own count
    isn't used, because it counts a loop's body only once.
    """
    return (6.0 * num_params + 4.0 * num_frozen) * tokens


@dataclasses.dataclass(frozen=True)
class Target:
    """The device that a program is compiled for.

    Attributes:
      platform: 'cpu', 'tpu', 'cuda' or 'rocm'.
      kind: `jax.Device.device_kind`, e.g. 'NVIDIA H100 80GB HBM3'.
      compute_capability: compute capability of a CUDA GPU, e.g. (9, 0); None if unknown, and for other devices.
    """

    platform: str
    kind: str = ""
    compute_capability: tuple[int, int] | None = None


def current_target() -> Target:
    """Returns the device that programs are compiled for: that of the ambient mesh (`jax.set_mesh`), or else the first device."""
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    kind = device.device_kind
    return Target(_platform(device.platform, kind), kind, compute_capability(kind))


def _platform(platform: str, kind: str) -> str:
    """Returns 'cuda' or 'rocm' for JAX's platform 'gpu'; returns any other platform unchanged."""
    if platform != "gpu":
        return platform
    return "rocm" if kind.startswith(("AMD", "gfx")) else "cuda"
