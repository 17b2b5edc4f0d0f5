"""The kernel 'splash': interpreted on the host against plain attention, and compiled for TPUs that aren't here."""

import dataclasses
import functools
import re
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import NEEDS_TPU
from jax._src.mesh import AbstractDevice
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as mask_info
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd_trainer.kernels import kernels, splash
from spmd_trainer.kernels.attend import Split, attend
from spmd_trainer.kernels.chips import Target
from spmd_trainer.kernels.kernels import Call, Choice, Pattern, Rows
from spmd_trainer.planner.topologies import topology_devices
from tests.kernels.hlo_checks import arrays_over_queries_and_keys, custom_call_targets, splash_kernels

V5E = Target("tpu", "TPU v5 lite")


def by_splash(query, key, value, segment_ids, pattern: Pattern):
    return splash.attend(Rows(query, key, value, segment_ids), pattern)


def plain(query, key, value, segment_ids, pattern: Pattern):
    """Attention as it is defined, [B, T, N, H], in the arguments' dtype."""
    length = query.shape[1]
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    logits = pattern.scale * jnp.einsum("btnh,bsnh->bnts", query, key)
    if pattern.softcap is not None:
        logits = pattern.softcap * jnp.tanh(logits / pattern.softcap)
    distance = np.arange(length)[:, None] - np.arange(length)
    seen = (distance >= 0) | (not pattern.causal)
    if pattern.window is not None:
        seen &= distance < pattern.window
    seen = seen[None]
    if segment_ids is not None:
        seen = seen & (segment_ids[:, :, None] == segment_ids[:, None, :])
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(seen[:, None], logits, -jnp.inf)), value)


def make_rows(length: int, heads: int, kv_heads: int, width: int, *, packed: bool, dtype=jnp.float32):
    """Returns a query, a key, a value, segment ids or None, and a gradient of the output, for two rows packed differently."""
    rng = np.random.default_rng(length)
    query, key, value, out_grad = (
        jnp.asarray(rng.normal(size=(2, length, n, width)), dtype) for n in (heads, kv_heads, kv_heads, heads)
    )
    ids = jnp.asarray(np.sort(rng.integers(3, 7, (2, length)), axis=1), jnp.int32) if packed else None
    return query, key, value, ids, out_grad


def outputs_and_grads(kernel, rows, pattern: Pattern):
    query, key, value, ids, out_grad = rows

    @jax.jit
    def both(query, key, value):
        out, pullback = jax.vjp(lambda *x: kernel(*x, ids, pattern), query, key, value)
        return out, *pullback(out_grad.astype(out.dtype))

    return both(query, key, value)


@dataclasses.dataclass
class Case:
    length: int
    heads: tuple[int, int]
    pattern: Pattern
    packed: bool
    dtype: object = jnp.float32
    width: int = 8


CASES = {
    "causal, packed, grouped, one token more than four blocks": Case(513, (4, 2), Pattern(scale=0.3), True),
    "window over an edge of blocks, one key head, soft cap": Case(300, (2, 1), Pattern(True, 130, 5.0, 0.5), False),
    "bidirectional, unpacked, heads wider than a vector register": Case(
        200, (1, 1), Pattern(causal=False, scale=0.1), False, width=130
    ),
    "bidirectional, packed, one token more than a block": Case(129, (2, 1), Pattern(causal=False, softcap=2.0), True),
    "causal, one token": Case(1, (2, 2), Pattern(), False),
    "bfloat16, window in packed rows": Case(257, (2, 1), Pattern(True, 100, 20.0, 0.3), True, jnp.bfloat16),
}
# Those of `make test`.
SHORT = ("window over an edge of blocks, one key head, soft cap", "causal, one token")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=() if name in SHORT else pytest.mark.full) for name, case in CASES.items()],
)
@pytest.mark.full
def test_outputs_and_gradients_are_those_of_plain_attention(case, monkeypatch):
    monkeypatch.setattr(splash, "_BLOCKS", (128,))
    rows = make_rows(case.length, *case.heads, case.width, packed=case.packed, dtype=case.dtype)
    got = outputs_and_grads(by_splash, rows, case.pattern)
    want = outputs_and_grads(plain, jax.tree.map(lambda x: x.astype(jnp.float32), rows), case.pattern)
    assert all(x.dtype == case.dtype for x in got)
    for x, y in zip(got, want, strict=True):
        error = np.abs(np.asarray(x, np.float32) - y).max() / max(1, np.abs(y).max())
        assert error < (1e-5 if case.dtype == jnp.float32 else 2e-2)


@pytest.mark.full
def test_scaled_query_is_rounded_to_bfloat16_once():
    """The second token's logits are 64 times the difference of two scaled numbers, and 0."""
    numbers = jnp.arange(1, 2, 1 / 128, dtype=jnp.float32).astype(jnp.bfloat16)
    pairs = jnp.stack([numbers, jnp.roll(numbers, 1)], axis=-1)[1:]
    query = jnp.zeros((1, 2, *pairs.shape), jnp.bfloat16).at[0, 1].set(pairs)
    key = jnp.asarray([[64, -64], [0, 0]], jnp.bfloat16)[None, :, None]
    value = jnp.asarray([[1, 1], [0, 0]], jnp.bfloat16)[None, :, None]
    out = jax.jit(lambda *x: by_splash(*x, None, Pattern(scale=0.7)))(query, key, value)[0, 1, :, 0].astype(jnp.float32)

    def expected(scaled):
        return jax.nn.sigmoid(64 * (scaled[:, 0] - scaled[:, 1]).astype(jnp.float32))

    once = expected((pairs.astype(jnp.float32) * 0.7).astype(jnp.bfloat16))
    assert jnp.max(jnp.abs(expected(pairs * jnp.bfloat16(0.7)) - once)) > 0.05
    np.testing.assert_allclose(out, once, atol=2**-8)


def test_output_has_the_dtype_and_the_precision_of_the_values():
    query, key, value, *_ = make_rows(2, 1, 1, 8, packed=False)
    out = by_splash(query.astype(jnp.bfloat16), key.astype(jnp.bfloat16), value, None, Pattern())
    np.testing.assert_allclose(out[:, 0], value[:, 0], rtol=1e-6)


@pytest.mark.full
def test_in_shard_map_in_a_scan_over_rematerialised_layers(monkeypatch):
    monkeypatch.setattr(splash, "_BLOCKS", (128,))
    mesh = jax.make_mesh((2, 2), ("data", "mdl"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    query, key, value, ids, out_grad = make_rows(200, 4, 2, 8, packed=True)
    pattern, spec = Pattern(scale=0.3), P("data", None, "mdl")
    on_each_device = jax.shard_map(
        lambda *x: by_splash(*x, pattern),
        mesh=mesh,
        in_specs=(spec, spec, spec, P("data")),
        out_specs=spec,
        check_vma=False,
    )

    def two_layers(kernel, query, key, value):
        layer = jax.checkpoint(lambda x, w: (kernel(w * x, key, value, ids), None))
        return jax.lax.scan(layer, query, jnp.asarray([1.0, 2.0]))[0]

    def loss(kernel):
        return lambda *x: jnp.sum(two_layers(kernel, *x) * out_grad)

    got = jax.jit(jax.grad(loss(on_each_device), argnums=(0, 1, 2)))(query, key, value)
    want = jax.grad(loss(functools.partial(plain, pattern=pattern)), argnums=(0, 1, 2))(query, key, value)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5 * np.abs(y).max())


@pytest.mark.parametrize("window", [None, 1, 128, 300, 513])
@pytest.mark.parametrize("backward", [False, True])
def test_tables_of_blocks_are_those_of_jax_own_masks(window, backward):
    length, masks = 1024, splash.splash_attention_mask
    theirs = masks.LocalMask((length, length), (None if window is None else window - 1, 0), 0)
    process = mask_info.process_mask_dkv if backward else mask_info.process_mask
    ours, want = (
        process(masks.MultiHeadMask([mask]), (128, 128))[0] for mask in (splash._Band(length, window), theirs)
    )
    for x, y in zip(ours, want, strict=True):
        np.testing.assert_array_equal(x, y)


def test_no_mask_of_a_long_row_is_made_on_the_host():
    """The mask of 32,768 tokens would have 1 GiB."""
    tracemalloc.start()
    kernel = splash._kernel(splash._Shape(2**15, 1024, True, None), None, interpret=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert kernel.fwd_mask_info.block_mask.shape == (1, 32, 32)
    assert peak < 2**22


@pytest.mark.parametrize(
    ("length", "block"), [(1, 128), (128, 128), (129, 256), (513, 640), (1024, 1024), (1025, 640), (4096, 1024)]
)
def test_block_divides_the_row_with_little_padding(length, block):
    assert splash._block(length, 128, jnp.bfloat16, Pattern()) == block


def make_call(length=1024, width=128, dtype=jnp.bfloat16, *, target=V5E, dropout=False) -> Call:
    heads = jax.ShapeDtypeStruct((1, length, 2, width), dtype)
    return Call(heads, heads, Pattern(), segments=True, dropout=dropout, target=target)


def test_any_length_and_head_width_can_be_computed():
    for length, width in [(1, 1), (513, 80), (262_144, 128), (4096, 256)]:
        assert not splash.reasons_against(make_call(length, width))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (make_call(target=Target("cpu")), "it is a kernel for TPUs, but the device is a cpu"),
        (make_call(target=Target("tpu", "TPU v3")), "TPU v3 is older than TPU v4"),
        (make_call(dropout=True), "it can't drop probabilities"),
        (make_call(dtype=jnp.float16), "the queries and keys are float16, not bfloat16 or float32"),
        (make_call(width=4096), "head width 4096 is too large for the chip's vector memory"),
        (make_call(2**19), "the tables of blocks of 524,288 tokens are too large for the chip's scalar memory"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_says_why_it_cannot_be_used(call, reason):
    assert splash.reasons_against(call) == [reason]


# No other dimension of the model below is equal to one of these: a row, and the row padded to two blocks of 768.
LENGTH, PADDED = 1500, 1536


def traced_train_step(
    mesh: Mesh | AbstractMesh, pattern: Pattern, *, packed: bool, kernel: str | None = None, sinks: bool = False
):
    """Returns a traced train step of two layers with 4 query and 2 key heads, for a mesh with the axes data and mdl."""
    split = Split(batch=("data",), heads=("mdl",))

    def array(shape, *axes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))

    weights = {
        "query": array((2, 96, 4, 32), None, "data", "mdl"),
        "key_value": array((2, 96, 2, 64), None, "data", "mdl"),
        "out": array((2, 4, 32, 96), None, "mdl", None, "data"),
        "sinks": array((2, 4), dtype=jnp.float32),
    }
    rows, ids = array((4, LENGTH, 96), "data"), array((4, LENGTH), "data", dtype=jnp.int32)

    def layer(x, w, ids):
        query = jnp.einsum("btd,dnh->btnh", x, w["query"])
        key, value = jnp.split(jnp.einsum("btd,dnh->btnh", x, w["key_value"]), 2, axis=-1)
        heads = attend(
            query,
            key,
            value,
            pattern,
            segment_ids=ids if packed else None,
            sinks=w["sinks"] if sinks else None,
            split=split,
            kernel=kernel,
        )
        return x + jnp.einsum("btnh,nhd->btd", heads, w["out"])

    def train_step(weights, rows, ids):
        body = jax.checkpoint(
            lambda x, w: (layer(x, w, ids), None), policy=jax.checkpoint_policies.save_only_these_names("context")
        )
        grads = jax.grad(lambda w: jnp.sum(jax.lax.scan(body, rows, w)[0].astype(jnp.float32) ** 2))(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)

    return jax.jit(train_step).trace(weights, rows, ids)


def compiled_train_step(
    topology: str, pattern: Pattern, *, packed: bool, kernel: str | None = None, sinks: bool = False
) -> str:
    """Returns the program of `traced_train_step` on four chips of a topology."""
    devices = np.array(topology_devices(topology)[:4]).reshape(2, 2)
    mesh = Mesh(devices, ("data", "mdl"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        return traced_train_step(mesh, pattern, packed=packed, kernel=kernel, sinks=sinks).lower().compile().as_text()


def test_train_step_lowered_for_tpus_has_splash_kernels_and_no_array_over_queries_and_keys():
    """This needs no TPU compiler: JAX's own lowering makes the kernels, and the program that XLA would get."""
    mesh = AbstractMesh(
        (2, 2),
        ("data", "mdl"),
        axis_types=(AxisType.Auto,) * 2,
        abstract_device=AbstractDevice("TPU v5 lite", num_cores=1, platform="tpu"),
    )

    def lowered(kernel):
        traced = traced_train_step(mesh, Pattern(scale=0.2, softcap=30.0), packed=True, kernel=kernel, sinks=True)
        return traced.lower(lowering_platforms=("tpu",)).as_text()

    over_both = re.compile(rf"tensor<[\dx]*(?:{LENGTH}|{PADDED})x(?:{LENGTH}|{PADDED})x")
    with jax.sharding.use_abstract_mesh(mesh), kernels.recording() as recorded:
        text = lowered(None)
        assert recorded == {"": Choice("splash")}
        assert over_both.search(lowered("reference"))
    names = set(re.findall(r'kernel_name = "(\w+)"', text))
    assert {name.removesuffix("_residuals").removesuffix("_no") for name in names} == {
        f"splash_mha_{kind}_segmented" for kind in ("fwd", "dq", "dkv")
    }
    assert not over_both.search(text)


@NEEDS_TPU
@pytest.mark.parametrize(
    ("topology", "pattern", "packed", "sinks"),
    [
        ("v5e:2x2", Pattern(scale=0.2, softcap=30.0), True, False),
        ("v5p:2x2x1", Pattern(scale=0.2, window=200), False, True),
        ("v5p:2x2x1", Pattern(causal=False), True, False),
    ],
)
def test_tpu_train_step_has_splash_kernels_and_no_array_over_queries_and_keys(topology, pattern, packed, sinks):
    hlo = compiled_train_step(topology, pattern, packed=packed, sinks=sinks)
    segmented = "_segmented" if packed else ""
    assert splash_kernels(hlo) == {
        f"splash_mha_{kind}{segmented}_{residuals}"
        for kind, residuals in (("fwd", "residuals"), ("dq", "no_residuals"), ("dkv", "no_residuals"))
    }
    # One of each in the body of a loop: the forward pass is not repeated, because contexts are kept.
    assert custom_call_targets(hlo).count("tpu_custom_call") == 3
    assert not arrays_over_queries_and_keys(hlo, LENGTH, PADDED)


@NEEDS_TPU
def test_plain_attention_has_arrays_over_queries_and_keys():
    assert arrays_over_queries_and_keys(
        compiled_train_step("v5e:2x2", Pattern(), packed=False, kernel="reference"), LENGTH, PADDED
    )
