"""Cross entropy in blocks has the numbers of the whole form, on one device and on meshes, and no array of all logits."""

import functools
import math
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from trained_helpers import make_job

from spmd_trainer.kernels import cross_entropy
from spmd_trainer.kernels.cross_entropy import VocabularySplit
from spmd_trainer.sharding.jaxprs import products_shown
from spmd_trainer.training.start_up import compile_train_step

AXES = ("replica", "data", "seq", "mdl")
SPLIT = VocabularySplit(("replica", "data"), ("seq",), ("mdl",), ("data", "seq"))
# Most relative to the largest value. The whole form has errors of up to 12e-6 in float32.
CLOSE = 2e-6
# Rounding of one addition in float32.
ROUNDING = float(np.finfo(np.float32).eps) / 2


def whole(hidden, matrix, biases, labels, cap, smoothing):
    """The same by the definition, from all logits."""
    logits = jnp.einsum("btd,vd->btv", hidden, matrix, preferred_element_type=jnp.float32)
    logits = logits if biases is None else logits + biases
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    is_label = labels[..., None] == jnp.arange(len(matrix))
    probabilities = jnp.where(is_label, 1 - smoothing, smoothing / (len(matrix) - 1))
    return log_sum - jnp.sum(probabilities * logits, -1), log_sum, jnp.argmax(logits, -1)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def outputs_and_gradients(form, cap, smoothing, hidden, matrix, biases, labels, weights):
    def loss(hidden, matrix, biases):
        xent, log_sum, argmax = form(hidden, matrix, biases, labels, cap, smoothing)
        # Also the sum of exponentiated logits has a gradient, for a z-loss. Tokens of weight 0 have none.
        return jnp.sum(weights * (xent + 0.01 * log_sum**2)), (xent, log_sum, argmax)

    (_, out), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(hidden, matrix, biases)
    return *out, *jax.tree.leaves(grads)


def exact(cap, smoothing, hidden, matrix, biases, labels, weights):
    """The same in float64, from the formulas of the gradients."""
    hidden, matrix, weights = (x.astype(np.float64) for x in (hidden, matrix, weights))
    logits, slopes = hidden @ matrix.T + (0 if biases is None else biases.astype(np.float64)), 1.0
    if cap is not None:
        logits = cap * np.tanh(logits / cap)
        slopes = 1 - (logits / cap) ** 2
    log_sum = np.log(np.sum(np.exp(logits), -1))
    is_label = labels[..., None] == np.arange(len(matrix))
    probabilities = np.where(is_label, 1 - smoothing, smoothing / (len(matrix) - 1))
    grads = np.exp(logits - log_sum[..., None]) * (1 + 0.02 * log_sum)[..., None] - probabilities
    grads *= slopes * weights[..., None]
    xent = log_sum - np.sum(probabilities * logits, -1)
    of_biases = () if biases is None else (np.sum(grads, (0, 1)),)
    return xent, log_sum, np.argmax(logits, -1), grads @ matrix, np.einsum("btv,btd->vd", grads, hidden), *of_biases


def check(sizes, mesh_shape, cap, block, seed, *, has_biases=False, smoothing=0.0, split=SPLIT, whole_logits=False):
    """Compares with the exact numbers: as near as the whole form in float32, or within `CLOSE`."""
    batch, length, width, vocab = sizes
    rng = np.random.default_rng(seed)
    hidden, matrix = (rng.normal(size=shape).astype(np.float32) for shape in ((batch, length, width), (vocab, width)))
    biases = rng.normal(size=vocab).astype(np.float32) if has_biases else None
    labels = rng.integers(0, vocab, (batch, length)).astype(np.int32)
    arrays = (hidden, matrix, biases, labels, rng.choice([0.0, 1.0, 0.3], (batch, length)).astype(np.float32))

    def blocks(hidden, matrix, biases, labels, cap, smoothing):
        return cross_entropy.cross_entropy(
            hidden,
            matrix,
            labels,
            biases=biases,
            softcap=cap,
            label_smoothing=smoothing,
            split=split,
        )

    devices = np.array(jax.devices()[: np.prod(mesh_shape)]).reshape(mesh_shape)
    with (
        pytest.MonkeyPatch.context() as patch,
        jax.set_mesh(jax.sharding.Mesh(devices, AXES)),
        products_shown(whole_logits),
    ):
        patch.setattr(cross_entropy, "BLOCK_LOGITS", block)
        found = outputs_and_gradients(blocks, cap, smoothing, *arrays)
    # The gradient of a token is a mean of the matrix' rows less one of them, however small the difference is.
    scales = [0.0, 0.0, 0.0, np.abs(matrix).max(), np.abs(hidden).max(), *([1.0] if has_biases else [])]
    plain = outputs_and_gradients(whole, cap, smoothing, *arrays)
    for one, other, true, scale in zip(found, plain, exact(cap, smoothing, *arrays), scales, strict=True):
        assert one.shape == true.shape
        # A processor may add up a token's labels one after the other, and round at each.
        of_labels = 2 * ROUNDING * math.sqrt(vocab) * scale
        allowed = max(
            CLOSE * max(1.0, scale, np.abs(true).max()), 2 * np.abs(np.asarray(other) - true).max(), of_labels
        )
        np.testing.assert_allclose(np.asarray(one), true, rtol=0, atol=allowed)


@pytest.mark.parametrize(
    ("sizes", "mesh_shape", "cap", "block", "more"),
    [
        ((3, 7, 8, 101), (1, 1, 1, 1), 5.0, 400, {}),
        ((5, 8, 8, 101), (1, 2, 2, 2), None, 100, {"has_biases": True}),
        ((2, 9, 8, 7), (1, 2, 1, 3), 3.0, 7, {"has_biases": True, "smoothing": 0.1}),
        ((1, 5, 4, 7), (1, 1, 1, 8), None, 2**20, {"smoothing": 0.2}),
        ((5, 8, 8, 101), (1, 2, 2, 2), 3.0, 400, {"has_biases": True, "smoothing": 0.1, "whole_logits": True}),
        # Axes that split tokens and the vocabulary.
        (
            (5, 8, 8, 101),
            (1, 2, 2, 2),
            None,
            400,
            {"split": VocabularySplit(("data", "mdl"), ("seq",), ("mdl", "seq"))},
        ),
    ],
)
def test_the_numbers_are_those_of_all_logits(sizes, mesh_shape, cap, block, more):
    check(sizes, mesh_shape, cap, block, 0, **more)


def test_a_bias_whose_exponential_overflows_reaches_no_gradient_by_the_filling_of_a_block(monkeypatch):
    monkeypatch.setattr(cross_entropy, "BLOCK_LOGITS", 4 * 11)  # 7 tokens in two blocks of 4

    def loss(hidden, biases):
        labels = jnp.arange(7)[None]
        return jnp.sum(cross_entropy.cross_entropy(hidden, jnp.ones((11, 3)), labels, biases=biases).xent)

    grads = jax.grad(loss, (0, 1))(jnp.zeros((1, 7, 3)), jnp.full(11, 100.0))
    # Each label has a probability of 1 / 11 in each of 7 tokens, less 1 where it is one's label.
    expected = np.where(np.arange(11) < 7, 7 / 11 - 1, 7 / 11)
    np.testing.assert_allclose(grads[0], 0, atol=1e-6)
    np.testing.assert_allclose(grads[1], expected, atol=1e-5)


@pytest.mark.full
@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(data=st.data())
def test_random_settings_have_the_numbers_of_all_logits(data):
    vocab = data.draw(st.sampled_from([7, 8, 101, 257, 1000, 32_000, 151_936]))
    # XLA sums over labels one after the other, with larger errors, where a block has a token or two.
    sizes = (
        data.draw(st.integers(1, 6)),
        data.draw(st.sampled_from([16, 20, 33])),
        data.draw(st.integers(4, 16)),
        vocab,
    )
    mesh_shape = data.draw(
        st.sampled_from([(1, 1, 1, 1), (2, 2, 1, 2), (1, 3, 1, 2), (1, 1, 2, 3), (1, 1, 1, 8), (1, 5, 1, 1)])
    )
    cap = data.draw(st.sampled_from([None, None, 2.0, 30.0]))
    check(
        sizes,
        mesh_shape,
        cap,
        vocab * data.draw(st.integers(8, 40)),
        data.draw(st.integers(0, 10)),
        has_biases=data.draw(st.booleans()),
        smoothing=data.draw(st.sampled_from([0.0, 0.1])),
    )


def test_on_host_devices_its_exchanges_wait_for_the_loops_before_it():
    """XLA's CPU runtime orders an exchange after a loop with exchanges only if it needs the loop's results."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(1, 4, 1, 2), AXES)
    rows = NamedSharding(mesh, PartitionSpec("data", None, "mdl"))

    def xent(hidden, matrix, labels):
        def layer(x, _):
            return jax.lax.with_sharding_constraint(jnp.tanh(x @ jnp.ones((8, 8))), rows), None

        hidden, _ = jax.lax.scan(layer, hidden, length=3)
        return jnp.sum(cross_entropy.cross_entropy(hidden, matrix, labels, split=SPLIT).xent)

    arrays = jnp.zeros((8, 16, 8)), jnp.zeros((101, 8)), jnp.zeros((8, 16), jnp.int32)
    with jax.set_mesh(mesh):
        text = jax.jit(jax.grad(xent, (0, 1))).lower(*arrays).compile().as_text()
    operands = {
        name: re.findall(r"%([\w.-]+)", given)
        for name, given in re.findall(
            r"^  %([\w.-]+) = .*?[\])}] [a-z-]+\((.*?)\)[,\n]", text[text.index("ENTRY") :], re.M
        )
    }

    def needs_a_loop(name):
        return name.startswith("while") or any(map(needs_a_loop, operands.get(name, ())))

    of_the_matrix = [name for name in operands if name.startswith("all_gather")]
    assert of_the_matrix
    assert all(map(needs_a_loop, of_the_matrix))


@pytest.mark.parametrize("mesh", [(1, 1, 1), pytest.param((1, 2, 2), marks=pytest.mark.full)])
def test_a_train_step_has_no_array_of_all_logits(tmp_path, monkeypatch, mesh):
    """The largest array over labels is a block's, and not that of all tokens."""
    fields = ["task.model.lm_tpl.spec.vocab_size=263"]  # no other dimension is as large
    job = make_job(tmp_path, mesh=mesh, exp="lm.llama.TinyLlama", fields=fields)
    labels = -(-263 // mesh[2])
    tokens = math.prod(job.inputs_shape_dtype.ids.shape) // mesh[1]

    def largest():
        text = compile_train_step(job).fn.as_text()
        shapes = [tuple(map(int, found.split(","))) for found in re.findall(r"f32\[([\d,]+)\]", text)]
        return max(math.prod(shape) // labels for shape in shapes if labels in shape)

    width = job.task.model.lm_tpl.spec.model_dims
    assert tokens > 24 > width
    assert largest() == tokens  # one block
    monkeypatch.setattr(cross_entropy, "BLOCK_LOGITS", 24 * labels)
    assert largest() <= 24
