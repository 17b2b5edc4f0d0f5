"""What chips achieve in published measurements, for the slow end of an estimate. None of them is of a training run.

Sources, by the letters in the table:

a. Matrix products of the fastest shapes: https://github.com/stas00/ml-engineering, compute/accelerator, "Maximum Achievable
   Matmul FLOPS". OpenXLA's own table (xla/service/gpu/model/matmul_interpolator_data.h) ends at 805 TFLOP/s for H100.
b. Products of 8,192 x 8,192 matrices on v5e: https://docs.jax.dev/en/latest/pallas/tpu/matmul.html, "XLA matmul", 92.3% of the
   peak. No source was found for v4 and v5p, whose MXUs have the same size: the same share is assumed.
c. Products of 8,192 x 8,192 matrices, and a copy of 32 MiB at 83% of the bandwidth, on v6e:
   https://github.com/AI-Hypercomputer/tpu-recipes, microbenchmarks. The share of the bandwidth is assumed for other TPUs too.
d. A copy in the memory of an H100, 2,903 GB/s: https://github.com/aigatech/vpbenchmarking. The share of the bandwidth, 86.6%,
   is assumed for other GPUs too. e. `lax.ppermute` on v5p and v6e, fitted to payloads from 1 KiB to 64 MiB:
   https://github.com/marin-community/marin/issues/6736. v5p's share is assumed for v4. f. An all-gather of 34 MB by 4 chips
   of v5e, 680 us: https://jax-ml.github.io/scaling-book/sharding, which also has the latency of a hop, 1 us. g. nccl-tests of
   8 GPUs, with rings: https://github.com/stas00/ml-engineering, network. A100's all-reduce, H200's all-gather (H100 has the
   same NVLinks), B200's all-reduce without SHARP (assumed for GB200 too). Latency: an all-reduce of 32 KiB within a host
   takes 40 us on H200 (assumed for A100 and H100 too) and 48 us on B200; one of 1 MiB by 4 hosts of B200 378 us. h. An
   all-reduce of 1 MiB by 2 hosts of H100, 203 us (assumed for A100 and H200 too):
   https://github.com/lessizzmore/create-a3mega-ztan-fork, ztan-NCCL-test-result. i. cuDNN's attention on H100 (assumed for
   H200 too), rows of 4,096 tokens, heads of width 128: arXiv:2407.08608, figures 5 and 6.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class MeasuredRates:
    """Measured rates of a chip.

    Attributes:
      products: bfloat16 FLOP/s of large matrix products.
      memory: share of the main memory's bandwidth that a copy reaches.
      links: share of the bandwidth of ICI or NVLink that large collectives reach.
      latency: seconds that a small collective takes; on TPUs, per hop.
      network_latency: the same between NVLink domains; 0 for TPUs.
      attention: FLOP/s of the attention kernel's forward and backward pass; None if no source was found.
    """

    products: float
    memory: float
    links: float
    latency: float
    network_latency: float = 0.0
    attention: tuple[float, float] | None = None


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
