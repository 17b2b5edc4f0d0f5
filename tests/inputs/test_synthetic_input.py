"""Synthetic batches: shapes, ranges, positions, and a language that can be learned."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from input_helpers import assert_same, drain, stack_processes, take

from spmd_trainer.inputs import synthetic

SPECS = {
    "images": ((4, 3), "float32", 2.0),
    "labels": ((), "int32", 10),
    "half": ((5,), "bfloat16", 1.0),
    "flags": ((2,), bool, 0),
    "src.ids": ((6,), np.int64, 7),
}


def make(**kwargs):
    return synthetic.SyntheticInput(**{"specs": SPECS, "batch_size": 4, **kwargs})


def make_lm(**kwargs):
    return synthetic.SyntheticLmInput(**{"seq_len": 6, "vocab_size": 11, "batch_size": 4, **kwargs})


@pytest.mark.parametrize("source", [make(), make_lm(), make_lm(num_examples=3)])
def test_batches_are_what_input_specs_says(source):
    batch, specs = source.get_next(), source.input_specs()
    assert jax.tree.structure(batch) == jax.tree.structure(specs)
    for leaf, spec in zip(jax.tree.leaves(batch), jax.tree.leaves(specs), strict=True):
        assert (leaf.shape, leaf.dtype) == (spec.shape, spec.dtype)


def test_values_fill_their_range():
    batch = make(batch_size=500).get_next()
    for name, maxval in (("images", 2.0), ("half", 1.0), ("labels", 10)):
        values = batch[name].astype(np.float64)
        assert values.min() >= 0
        assert values.max() < maxval
        assert abs(values.mean() - (maxval - (name == "labels")) / 2) < 0.05 * maxval
    assert set(np.unique(batch.src.ids)) == set(range(7))
    assert 0.4 < batch.flags.mean() < 0.6


def test_rows_batches_names_and_seeds_differ():
    first, second = take(make(), 2)
    assert not np.array_equal(first.images, second.images)
    assert not np.array_equal(first.images[0], first.images[1])
    assert not np.array_equal(make(input_random_seed=1).get_next().images, first.images)
    two = synthetic.SyntheticInput(specs={"a": ((9,), "float32", 1.0), "b": ((9,), "float32", 1.0)}, batch_size=2)
    batch = two.get_next()
    assert not np.array_equal(batch.a, batch.b)


@pytest.mark.parametrize(
    "make_input", [make_lm, lambda **k: synthetic.SyntheticInput(specs={"x": ((3,), int, 99)}, **k)]
)
def test_positions_and_processes(make_input):
    alone = make_input(batch_size=4, is_training=True)
    take(alone, 3)
    shares = [make_input(batch_size=2, is_training=True, num_infeed_hosts=2, infeed_host_index=i) for i in (0, 1)]
    for share in shares:
        share.set_state(alone.get_state())
    assert_same(stack_processes(*(take(share, 3) for share in shares)), take(alone, 3))


def test_a_position_of_other_specs_is_refused():
    other = make(specs={"labels": ((), "int32", 11)})
    with pytest.raises(ValueError, match="specs was"):
        other.set_state(make().get_state())


def test_a_finite_set_gives_each_example_once_and_repeats_in_training():
    batches = drain(make_lm(num_examples=6))
    weights = np.concatenate([batch.eval_sample_weights for batch in batches])
    np.testing.assert_array_equal(weights, [1, 1, 1, 1, 1, 1, 0, 0])
    assert not batches[1].weights[2:].any()
    assert batches[1].paddings[2:].all()
    rows = np.concatenate([batch.labels for batch in batches])[:6]
    training = np.concatenate([batch.labels for batch in take(make_lm(num_examples=6, is_training=True), 3)])
    np.testing.assert_array_equal(training, np.concatenate([rows, rows]))


def test_without_num_examples_evaluation_is_endless():
    source = make(is_training=False)
    assert source.num_batches is None
    assert not source.reset_for_eval


def test_labels_follow_the_rule():
    batch = make_lm().get_next()
    np.testing.assert_array_equal(batch.labels, (5 * batch.ids + 3) % 11)
    np.testing.assert_array_equal(batch.ids[:, 1:], batch.labels[:, :-1])
    assert batch.weights.all()


def test_the_language_can_be_learned():
    """A table of logits, trained by plain gradient descent, comes from log(11) to nearly nothing."""
    source = make_lm(is_training=True, batch_size=32)

    def loss_fn(table, batch):
        log_probs = jax.nn.log_softmax(table[batch.ids])
        picked = jnp.take_along_axis(log_probs, batch.labels[..., None], axis=-1)[..., 0]
        return -jnp.sum(picked * batch.weights) / jnp.sum(batch.weights)

    step = jax.jit(jax.value_and_grad(loss_fn))
    table, losses = jnp.zeros((11, 11)), []
    for batch in take(source, 40):
        loss, grad = step(table, batch)
        table, losses = table - 10.0 * grad, [*losses, float(loss)]
    assert abs(losses[0] - np.log(11)) < 1e-5
    assert losses[-1] < 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"specs": None}, "specs=None; give e.g."),
        ({"specs": {"x": 3}}, r"specs\['x'\]=3 is not"),
        ({"specs": {"x": ((2,), "float32")}}, "is not"),
        ({"specs": {"x": ((-2,), "float32", 1.0)}}, "is not"),
        ({"specs": {"x": ((2,), "int8", 200)}}, "is not"),
        ({"specs": {"x": ((2,), "int32", 0)}}, "is not"),
        ({"specs": {"x": ((2,), "str", 1)}}, "is not"),
        ({"num_examples": 0}, "num_examples=0; set it to"),
        ({"reset_for_eval": True}, "reset_for_eval is .* never ends"),
    ],
)
def test_bad_settings_say_what_to_do(change, message):
    with pytest.raises(ValueError, match=rf"SyntheticInput 'input': .*{message}"):
        make(**change)


@pytest.mark.full
def test_tensorflow_is_not_imported():
    code = """
import sys
from spmd_trainer.inputs import synthetic
synthetic.SyntheticInput(specs={"x": ((3,), "float32", 1.0)}, batch_size=2).get_next_padded()
synthetic.SyntheticLmInput(seq_len=3, batch_size=2, is_training=True).get_next_padded()
assert "tensorflow" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
