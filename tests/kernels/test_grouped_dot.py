"""Sparse experts give the numbers of dense ones, on one device and on meshes, for the arithmetic of the chosen ones."""

import dataclasses
import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from sparse_experts import (
    PRODUCTS,
    QWEN,
    Setting,
    active_flops,
    assert_equal,
    dense,
    experts_times_tokens,
    flops,
    output_and_gradients,
    product_and_gradients,
    shapes,
    sparse,
    traced,
)

from spmd_trainer import sharding
from spmd_trainer.errors import UserError
from spmd_trainer.kernels import grouped_blocks, kernels, megablox
from spmd_trainer.kernels.grouped_dot import grouped_dot
from spmd_trainer.planner import jaxpr_costs
from spmd_trainer.planner.topologies import topology_devices

needs_tpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not installed: uv sync --extra tpu"
)


def check(setting, seed, layer=sparse):
    arrays = setting.arrays(seed)
    assert_equal(output_and_gradients(layer, *arrays), output_and_gradients(dense, *arrays))


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(Setting(experts=5, top=2), marks=pytest.mark.full),
        Setting(experts=64, top=8, batch=1, length=3, chosen="few"),
        Setting(experts=3, top=1, batch=4, length=50, chosen="same"),
    ],
    ids=str,
)
def test_one_device_gives_the_numbers_of_dense_experts(setting):
    check(setting, 0)


# Random settings of `make test-all`: sizes, and for each of them ways to choose, which need no new compilation.
SIZES, WAYS = 40, ("any", "few", "same", "any", "few")


def drawn(seed):
    rng = np.random.default_rng(seed)
    experts = int(rng.integers(3, 65))
    sizes = {
        "batch": int(rng.integers(1, 5)),
        "length": int(rng.choice([1, 2, 7, 40, 150])),
        "width": int(rng.integers(1, 20)),
        "hidden": int(rng.integers(1, 20)),
    }
    return Setting(experts, int(rng.integers(1, min(8, experts) + 1)), **sizes)


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, SIZES, 5))
def test_random_settings_give_the_numbers_of_dense_experts(first):
    for seed in range(first, first + 5):
        for number, chosen in enumerate(WAYS):
            setting = dataclasses.replace(drawn(seed), chosen=chosen)
            try:
                check(setting, SIZES * number + seed)
            except AssertionError as error:
                raise AssertionError(f"{setting}, seed {seed}: {error}") from error


BY_DATA = {"batch": ("replica", "data"), "embed": ("data",)}
SPLITS = {
    "experts over mdl": {**BY_DATA, "over": ("mdl",)},
    "widths over mdl": {**BY_DATA, "mlp": ("mdl",)},
    "experts over an axis of tokens": {"batch": ("replica", "data"), "over": ("data",), "mlp": ("mdl",)},
    "experts over two axes": {**BY_DATA, "over": ("replica", "mdl")},
    "tokens over data": {"batch": ("replica",), "length": ("data",), "embed": ("data",), "over": ("mdl",)},
    "an axis of weights only": {"batch": ("replica",), "embed": ("data",), "over": ("mdl",)},
    "nothing": {},
}
# The case of `make test`.
IN_SHORT = ("experts over mdl", (1, 2, 3))


@pytest.mark.parametrize(
    ("split", "sizes"),
    [
        pytest.param(split, sizes, marks=() if (split, sizes) == IN_SHORT else pytest.mark.full)
        for split in SPLITS
        for sizes in [(1, 2, 3), (2, 2, 2), *([(1, 4, 2), (1, 1, 8), (1, 3, 2)] if split == IN_SHORT[0] else [])]
    ],
)
def test_a_mesh_changes_nothing(split, sizes):
    """Three rows, 7 tokens, 5 experts and widths of 11 and 10: most axes divide none of them."""
    axes = list(zip(("replica", "data", "mdl"), sizes, strict=True))
    mesh = sharding.create_device_mesh(axes, devices=jax.devices()[: int(np.prod(sizes))])
    with jax.set_mesh(mesh):
        check(Setting(experts=5, top=2, width=11), 1, functools.partial(sparse, **SPLITS[split]))


def test_the_compiled_program_computes_the_chosen_experts_only():
    """Dense experts cost 16 times as much, and so does `jax.lax.ragged_dot` on host devices."""
    program = traced(sparse, shapes(QWEN))
    assert active_flops(QWEN) <= jaxpr_costs.dot_costs(program.jaxpr.jaxpr).flops <= 1.01 * active_flops(QWEN)
    hlo = program.lower().compile().as_text()
    assert active_flops(QWEN) <= flops(hlo) <= 1.1 * active_flops(QWEN)
    assert not experts_times_tokens(hlo, QWEN, QWEN.batch * QWEN.length)
    small = dataclasses.replace(QWEN, width=8, hidden=4)
    everything = traced(dense, shapes(small)).lower().compile().as_text()
    assert flops(everything) > 15 * active_flops(small)
    assert experts_times_tokens(everything, small, small.batch * small.length)


@pytest.mark.parametrize("sizes", [(1, 8), (2, 4), (1, 3)])
def test_flops_are_counted_once_for_each_pair_on_any_mesh(sizes):
    """Also where a part has fewer experts than a token, and room for fewer pairs than its tokens have."""
    setting = Setting(experts=8, top=4, batch=3)
    axes = list(zip(("data", "mdl"), sizes, strict=True))
    layer = functools.partial(sparse, batch=("data",), over=("mdl",), embed=("data",))
    with jax.set_mesh(sharding.create_device_mesh(axes, devices=jax.devices()[: sizes[0] * sizes[1]])):
        program = traced(layer, shapes(setting))
    costs = jaxpr_costs.dot_costs(program.jaxpr.jaxpr)
    # The gradient of the router's weights has batch dimensions.
    assert costs.flops - costs.batched_flops == active_flops(setting)


@needs_tpu_compiler
@pytest.mark.full
def test_tpus_use_megablox_for_the_chosen_experts_only():
    mesh = sharding.create_device_mesh([("data", 2), ("mdl", 2)], devices=topology_devices("v5p:2x2x1"))
    by_row, into, back = (PartitionSpec(*axes) for axes in (["data"], ["mdl", "data"], ["mdl", None, "data"]))
    layer = functools.partial(sparse, batch=("data",), over=("mdl",), embed=("data",))
    with jax.set_mesh(mesh):
        lowered = traced(layer, shapes(QWEN, [by_row] * 3 + [into, into, back], mesh)).lower()
    hlo = lowered.compile().as_text()
    # Each device has room for all pairs of its tokens; with 2 parts of the experts it computes half of them.
    assert flops(hlo) == active_flops(QWEN) / 2
    assert len(re.findall('custom_call_target="tpu_custom_call"', hlo)) == PRODUCTS
    assert not experts_times_tokens(hlo, QWEN, QWEN.batch * QWEN.length // 2)


@pytest.mark.parametrize(
    ("count", "width", "other", "sizes"),
    [
        (37, 16, 160, [5, 0, 0, 30]),
        pytest.param(300, 130, 96, [100, 0, 57, 3, 60], marks=pytest.mark.full),
        pytest.param(20, 8, 8, [0, 0, 0], marks=pytest.mark.full),
    ],
)
def test_megablox_gives_the_numbers_of_blocks(count, width, other, sizes):
    """Interpreted. Rows that belong to no group are garbage for both, and must not matter."""
    rng = np.random.default_rng(0)
    rows, others, weights = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((count, width), (count, other), (len(sizes), width, other))
    )
    sizes = jnp.asarray(sizes, jnp.int32)

    ours, theirs = (
        product_and_gradients(module.KERNEL, rows, others, weights, sizes) for module in (megablox, grouped_blocks)
    )
    assert_equal(ours, theirs)
    assert not np.asarray(theirs[0])[int(sizes.sum()) :].any()


def test_the_choice_of_a_kernel_is_reported_beside_attention_s():
    rows, weights, sizes = jnp.ones((1, 1, 4, 3)), jnp.ones((2, 3, 5)), jnp.full((1, 1, 2), 2, jnp.int32)
    with kernels.recording() as recorded:
        grouped_dot(rows, weights, sizes, name="layer_0/moe/up")
        kernels.record("layer_0/attention", kernels.Choice("chunked"))
    assert kernels.choice_lines(recorded) == ["experts kernel: blocks", "attention kernel: chunked"]
    with pytest.raises(UserError, match="'megablox' can't be used: it is a kernel for TPUs, but the device is a cpu"):
        grouped_dot(rows, weights, sizes, kernel="megablox")
    with pytest.raises(UserError, match=r"there is no grouped kernel 'block'.*did you mean blocks"):
        grouped_dot(rows, weights, sizes, kernel="block")
