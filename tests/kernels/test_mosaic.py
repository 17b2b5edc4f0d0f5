"""Grouped products on Hopper: compiled for GPUs that are not here, and interpreted."""

import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
import mosaic_interpreter
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from sparse_experts import (
    PRODUCTS,
    QWEN,
    active_flops,
    experts_times_tokens,
    flops,
    product_and_gradients,
    shapes,
    sparse,
    traced,
)

from spmd_trainer import sharding
from spmd_trainer.kernels import chips, grouped_blocks, mosaic
from spmd_trainer.planner.topologies import topology_devices

needs_gpu_compiler = pytest.mark.skipif(
    not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)),
    reason="the GPU compiler is not installed: make test-gpu-compiler",
)


@needs_gpu_compiler
def test_hopper_s_tensor_cores_multiply_the_chosen_experts_only():
    """Compiled to machine code for an H100, forward and backward."""
    mesh = sharding.create_device_mesh([("data", 2), ("mdl", 2)], devices=topology_devices("h100:1x4"))
    by_row, into, back = (PartitionSpec(*axes) for axes in (["data"], [None, "data", "mdl"], [None, "mdl", "data"]))
    layer = functools.partial(sparse, batch=("data",), embed=("data",), mlp=("mdl",))
    with jax.set_mesh(mesh):
        lowered = traced(layer, shapes(QWEN, [by_row] * 3 + [into, into, back], mesh)).lower()
    hlo = lowered.compile().as_text()
    assert flops(hlo) == active_flops(QWEN) / 4
    assert len(re.findall('custom_call_target="mosaic_gpu', hlo)) == PRODUCTS
    assert not experts_times_tokens(hlo, QWEN, QWEN.batch * QWEN.length // 2)


@pytest.mark.parametrize(
    ("count", "width", "other", "sizes"),
    [
        (64, 64, 192, [5, 0, 0, 30]),
        pytest.param(320, 128, 64, [100, 0, 57, 3, 160], marks=pytest.mark.full),
        pytest.param(64, 64, 64, [0, 0, 0], marks=pytest.mark.full),
        pytest.param(256, 192, 128, [130, 1, 99], marks=pytest.mark.full),
    ],
)
def test_hopper_s_kernels_give_the_numbers_of_blocks(count, width, other, sizes):
    """Interpreted, in bfloat16. Rows after the last group are zeros, and nothing of a row gets into another group."""
    rng = np.random.default_rng(0)
    arrays = [
        jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
        for shape in ((count, width), (count, other), (len(sizes), width, other))
    ]
    sizes = jnp.asarray(sizes, jnp.int32)
    with mosaic_interpreter.interpreted():
        ours = product_and_gradients(mosaic.KERNEL, *arrays, sizes)
    for found, expected in zip(ours, product_and_gradients(grouped_blocks.KERNEL, *arrays, sizes), strict=True):
        found, expected = np.asarray(found, np.float32), np.asarray(expected, np.float32)
        # Sums are in float32: only the last rounding to bfloat16 may differ.
        np.testing.assert_allclose(found, expected, rtol=2**-7, atol=1e-4)
    assert not np.asarray(ours[0])[int(sizes.sum()) :].any()


@pytest.mark.parametrize(
    ("rows", "weights", "target", "reason"),
    [
        ((128, 64), (4, 64, 128), ("cuda", "NVIDIA H100 80GB HBM3", (9, 0)), None),
        ((128, 64), (4, 64, 128), ("cuda", "NVIDIA B200", (10, 0)), "Hopper, but the device is a NVIDIA B200"),
        ((128, 64), (4, 64, 128), ("cpu", "", None), "Hopper, but the device is a cpu"),
        ((128, 1), (4, 1, 128), ("cuda", "NVIDIA H200", (9, 0)), "widths on a device are 1 and 128"),
        ((100, 64), (4, 64, 128), ("cuda", "NVIDIA H200", (9, 0)), "100 rows"),
    ],
)
def test_hopper_s_kernels_say_what_they_can_t_take(rows, weights, target, reason):
    shapes = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (rows, weights))
    against = mosaic.KERNEL.reasons_against(*shapes, chips.Target(*target))
    assert (against == []) if reason is None else (reason in "; ".join(against))
