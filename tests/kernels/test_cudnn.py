"""The kernel 'cudnn': what it refuses, how it describes packed rows to cuDNN, and the programs compiled for H100s."""

import json
import re

import hlo_checks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import NEEDS_CUDA
from facts import assert_names
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from spmd_trainer.kernels import cudnn, kernels, reference
from spmd_trainer.kernels.chips import Target
from spmd_trainer.kernels.cudnn import packing
from spmd_trainer.kernels.kernels import Pattern, Rows
from spmd_trainer.planner.topologies import topology_devices
from spmd_trainer.training import start_up
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import make_run_config

H100 = Target("cuda", "NVIDIA H100 80GB HBM3", (9, 0))
A100 = Target("cuda", "NVIDIA A100-SXM4-80GB", (8, 0))
B200 = Target("cuda", "NVIDIA B200", (10, 0))


class Cudnn98:
    """cuDNN as installed by the extra."""

    @staticmethod
    def cudnn_get_version():
        return 90800


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(cudnn, "cuda_versions", Cudnn98)


def call(
    shape=(2, 1024, 8, 128),
    *,
    target=H100,
    dtype=jnp.bfloat16,
    key_dtype=None,
    segments=False,
    dropout=False,
    **pattern,
):
    query = jax.ShapeDtypeStruct(shape, dtype)
    key = jax.ShapeDtypeStruct((*shape[:2], 2, shape[3]), key_dtype or dtype)
    return kernels.Call(query, key, Pattern(**pattern), segments, dropout, target)


@pytest.mark.parametrize(
    "made",
    [
        call(),
        call(segments=True),
        call(causal=False),
        call(window=1),
        call((2, 1001, 8, 8), segments=True, window=100),
        call((2, 1024, 8, 256)),
        call(dtype=jnp.float16),
        call(target=A100),
        call(target=B200, segments=True),
    ],
)
@pytest.mark.usefixtures("installed")
def test_what_it_can(made):
    assert cudnn.reasons_against(made) == []


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (call(target=Target("cpu", "cpu")), "the device is a cpu"),
        (call(target=Target("rocm", "AMD Instinct MI300X")), "NVIDIA GPUs, but the device is a AMD Instinct MI300X"),
        (call(target=Target("cuda", "NVIDIA X")), "the compute capability of 'NVIDIA X' is unknown"),
        (call(target=Target("cuda", "Tesla T4", (7, 5))), "7.5, below 8.0"),
        (call(target=Target("cuda", "NVIDIA B300", (10, 3))), "cuDNN is 90800; compute capability 10.3 needs 91100"),
        (call(target=A100, segments=True), "packed rows need compute capability 9.0, and the GPU's is 8.0"),
        (call((2, 1024, 8, 264)), "head width 264 is over 256"),
        (call((2, 1024, 8, 136), target=A100), "head width 136 is over 128"),
        (call((2, 1024, 8, 256), target=B200), "head width 256 is over 128"),
        (call((2, 1024, 8, 100)), "head width 100 is not a multiple of 8"),
        (call((2, 1, 8, 128)), "rows have 1 token"),
        (call(softcap=50.0), "softcap is 50.0"),
        (call(dropout=True), "can't drop probabilities"),
        (call(dtype=jnp.float32), "queries are float32 and keys are float32"),
        (call(key_dtype=jnp.float16), "queries are bfloat16 and keys are float16"),
        (call((64, 2**17, 8, 128), segments=True), "2**31 elements or more"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_what_it_cannot_and_why(made, reason):
    (found,) = cudnn.reasons_against(made)
    assert reason in found


def test_without_the_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(cudnn, "cuda_versions", None)
    assert "uv sync --extra cuda12" in cudnn.reasons_against(call())[0]


def test_a_compiler_without_cudnn_is_a_reason(monkeypatch):
    class NoCudnn:
        @staticmethod
        def cudnn_get_version():
            raise RuntimeError("cuDNN not found.")  # as JAX's

    monkeypatch.setattr(cudnn, "cuda_versions", NoCudnn)
    (reason,) = cudnn.reasons_against(call())
    assert_names(reason, "no cuDNN", "uv sync --extra cuda12", "cuda13")


def test_where_segments_are():
    packed = packing(jnp.array([[1, 1, 2, 2, 2, 0], [3, 3, 3, 3, 3, 3]]), max_segments=3)
    # cuDNN takes the segments of all rows as one list, and the end of the last token as the offset of what is missing.
    assert packed.lengths.ravel().tolist() == [2, 3, 1, 6, 0, 0]
    assert packed.offsets.ravel()[:7].tolist() == [0, 2, 5, 6, 12, 12, 12]
    assert packed.offsets.shape == (2, 4)
    assert packed.fits
    assert not packed.whole
    assert packing(jnp.array([[1, 1, 1], [0, 0, 0]]), max_segments=2).whole


@pytest.mark.parametrize(
    ("ids", "fits"),
    [
        ([[1, 2, 3, 4], [1, 1, 1, 1]], False),  # five segments, and there is room for four
        # A row may have more than two if another has fewer.
        pytest.param([[1, 2, 3, 3], [1, 1, 1, 1]], True, marks=pytest.mark.full),
        ([[1, 0, 1, 1], [1, 1, 1, 1]], False),  # the first row's segment 1 is in two pieces
        ([[1, 1, 0, 0], [0, 0, 1, 1]], True),  # the same ids in two rows are different segments
    ],
)
def test_batches_that_cudnn_cannot_describe_are_found(ids, fits):
    assert bool(packing(jnp.array(ids), max_segments=2).fits) is fits


def emulated(pattern, query, key, value, packed):
    """cuDNN's result for packed rows, from the lengths and offsets that it gets: plain attention within each segment."""
    (batch, length, heads, width), groups = query.shape, query.shape[2] // key.shape[2]
    *_, of_queries, of_keys, _, _ = cudnn._operands(query, key, packed)
    count = packed.lengths.size
    positions = jnp.arange(length)
    seen = (positions[:, None] >= positions) | (not pattern.causal)
    if pattern.window is not None:
        seen &= positions[:, None] - positions < pattern.window
    output = jnp.zeros((batch * length + length, heads, width), jnp.float32)
    pad = ((0, length), (0, 0), (0, 0))
    rows = [jnp.pad(x.reshape(batch * length, -1, width).astype(jnp.float32), pad) for x in (query, key, value)]
    for size, first, first_key in zip(
        packed.lengths.ravel(), of_queries.ravel()[:count], of_keys.ravel()[:count], strict=True
    ):
        first, first_key = first // (heads * width), first_key // (heads // groups * width)
        q = jax.lax.dynamic_slice_in_dim(rows[0], first, length)
        k, v = (jnp.repeat(jax.lax.dynamic_slice_in_dim(x, first_key, length), groups, axis=1) for x in rows[1:])
        logits = jnp.where(seen & (positions < size), pattern.scale * jnp.einsum("tnh,snh->nts", q, k), -1e30)
        found = jnp.einsum("nts,snh->tnh", jax.nn.softmax(logits), v)
        old = jax.lax.dynamic_slice_in_dim(output, first, length)
        new = jnp.where((positions < size)[:, None, None], found, old)
        output = jax.lax.dynamic_update_slice_in_dim(output, new, first, 0)
    return output[: batch * length].reshape(query.shape).astype(value.dtype)


@pytest.fixture
def without_gpu(monkeypatch):
    """Replaces the two calls of cuDNN by `emulated`."""

    def whole_rows(query):
        return packing(jnp.zeros(query.shape[:2], jnp.int32), max_segments=2)

    def num_statistics(query, packed):
        return query.shape[0] if packed is None else packed.lengths.size

    def forward(pattern, with_statistics, arrays, packed):
        query = arrays[0]
        statistics = jnp.zeros((num_statistics(query, packed), query.shape[2], query.shape[1]), jnp.float32)
        output = emulated(pattern, *arrays, packed or whole_rows(query))
        return (output, *([statistics] if with_statistics else []))

    def backward(pattern, arrays, packed):
        *inputs, statistics, _, gradient = arrays
        assert statistics.shape[0] == num_statistics(inputs[0], packed)
        rows = packed or whole_rows(inputs[0])
        return jax.vjp(lambda *args: emulated(pattern, *args, rows), *inputs)[1](gradient)

    monkeypatch.setattr(cudnn, "forward_call", forward)
    monkeypatch.setattr(cudnn, "backward_call", backward)


def with_gradients(kernel, ids, pattern):
    rng = np.random.default_rng(0)
    query, gradient = rng.normal(size=(2, 2, 9, 4, 8)).astype(np.float32)
    key, value = rng.normal(size=(2, 2, 9, 2, 8)).astype(np.float32)

    def loss(*arrays):
        output = kernel.attend(Rows(*arrays, jnp.array(ids)), pattern)
        return (output * gradient).sum(), output

    (_, output), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(query, key, value)
    return [output, *gradients]


FITTING = [[1, 1, 1, 2, 2, 3, 3, 3, 3], [5, 5, 5, 5, 5, 5, 5, 0, 0]]
TOO_MANY = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 1, 1, 1, 1, 1, 1, 0, 0]]
WHOLE = [[1] * 9, [0] * 9]
IN_TWO_PIECES = [[1, 1, 1, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1, 1]]


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize(
    ("ids", "pattern"),
    [
        pytest.param(FITTING, Pattern(scale=0.3), marks=pytest.mark.full),
        pytest.param(FITTING, Pattern(causal=False), marks=pytest.mark.full),
        pytest.param(FITTING, Pattern(window=2), marks=pytest.mark.full),
        (TOO_MANY, Pattern(window=2)),
        (WHOLE, Pattern(scale=0.3)),
        pytest.param(IN_TWO_PIECES, Pattern(causal=False), marks=pytest.mark.full),
    ],
)
def test_packed_rows_are_the_reference_s(ids, pattern, monkeypatch):
    monkeypatch.setattr(cudnn, "MAX_SEGMENTS", 3)
    found = with_gradients(cudnn, ids, pattern)
    for mine, truth in zip(found, with_gradients(reference, ids, pattern), strict=True):
        np.testing.assert_allclose(mine, truth, rtol=1e-5, atol=1e-5)


@pytest.mark.full
@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("ids_differ", [True, False])
def test_vmap_is_a_call_with_more_rows(ids_differ, monkeypatch):
    monkeypatch.setattr(cudnn, "MAX_SEGMENTS", 2)
    ids = jnp.array([[[1, 1, 2, 2, 2], [5, 5, 5, 5, 0]], [[1, 2, 3, 3, 3], [1, 1, 1, 1, 1]]])
    ids = ids if ids_differ else ids[0]
    query, gradient = np.random.default_rng(0).normal(size=(2, 2, 2, 5, 2, 4)).astype(np.float32)

    def gradients(kernel, query, ids):
        return jax.jit(jax.grad(lambda q: (kernel.attend(Rows(q, q, q, ids), Pattern()) * gradient[0]).sum()))(query)

    in_axes = (0, 0 if ids_differ else None)
    found = jax.vmap(lambda *args: gradients(cudnn, *args), in_axes)(query, ids)
    # One choice for all rows, forward and backward; a choice for each row would compute both sides.
    program = jax.make_jaxpr(jax.vmap(lambda *args: gradients(cudnn, *args), in_axes))(query, ids)
    assert str(program).count(" cond[") == 2
    for index in range(2):
        truth = gradients(reference, query[index], ids[index] if ids_differ else ids)
        np.testing.assert_allclose(found[index], truth, rtol=1e-5, atol=1e-5)


def attend_with_gradients(query, key, value, segment_ids, pattern):
    def loss(*arrays):
        return cudnn.attend(Rows(*arrays, segment_ids), pattern).astype(jnp.float32).sum()

    return jax.value_and_grad(loss, (0, 1, 2))(query, key, value)


def shapes(batch=2, length=1001, heads=8, kv_heads=2, width=128):
    query = jax.ShapeDtypeStruct((batch, length, heads, width), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((batch, length, kv_heads, width), jnp.bfloat16)
    return query, key, key, jax.ShapeDtypeStruct((batch, length), jnp.int32)


@pytest.mark.parametrize(
    ("pattern", "packed", "mask", "window", "segments"),
    [
        (Pattern(), False, "CAUSAL", 0, 1),
        (Pattern(causal=False), False, "NO_MASK", 0, 1),
        (Pattern(window=64, scale=0.5), False, "CAUSAL", 64, 1),
        (Pattern(window=1001), False, "CAUSAL", 0, 1),  # a window as long as the row is none
        (Pattern(window=64), True, "PADDING_CAUSAL", 64, 32),
        (Pattern(causal=False), True, "PADDING", 0, 32),
    ],
)
def test_the_calls_of_cudnn(pattern, packed, mask, window, segments):
    """The program for CUDA before its compilation, which needs no compiler for GPUs."""
    arguments = shapes() if packed else (*shapes()[:3], None)
    traced = jax.jit(lambda *args: attend_with_gradients(*args, pattern)).trace(*arguments)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r'custom_call @(__cudnn\$\w+)\(.*?backend_config = "((?:[^"\\]|\\.)*)"', text)
    found = [(name, json.loads(config.replace("\\22", '"'))["cudnn_fmha_backend_config"]) for name, config in calls]
    # Rows that are one segment each go to calls without packing, in the same program.
    masks = [(mask.removeprefix("PADDING_") if pattern.causal else "NO_MASK", 1), (mask, segments)][not packed :]
    for call_name in ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"):
        kinds = [
            (settings["mask_type"], settings["max_seg_per_batch"]) for name, settings in found if name == call_name
        ]
        assert sorted(kinds) == sorted(masks)
    assert len(found) == 2 * len(masks)
    for _, settings in found:
        assert settings["sliding_window_length"] == window
        assert settings["fmha_scale"] == pattern.scale
        assert settings["dropout_rate"] == 0


@NEEDS_CUDA
@pytest.mark.parametrize("packed", [False, True])
def test_the_program_for_h100_has_no_array_over_queries_and_keys(packed):
    mesh = Mesh(np.array(topology_devices("h100:1x8")), ("data",), axis_types=(AxisType.Auto,))
    arrays = shapes(batch=16, length=1536)

    def step(query, key, value, segment_ids):
        pattern = Pattern(scale=0.1)
        return attend_with_gradients(query, key, value, segment_ids if packed else None, pattern)[1]

    mapped = jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    text = jax.jit(mapped).lower(*arrays).compile().as_text()
    assert hlo_checks.arrays_over_queries_and_keys(text, 1536) == []
    targets = [target for target in hlo_checks.custom_call_targets(text) if target.startswith("__cudnn$")]
    ways = 2 if packed else 1  # with packing, and without it for rows that are one segment each
    assert sorted(targets) == ["__cudnn$fmhaSoftmax"] * ways + ["__cudnn$fmhaSoftmaxBackward"] * ways


@NEEDS_CUDA
def test_the_trainer_s_step_for_h100(tmp_path):
    sizes = ("NUM_LAYERS=2", "MODEL_DIMS=256", "HIDDEN_DIMS=640", "VOCAB_SIZE=416", "MAX_SEQ_LEN=1536")
    overrides = (*sizes, "USE_FUSED_ATTENTION=True", "ATTEN_LOGIT_CAP=0.0")
    mesh = (("data", 8),)
    config = make_run_config(
        "lm.cloud.LmCloudSpmd2B", tmp_path, overrides=overrides, mode="inspect", mesh=mesh, topology="h100:1x8"
    )
    step = start_up.compile_train_step(Job.build(config))
    assert step.attention == ["attention kernel: cudnn"]
    text = step.fn.as_text()
    assert hlo_checks.arrays_over_queries_and_keys(text, 1536) == []
    # Layers are rematerialised, so the forward pass is there twice.
    targets = {target for target in hlo_checks.custom_call_targets(text) if target.startswith("__cudnn$")}
    assert targets == {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}
