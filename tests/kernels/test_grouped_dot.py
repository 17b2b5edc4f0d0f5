"""Sparse experts give the numbers of dense ones, on one device and on meshes, for the arithmetic of the chosen ones."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import NEEDS_CUDA, NEEDS_TPU
from jax.sharding import NamedSharding, PartitionSpec
from sparse_experts import Setting, assert_equal, dense, output_and_gradients, sparse

from spmd_trainer import sharding
from spmd_trainer.errors import UserError
from spmd_trainer.kernels import chips, grouped_blocks, hopper, kernels, megablox
from spmd_trainer.kernels.grouped_dot import grouped_dot
from spmd_trainer.planner import hlo_costs, jaxpr_costs
from spmd_trainer.planner.topologies import topology_devices

# A layer of Qwen3-30B-A3B. No other dimension is as large as the length, or as the number of tokens.
QWEN = Setting(experts=128, top=8, batch=2, length=1920, width=2048, hidden=768)
# Forward, and in the backward pass the gradients of rows and weights, of three products.
PRODUCTS = 9


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


def shapes(setting, specs=None, mesh=None):
    """The layer's arguments, in bfloat16, as shapes."""
    b, t, d, f, e, k = (getattr(setting, name) for name in ("batch", "length", "width", "hidden", "experts", "top"))
    sizes = [(b, t, d), (b, t, k), (b, t, k), (e, d, f), (e, d, f), (e, f, d)]
    dtypes = [jnp.bfloat16, jnp.int32, jnp.float32, *[jnp.bfloat16] * 3]
    placed = [None if specs is None else NamedSharding(mesh, spec) for spec in specs or sizes]
    return [jax.ShapeDtypeStruct(s, dt, sharding=p) for s, dt, p in zip(sizes, dtypes, placed, strict=True)]


def traced(layer, arguments):
    """The gradients of everything but the choice of experts."""

    def loss(*arguments):
        return jnp.sum(layer(*arguments).astype(jnp.float32) ** 2)

    return jax.jit(jax.grad(loss, (0, 2, 3, 4, 5))).trace(*arguments)


def active_flops(setting):
    pairs = setting.batch * setting.length * setting.top
    return PRODUCTS * 2.0 * pairs * setting.width * setting.hidden


def flops(hlo):
    return sum(cost.flops * cost.times for cost in hlo_costs.instruction_costs(hlo))


def experts_times_tokens(hlo, setting, tokens):
    """The shapes of arrays that have both a dimension of all experts and one of all tokens."""
    found = {tuple(map(int, dims.split(","))) for dims in re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", hlo)}
    return [dims for dims in found if setting.experts in dims and {tokens, setting.length} & set(dims)]


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


@NEEDS_TPU
@pytest.mark.full
def test_tpus_use_megablox_for_the_chosen_experts_only():
    mesh = sharding.create_device_mesh([("data", 2), ("mdl", 2)], devices=topology_devices("v5p:2x2x1"))
    by_row, into, back = (PartitionSpec(*axes) for axes in (["data"], ["mdl", "data"], ["mdl", None, "data"]))
    layer = functools.partial(sparse, batch=("data",), over=("mdl",), embed=("data",))
    with jax.set_mesh(mesh):
        lowered = traced(layer, shapes(QWEN, [by_row] * 3 + [into, into, back], mesh)).lower()
    hlo = lowered.compile().as_text()
    # Each device has room for all pairs of its tokens; with 2 parts of the experts it computes half of them on average.
    assert flops(hlo) == active_flops(QWEN) / 4
    assert len(re.findall('custom_call_target="tpu_custom_call"', hlo)) == PRODUCTS
    assert not experts_times_tokens(hlo, QWEN, QWEN.batch * QWEN.length // 2)


@NEEDS_CUDA
@pytest.mark.full
def test_hopper_gpus_use_its_kernels_for_the_chosen_experts_only():
    """On two parts of the tokens and two of the experts; the weights' sizes are not multiples of the kernels' blocks."""
    setting = dataclasses.replace(QWEN, width=328, hidden=200)
    mesh = sharding.create_device_mesh([("data", 2), ("mdl", 2)], devices=topology_devices("h100:1x4"))
    by_row, into, back = (PartitionSpec(*axes) for axes in (["data"], ["mdl", "data"], ["mdl", None, "data"]))
    layer = functools.partial(sparse, batch=("data",), over=("mdl",), embed=("data",))
    with jax.set_mesh(mesh):
        hlo = traced(layer, shapes(setting, [by_row] * 3 + [into, into, back], mesh)).lower().compile().as_text()
    filled = dataclasses.replace(setting, width=384, hidden=256)
    assert flops(hlo) == active_flops(filled) / 4
    assert len(re.findall('custom_call_target="mosaic_gpu_v2"', hlo)) == PRODUCTS
    assert not experts_times_tokens(hlo, setting, setting.batch * setting.length // 2)


@pytest.mark.parametrize(
    ("rows", "target", "reason"),
    [
        (jnp.float32, chips.Target("cuda", "NVIDIA H100 80GB HBM3", (9, 0)), "the rows are float32"),
        (jnp.bfloat16, chips.Target("cuda", "NVIDIA A100-SXM4-80GB", (8, 0)), "the GPU's is 8.0"),
        (jnp.bfloat16, chips.Target("cuda", "NVIDIA X", None), "the GPU's is unknown"),
        (jnp.bfloat16, chips.Target("tpu", "TPU v5p", None), "the device is a tpu"),
        (jnp.bfloat16, chips.Target("cuda", "NVIDIA H200", (9, 0)), None),
    ],
)
def test_what_hopper_s_kernels_can(rows, target, reason, monkeypatch):
    monkeypatch.setattr(chips, "current_target", lambda: target)
    arrays = jax.ShapeDtypeStruct((8, 4), rows), jax.ShapeDtypeStruct((2, 4, 6), rows)
    found = hopper.reasons_against(*arrays, target.platform)
    assert [str(reason) in text for text in found] == [True] * (reason is not None)


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

    def results(kernel):
        return (
            kernel.product(rows, weights, sizes, transposed=False),
            kernel.product(others, weights, sizes, transposed=True),
            kernel.weights_product(rows, others, sizes),
        )

    ours, theirs = results(megablox), results(grouped_blocks)
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
