"""Computes how long a collective takes on the links between chips, from its bytes and the coordinates of its devices.

Times assume ring algorithms, and depend only on bandwidth. Latency is computed separately. Contention between collectives is
ignored. `MeasuredRates` are rates that chips reached in published benchmarks. They determine the upper end of an estimated time.
None of them was measured in a training run. The letters in the code's comments refer to these sources:

a. Matrix products of the fastest shapes: https://github.com/stas00/ml-engineering, compute/accelerator, "Maximum Achievable
   Matmul FLOPS". OpenXLA's own table (xla/service/gpu/model/matmul_interpolator_data.h) ends at 805 TFLOP/s for H100.
b. Products of 8,192 x 8,192 matrices on v5e: https://docs.jax.dev/en/latest/pallas/tpu/matmul.html, "XLA matmul", 92.3% of the
   peak. No source was found for v4 and v5p. The same share is assumed, because their MXUs have the same size.
c. Products of 8,192 x 8,192 matrices, and a copy of 32 MiB at 83% of the bandwidth, on v6e:
   https://github.com/AI-Hypercomputer/tpu-recipes, microbenchmarks. The share of the bandwidth is assumed for other TPUs too.
d. A copy in the memory of an H100, 2,903 GB/s: https://github.com/aigatech/vpbenchmarking. The share of the bandwidth, 86.6%,
   is assumed for other GPUs too.
e. `lax.ppermute` on v5p and v6e, fitted to payloads from 1 KiB to 64 MiB: https://github.com/marin-community/marin/issues/6736.
   v5p's share is assumed for v4.
f. An all-gather of 34 MB by 4 chips of v5e, 680 us: https://jax-ml.github.io/scaling-book/sharding, which also has the latency
   of a hop, 1 us.
g. nccl-tests of 8 GPUs, with rings: https://github.com/stas00/ml-engineering, network. A100's all-reduce, H200's all-gather
   (H100 has the same NVLinks), B200's all-reduce without SHARP (assumed for GB200 too). Latency: an all-reduce of 32 KiB within
   a host takes 40 us on H200 (assumed for A100 and H100 too) and 48 us on B200; one of 1 MiB by 4 hosts of B200 takes 378 us.
h. An all-reduce of 1 MiB by 2 hosts of H100, 203 us (assumed for A100 and H200 too):
   https://github.com/lessizzmore/create-a3mega-ztan-fork, ztan-NCCL-test-result.
i. cuDNN's attention on H100 (assumed for H200 too), rows of 4,096 tokens, heads of width 128: arXiv:2407.08608, figures 5 and 6.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from spmd_trainer.kernels.chips import Chip, chip
from spmd_trainer.planner.hlo_collectives import Collective

# NVLink domains with more GPUs than this connect several hosts.
_GPUS_OF_HOST = 8


@dataclasses.dataclass(frozen=True)
class MeasuredRates:
    """Measured rates of a chip.

    Attributes:
      products: bfloat16 FLOP/s of large matrix products.
      memory: share of the main memory's peak bandwidth that a copy reaches.
      links: share of the peak bandwidth of ICI or NVLink that large collectives reach.
      latency: seconds that a small collective takes within an NVLink domain; on TPUs, seconds per hop.
      network_latency: seconds that a small collective takes between NVLink domains; 0 for TPUs.
      attention: FLOP/s of the attention kernel, as (forward, backward); None if no published measurement was found.
    """

    products: float
    memory: float
    links: float
    latency: float
    network_latency: float = 0.0
    attention: tuple[float, float] | None = None


@dataclasses.dataclass(frozen=True)
class Machine:
    """Bandwidths and other rates of a chip; `chip` has the peak FLOP/s. Bandwidths are in bytes per second.

    Attributes:
      kind: beginning of the chip's `jax.Device.device_kind`.
      memory: bandwidth of the main memory. In `MACHINES`, 0 for GPUs; `machine` takes it from `chips.CHIPS`.
      link: bandwidth in one direction. TPU: of one ICI link. NVIDIA GPU: of all its NVLinks together.
      network: bandwidth in one direction, per chip, between TPU slices or NVLink domains.
      inside: name of the links within a slice or an NVLink domain, e.g. 'ICI'.
      outside: name of the network between slices or NVLink domains, e.g. 'DCN'.
      wraps_at: TPU: smallest size at which a torus dimension wraps around (its ends are linked); 0 for GPUs.
      cubes: TPU: True if torus dimensions wrap around only in slices in which each dimension is a multiple of `wraps_at`.
      domain_devices: maximum number of GPUs in an NVLink domain. If it is at most 8, a domain is one host. 0 for TPUs.
      matrix_side: TPU: number of rows, and of columns, of a matrix unit; 0 for GPUs.
      vector_ops: float32 operations per second of the vector units. In `MACHINES`, 0 for GPUs; `machine` computes it.
    """

    kind: str
    memory: float
    link: float
    network: float
    inside: str
    outside: str
    measured: MeasuredRates
    wraps_at: int = 0
    cubes: bool = False
    domain_devices: int = 0
    matrix_side: int = 0
    vector_ops: float = 0.0

    @property
    def chip(self) -> Chip:
        """The chip, with its peak FLOP/s."""
        known = chip(self.kind)
        assert known is not None, self.kind
        return known


_TPU_MEMORY, _GPU_MEMORY = 1359.6 / 1638, 2903 / 3352.32  # c, d
_V5_PRODUCTS = 181.82 / 197  # b
_HOP = 1e-6  # f
_HOPPER_NETWORK, _BLACKWELL_NETWORK = 203e-6, 378e-6  # h, g
_HOPPER_ATTENTION = (609e12, 499e12)  # i

TPU_V4 = MeasuredRates(_V5_PRODUCTS * 275e12, _TPU_MEMORY, 86.3 / 100, _HOP)  # b, c, e
TPU_V5E = MeasuredRates(181.82e12, _TPU_MEMORY, 0.75 * 33.55e6 / 680e-6 / 50e9, _HOP)  # b, c, f
TPU_V5P = MeasuredRates(_V5_PRODUCTS * 459e12, _TPU_MEMORY, 86.3 / 100, _HOP)  # b, c, e
TPU_V6E = MeasuredRates(827.5e12, _TPU_MEMORY, 86.8 / 100, _HOP)  # c, e
A100 = MeasuredRates(271.2e12, _GPU_MEMORY, 234.9 / 300, 40e-6, _HOPPER_NETWORK)  # a, d, g, h
H100 = MeasuredRates(794.5e12, _GPU_MEMORY, 361.4 / 450, 40e-6, _HOPPER_NETWORK, _HOPPER_ATTENTION)  # a, d, g, h, i
H200 = MeasuredRates(794.5e12, _GPU_MEMORY, 361.4 / 450, 40e-6, _HOPPER_NETWORK, _HOPPER_ATTENTION)  # a, d, g, h, i
B200 = MeasuredRates(1745e12, _GPU_MEMORY, 682.2 / 900, 48e-6, _BLACKWELL_NETWORK)  # a, d, g
GB200 = MeasuredRates(1822e12, _GPU_MEMORY, 682.2 / 900, 48e-6, _BLACKWELL_NETWORK)  # a, d, g

# TPUs (https://docs.cloud.google.com/tpu/docs/v4, v5e, v5p, v6e): memory; the ICI bandwidth of a chip in both directions, v5e
# 400, v5p 1,200 and v6e 800 GB/s, and v4's 2,400 Gbit/s in one, here per link (v5e and v6e have 4, v4 and v5p 6); and the
# data-center network of 256 chips, v5e 6.4 and v6e 25.6 Tbit/s. Dimensions of v4 and v5p wrap around in slices of whole cubes of
# 4 x 4 x 4 chips, those of v5e and v6e if they have 16 chips. The network of v4 and v5p:
# https://jax-ml.github.io/scaling-book/tpus.
# Matrix units of 128 x 128, from v6e on of 256 x 256: https://docs.cloud.google.com/tpu/docs/v6e and
# https://jax-ml.github.io/scaling-book/tpus, which also has the vector units: 8 x 128 lanes in each core, with 2 ALUs in v4 and 4
# in v5. The clock is that at which the matrix units reach the peak (numbers of cores and units: `jax.experimental.pallas.tpu`'s
# `get_tpu_info`): 1.05, 1.5, 1.75 and, with two rows per cycle, 1.75 GHz in v6e.
# GPUs: memory is in `chips.CHIPS`. NVLink is half of the bandwidth in both directions of NVIDIA's data sheets: A100 600, H100 and
# H200 900, B200 and GB200 1,800 GB/s. Network: one port per GPU, of 200 Gbit/s in DGX A100 and of 400 Gbit/s in DGX H100, H200,
# B200 and GB200 (their data sheets). 18 hosts of 4 GPUs are one NVLink domain in GB200 NVL72.
MACHINES = (
    # kind, memory, link, network, their names, measured, wraps_at, cubes, domain_devices, matrix_side, vector_ops
    Machine("TPU v4", 1228e9, 50e9, 6.25e9, "ICI", "DCN", TPU_V4, 4, True, 0, 128, 2 * 2 * 1024 * 1.05e9),
    Machine("TPU v5 lite", 819e9, 50e9, 3.125e9, "ICI", "DCN", TPU_V5E, 16, False, 0, 128, 4 * 1024 * 1.5e9),
    Machine("TPU v5e", 819e9, 50e9, 3.125e9, "ICI", "DCN", TPU_V5E, 16, False, 0, 128, 4 * 1024 * 1.5e9),
    Machine("TPU v5", 2765e9, 100e9, 6.25e9, "ICI", "DCN", TPU_V5P, 4, True, 0, 128, 2 * 4 * 1024 * 1.75e9),
    Machine("TPU v6", 1638e9, 100e9, 12.5e9, "ICI", "DCN", TPU_V6E, 16, False, 0, 256, 4 * 1024 * 1.75e9),
    Machine("NVIDIA A100-SXM4-80GB", 0, 300e9, 25e9, "NVLink", "network", A100, domain_devices=8),
    Machine("NVIDIA H100 80GB HBM3", 0, 450e9, 50e9, "NVLink", "network", H100, domain_devices=8),
    Machine("NVIDIA H200", 0, 450e9, 50e9, "NVLink", "network", H200, domain_devices=8),
    Machine("NVIDIA B200", 0, 900e9, 50e9, "NVLink", "network", B200, domain_devices=8),
    Machine("NVIDIA GB200", 0, 900e9, 50e9, "NVLink", "network", GB200, domain_devices=72),
)


def machine(device_kind: str) -> Machine | None:
    """Returns the rates of the chip with this `device_kind`; None if they are unknown."""
    known = chip(device_kind)
    found = next((m for m in MACHINES if known is not None and device_kind.startswith(m.kind)), None)
    if found is None or known is None or found.memory:
        return found
    if known.gpu is None:
        return None
    cores = known.gpu.multiprocessors * known.gpu.lanes
    return dataclasses.replace(found, memory=float(known.gpu.bandwidth), vector_ops=cores * known.gpu.clock_ghz * 1e9)


def _nvlink_domains(hosts: np.ndarray, slices: np.ndarray, most: int) -> np.ndarray:
    """Returns the index of each device's NVLink domain, int [devices].

    A domain lies in one slice. A domain of at most 8 devices lies in one host.

    Args:
      hosts: index of each device's host, int [devices].
      slices: index of each device's slice, int [devices].
      most: maximum number of devices in a domain.
    """
    places = np.empty_like(hosts)  # within the slice, host by host
    for number in np.unique(slices):
        members = np.flatnonzero(slices == number)
        places[members[np.argsort(hosts[members], kind="stable")]] = np.arange(len(members))
    inside = hosts if most <= _GPUS_OF_HOST else places // most
    domains: np.ndarray = np.unique(np.stack([slices, inside]), axis=1, return_inverse=True)[1]
    return domains


@dataclasses.dataclass(frozen=True)
class LinkTime:
    """Seconds that a collective spends on the links inside slices (or NVLink domains), and on the network between them."""

    inside: float
    outside: float


class Links:
    """The links between a mesh's devices. A collective's `groups` must index the mesh's devices in row-major order."""

    def __init__(self, devices: Sequence[jax.Device], found: Machine):
        self._machine = found
        if found.domain_devices:
            hosts = np.array([device.process_index for device in devices])
            slices = np.array([getattr(device, "slice_index", 0) or 0 for device in devices])
            self._domains = _nvlink_domains(hosts, slices, found.domain_devices)
            self._coordinates = np.zeros((len(devices), 0), int)
        else:
            self._domains = np.array([getattr(device, "slice_index", 0) or 0 for device in devices])
            self._coordinates = np.array([device.coords for device in devices])
        self._sizes = self._coordinates.max(0, initial=0) + 1
        if found.cubes:
            self._wraps = np.full(len(self._sizes), bool((self._sizes % found.wraps_at == 0).all()))
        else:
            self._wraps = self._sizes >= found.wraps_at

    def seconds(self, collective: Collective) -> LinkTime:
        """Returns the seconds of one execution of a collective at the peak bandwidth, without latency."""
        if collective.kind == "collective-permute":
            return self._permute(collective)
        groups = collective.groups
        if not groups.size:
            groups = np.arange(len(self._domains))[None]
        # Groups usually take equally long. Check the first, middle and last in case they don't.
        times = [self._of_group(collective, groups[n]) for n in sorted({0, len(groups) // 2, len(groups) - 1})]
        return max(times, key=lambda time: time.inside + time.outside)

    def latency(self, collective: Collective) -> float:
        """Returns the latency of one execution in seconds: on TPUs, from the hops in its rings; on GPUs, as measured for NCCL."""
        reached = self._machine.measured
        if collective.kind == "collective-permute" and collective.groups.size:
            pairs = self._domains[collective.groups]
            crosses = bool((pairs[:, 0] != pairs[:, 1]).any())
            return reached.network_latency if crosses and reached.network_latency else reached.latency
        members = collective.groups[0] if collective.groups.size else np.arange(len(self._domains))
        domains = self._domains[members]
        near = members[domains == domains[0]]
        outside = reached.network_latency if len(near) < len(members) else 0.0
        if len(near) == 1:
            return outside
        if self._machine.domain_devices:
            return outside or reached.latency
        passes = 2 if collective.kind == "all-reduce" else 1
        return outside + passes * reached.latency * sum(hops for _, _, hops in self._rings(near))

    def _of_group(self, collective: Collective, members: np.ndarray) -> LinkTime:
        if len(members) == 1:
            return LinkTime(0.0, 0.0)
        domains, counts = np.unique(self._domains[members], return_counts=True)
        inner, outer = int(counts.min()), len(domains)
        near = members[self._domains[members] == domains[0]]
        size, total = collective.num_bytes, len(members)
        if collective.kind in ("all-to-all", "ragged-all-to-all"):
            inside = self._exchange(near, size * len(near) / total)
            return LinkTime(inside, size * (total - inner) / total / self._machine.network if outer > 1 else 0.0)
        # Devices of a domain exchange first, then each device exchanges its part with the other domains (or in reverse order).
        passes = 2 if collective.kind == "all-reduce" else 1
        inside = size * (inner - 1) / inner / self._bandwidth(near) if inner > 1 else 0.0
        outside = size / inner * (outer - 1) / outer / self._machine.network
        return LinkTime(passes * inside, passes * outside)

    def _rings(self, members: np.ndarray) -> list[tuple[int, float, int]]:
        """Returns a group's rings, one per torus dimension that it spans, as (number of devices, bytes per second, hops).

        The group of devices (`members`) must lie within one slice.
        """
        places = self._coordinates[members]
        rings = []
        for dim, whole in enumerate(self._sizes):
            values = np.unique(places[:, dim])
            if len(values) == 1:
                continue
            stride = int(np.diff(values).min())  # `stride` groups share the dimension's links
            wraps = self._wraps[dim] and len(values) * stride == whole
            hops = len(values) // 2 if wraps else len(values) - 1
            rings.append((len(values), self._machine.link * (2 if wraps else 1) / stride, hops * stride))
        return rings

    def _bandwidth(self, members: np.ndarray) -> float:
        """Returns the bytes per second at which a device receives an array that is sharded over a group within one domain."""
        if self._machine.domain_devices:
            return self._machine.link
        rings = self._rings(members)
        is_box = np.prod([size for size, _, _ in rings]) == len(members)
        bandwidths = [bandwidth for _, bandwidth, _ in rings]
        return sum(bandwidths) if is_box else min(bandwidths)

    def _exchange(self, members: np.ndarray, size: float) -> float:
        """Returns the seconds of an all-to-all of `size` bytes per device within a domain (on TPUs, in the slowest ring)."""
        if len(members) == 1:
            return 0.0
        if self._machine.domain_devices:
            return size * (len(members) - 1) / len(members) / self._machine.link
        # Half of a ring's data crosses its middle.
        return max(count * size / (4 * bandwidth) for count, bandwidth, _ in self._rings(members))

    def _permute(self, collective: Collective) -> LinkTime:
        size, pairs = collective.num_bytes, collective.groups
        if not pairs.size:
            return LinkTime(size / self._machine.link, 0.0)
        crosses = self._domains[pairs[:, 0]] != self._domains[pairs[:, 1]]
        outside = size / self._machine.network if crosses.any() else 0.0
        if crosses.all():
            return LinkTime(0.0, outside)
        if self._machine.domain_devices:
            return LinkTime(size / self._machine.link, outside)
        distance = np.abs(self._coordinates[pairs[:, 0]] - self._coordinates[pairs[:, 1]])[~crosses]
        hops = np.where(self._wraps, np.minimum(distance, self._sizes - distance), distance)
        # On average, a link of a dimension carries one array for each hop of a pair along it.
        return LinkTime(size * max(1.0, float(hops.mean(0).max())) / self._machine.link, outside)
