"""Products of sparse experts on one NVIDIA Hopper GPU: errors and rates of the kernel 'hopper'.

    python -m benchmarks.grouped_products [--rounds 5] [--json FILE]

For sizes with empty groups, one full group, rows of no group and widths that no block divides, it prints the relative error
||hopper - blocks|| / ||blocks|| of the product, the product with transposed weights and the weights' gradient, in bfloat16. For
OLMoE's layer (64 experts of 2,048 x 1,024, 131,072 rows) it also prints TFLOP/s, beside those of one dense product. Exits with
2 without such a GPU, and with 1 if an error is over 1e-3.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import gpu, reporting
from spmd_trainer.kernels import chips, grouped_blocks, hopper
from spmd_trainer.kernels.grouped_dot import GroupedKernel

MOST_ERROR = 1e-3


class Case(NamedTuple):
    """Rows [M, K] x [G, K, N], of which `rest` belong to no group; `only_one`: all others belong to one group."""

    rows: int
    inputs: int
    outputs: int
    groups: int
    rest: int = 0
    only_one: bool = False

    @property
    def sizes(self) -> np.ndarray:
        """Rows of each group, int32 [G]; some groups are empty."""
        rng, held = np.random.default_rng(0), self.rows - self.rest
        cuts = np.sort(rng.integers(0, held + 1, self.groups - 1))
        cuts[: self.groups // 4] = 0
        if self.only_one:
            cuts = np.repeat([0, held], [self.groups // 2, self.groups - 1 - self.groups // 2])
        return np.diff(cuts, prepend=0, append=held).astype(np.int32)


LARGE = Case(131_072, 2048, 1024, 64, rest=300)
CASES = (
    LARGE,
    Case(1000, 2880, 720, 32, rest=7),
    Case(130, 100, 60, 3),
    Case(4096, 256, 384, 8, rest=100, only_one=True),
    Case(64, 128, 128, 4, rest=64),
    Case(50, 128, 256, 128, rest=3),
    Case(8192, 1536, 768, 128),
)


def products(kernel: GroupedKernel) -> dict[str, Callable[..., jax.Array]]:
    """Returns the three products as functions of rows [M, K], others [M, N], weights [G, K, N] and sizes."""
    return {
        "product": lambda x, y, w, sizes: kernel.product(x, w, sizes, transposed=False),
        "transposed": lambda x, y, w, sizes: kernel.product(y, w, sizes, transposed=True),
        "gradient of the weights": lambda x, y, w, sizes: kernel.weights_product(x, y, sizes),
    }


def error(found: jax.Array, expected: jax.Array) -> float:
    """Returns the relative error; infinity if something is not finite."""
    x, y = (np.asarray(array, np.float32) for array in (found, expected))
    norm = float(np.linalg.norm(y)) or 1.0
    return float(np.linalg.norm(x - y)) / norm if np.isfinite(x).all() else float("inf")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures on the first device; returns the exit status."""
    options = reporting.parser(__doc__, rounds=5).parse_args(arguments)
    target = chips.current_target()
    if target.platform != "cuda" or (target.compute_capability or (0, 0))[0] != 9:
        sys.stderr.write(f"benchmarks.grouped_products: needs a Hopper GPU, but the first device is {target.kind}\n")
        return 2
    report = reporting.Report("grouped_products", options.json)
    report.note("device", f"{target.kind}, JAX {jax.__version__}")
    for case in CASES:
        keys = jax.random.split(jax.random.key(case.rows), 3)
        shapes = ((case.rows, case.inputs), (case.rows, case.outputs), (case.groups, case.inputs, case.outputs))
        arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]
        arrays.append(jnp.asarray(case.sizes))
        for name, of_hopper in products(hopper).items():
            found = jax.jit(of_hopper)
            off = error(found(*arrays), jax.jit(products(grouped_blocks)[name])(*arrays))
            report.figure(f"{tuple(case)} {name}, error", off)
            if off > MOST_ERROR:
                report.fails(f"{tuple(case)} {name}: the error is over {MOST_ERROR}")
            if case is LARGE:
                flops = 2.0 * case.rows * case.inputs * case.outputs
                step = functools.partial(found, *arrays)
                gpu.window(step)
                rates = [flops / gpu.window(step) for _ in range(options.rounds)]
                report.figure(f"{name}, rate", rates, "TFLOP/s", scale=1e-12)
    dense = gpu.product_rate(gpu.PRODUCT, options.rounds)
    report.figure("product of two bfloat16 matrices of 8,192", dense, "TFLOP/s", scale=1e-12)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
