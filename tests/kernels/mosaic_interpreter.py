"""Interprets JAX's Mosaic kernels for GPUs on host devices, with what JAX' interpreter lacks for the grouped products."""

import contextlib
import types

import numpy as np
from jax._src.interpreters import mlir
from jax._src.pallas.mosaic_gpu import core
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.params import force_gpu_interpret_mode

# A layout of registers: nothing to do on a host.
mlir.register_lowering(core.layout_cast_p, mlir.lower_fun(lambda x, **_: x, multiple_results=False), platform="cpu")
_multiply = gpu_callbacks.wgmma


def _multiply_transposed(*, a_transforms, b_transforms, **given):
    """`wgmma` of the interpreter, whose operands may be transposed."""
    kept, turned = [], []
    for transforms in (a_transforms, b_transforms):
        kept.append(tuple(t for t in transforms if type(t).__name__ != "TransposeTransform"))
        turned.append(len(kept[-1]) < len(transforms))

    def matmul(a, b, dtype):
        a, b = (x.T if turn else x for x, turn in zip((a, b), turned, strict=True))
        return np.matmul(a, b, dtype=dtype)

    numpy, gpu_callbacks.np = gpu_callbacks.np, types.SimpleNamespace(**{**vars(np), "matmul": matmul})
    try:
        return _multiply(a_transforms=kept[0], b_transforms=kept[1], **given)
    finally:
        gpu_callbacks.np = numpy


@contextlib.contextmanager
def interpreted():
    """Kernels called within are interpreted."""
    gpu_callbacks.wgmma = _multiply_transposed
    try:
        with force_gpu_interpret_mode():
            yield
    finally:
        gpu_callbacks.wgmma = _multiply
