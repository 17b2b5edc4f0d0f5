"""A batch in parts, split by the compiler: the update of the whole batch, rows in their order, less memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from praxis import pax_fiddle

from spmd_trainer import sharding, tasks_lib
from spmd_trainer.experiments.lm.stdlib import StdlibBytesTiny
from spmd_trainer.inputs import synthetic
from spmd_trainer.step import minibatches, pjit, step_fns
from tests.facts import raises_naming

# One worker: what these tests share is made once.
pytestmark = pytest.mark.xdist_group("minibatches")

KEY = jax.random.key(3)
ROWS, LENGTH = 12, 16


def make_partitioner(sizes, batch, num_minibatches):
    devices = jax.devices()[: int(np.prod(sizes))]
    mesh = sharding.create_device_mesh(list(zip(StdlibBytesTiny.MESH_AXIS_NAMES, sizes, strict=True)), devices=devices)
    partitioner = pjit.PjitPartitioner(mesh, num_minibatches=num_minibatches)
    partitioner.setup(tasks_lib.build_task(StdlibBytesTiny().task()), shapes_of(batch))
    return partitioner


def shapes_of(batch):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)


@pytest.fixture(scope="module")
def batch():
    lm = pax_fiddle.Config(
        synthetic.SyntheticLmInput, name="lm", batch_size=ROWS, seq_len=LENGTH, vocab_size=257, is_training=True
    )
    batch = pax_fiddle.build(lm).get_next()
    # Rows of unequal weight, so that a mean over the minibatches' means would be wrong.
    batch.weights *= (np.arange(LENGTH) < 2 + np.arange(ROWS)[:, None]).astype(np.float32)
    return batch


def run(batch, sizes, num_minibatches):
    partitioner = make_partitioner(sizes, batch, num_minibatches)
    step = partitioner.partition(step_fns.train_step, shapes_of(batch), is_eval=False)
    state = partitioner.initialize_train_state(KEY)
    for _ in range(2):
        inputs = partitioner.layout.put(batch)
        state, output = step(state, KEY, inputs)
    return jax.device_get(jax.jit(partitioner.metadata.slice)(state)), jax.device_get(output)


@pytest.fixture(scope="module")
def whole(batch):
    return run(batch, (1, 1, 1), 1)


@pytest.mark.parametrize(
    ("sizes", "num_minibatches"),
    [
        pytest.param((1, 1, 1), 3, marks=pytest.mark.full),
        pytest.param((1, 4, 2), 2, marks=pytest.mark.full),
        ((1, 4, 2), 4),
    ],
)
@pytest.mark.full
def test_the_update_is_that_of_the_whole_batch(batch, whole, sizes, num_minibatches):
    state, output = run(batch, sizes, num_minibatches)
    expected_state, expected = whole
    np.testing.assert_allclose(output.loss, expected.loss, rtol=1e-5)
    scalars = dict(expected.weighted_scalars)
    # A count has constant weight, so it is the mean over the minibatches.
    count, _ = scalars.pop("num_predictions")
    assert output.weighted_scalars["num_predictions"][0] == count / num_minibatches
    for name, (value, weight) in scalars.items():
        np.testing.assert_allclose(output.weighted_scalars[name][0], value, rtol=1e-5, err_msg=name)
        if name == StdlibBytesTiny().task().train.learner.loss_name:
            np.testing.assert_allclose(output.weighted_scalars[name][1], weight, rtol=1e-6)
    by_row = [
        (x, y) for x, y in zip(*map(jax.tree.leaves, (output.per_example_out, expected.per_example_out)), strict=True)
    ]
    assert any(np.ndim(y) and len(y) == ROWS for _, y in by_row)
    for x, y in by_row:
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(expected_state), strict=True):
        # Adam divides by the gradient's own size, so that a gradient near zero shows its rounding.
        np.testing.assert_allclose(x, y, atol=1e-3 * max(1e-3, float(np.abs(y).max())))


@pytest.mark.full
def test_minibatches_take_less_memory(batch):
    # Enough rows for activations to outweigh the gradients.
    batch = jax.tree.map(lambda x: np.repeat(x, 4, axis=0), batch)

    def temporaries(num_minibatches):
        partitioner = make_partitioner((1, 4, 2), batch, num_minibatches)
        step = partitioner.partition(step_fns.train_step, shapes_of(batch), is_eval=False)
        lowered = step.lower(KEY)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporaries(4) < 0.5 * temporaries(1)


@pytest.mark.parametrize(
    ("num_minibatches", "message"),
    [(5, r"num_minibatches=5 doesn't divide .* 12 rows; choose one of 1, 2, 3, 4, 6, 12"), (0, "at least 1")],
)
def test_a_number_that_does_not_divide_the_batch_is_refused(batch, num_minibatches, message):
    with pytest.raises(ValueError, match=message):
        make_partitioner((1, 1, 1), batch, num_minibatches)


def _gradients(dtype, num_minibatches=8, rows=16, width=64, param_dtype=jnp.bfloat16):
    """Returns a jitted sum of the gradients of sum(x * w) with respect to w, with its arguments."""

    def loss_fn(w, carry, x, key, index):
        del key, index
        return jnp.sum((x @ w.astype(x.dtype)).astype(jnp.float32) ** 2), (carry, (), ())

    w = jnp.asarray(np.random.default_rng(0).normal(size=(width, width)), param_dtype)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(rows, width)), param_dtype)
    run = lambda w, x: minibatches.accumulate_gradients(loss_fn, w, (), x, KEY, num_minibatches, dtype)[0]  # noqa: E731
    return jax.jit(run), w, x


def test_gradients_in_bfloat16_are_added_up_in_float32():
    run, w, x = _gradients("float32")
    one, _, _ = _gradients(None, 1)
    parts = [np.asarray(one(w, part), np.float32) for part in x.reshape(8, 2, -1)]
    total = functools.reduce(np.add, parts)
    found = run(w, x)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, total)
    rounded = _gradients("bfloat16")[0](w, x)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_allclose(rounded.astype(np.float32), total, rtol=0.05, atol=0.05 * np.abs(total).max())
    assert np.abs(rounded.astype(np.float32) - total).max() > 0


@pytest.mark.parametrize("num_minibatches", [2, 8])
def test_gradients_of_minibatches_are_added_up_in_one_buffer(num_minibatches):
    """Beside the sum, which is the output, there is the gradient of one minibatch, whatever their number."""
    run, w, x = _gradients("float32", num_minibatches, width=512, param_dtype=jnp.float32)
    memory = run.lower(w, x).compile().memory_analysis()
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 2.2 * w.nbytes


def test_an_unknown_dtype_of_the_sum_is_refused():
    task_p = StdlibBytesTiny().task()
    task_p.train.gradient_accumulation_dtype = "float16"
    with raises_naming(ValueError, "gradient_accumulation_dtype", "float16", "bfloat16"):
        tasks_lib.build_task(task_p)
