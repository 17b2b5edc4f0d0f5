"""A live state moves between meshes and layouts: same values, new padding, and training goes on as if nothing had been."""

import jax
import numpy as np
import pytest
from praxis import pax_fiddle

from spmd_trainer import sharding, tasks_lib
from spmd_trainer.experiments.synthetic import structures
from spmd_trainer.step import moving, pjit, step_fns
from spmd_trainer.training import verify

KEY = jax.random.key(4)
NAMES = ("replica", "data", "mdl")
EXPERIMENT = structures.TinyLm()
TASK = tasks_lib.build_task(EXPERIMENT.task())
SOURCE = pax_fiddle.build(EXPERIMENT.train_datasets()[0])
BATCHES = [SOURCE.get_next_padded() for _ in range(6)]
SHAPES = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), BATCHES[0])


def on(sizes, first=0):
    devices = jax.devices()[first : first + int(np.prod(sizes))]
    partitioner = pjit.PjitPartitioner(
        sharding.create_device_mesh(list(zip(NAMES, sizes, strict=True)), devices=devices)
    )
    partitioner.setup(TASK, SHAPES)
    return partitioner


def logical(partitioner, state):
    return verify._logical(partitioner.metadata, state)


@pytest.mark.parametrize(
    ("source", "target", "first"),
    [
        pytest.param((1, 4, 2), (1, 2, 2), 0, marks=pytest.mark.full),  # shrink
        pytest.param((1, 2, 2), (1, 4, 2), 0, marks=pytest.mark.full),  # grow
        pytest.param((1, 4, 1), (1, 1, 4), 4, marks=pytest.mark.full),  # other devices
        pytest.param((1, 8, 1), (1, 1, 8), 0, marks=pytest.mark.full),  # other layout, same devices
        ((1, 1, 3), (1, 2, 4), 0),  # padded to 63, to 64: neither divides the other
    ],
)
def test_values_survive_and_padding_is_zero(source, target, first):
    old, new = on(source), on(target, first)
    state = old.initialize_train_state(KEY)
    before = logical(old, state)
    moved = moving.move_state(state, old.metadata, new.metadata)
    for path, value in logical(new, moved).items():
        np.testing.assert_array_equal(value, before[path], err_msg=path)
    for variable, x, where in zip(
        new.metadata.records(), jax.tree.leaves(moved), jax.tree.leaves(new.metadata.shardings), strict=True
    ):
        assert x.shape == variable.padded_shape
        assert x.sharding.is_equivalent_to(where, x.ndim), variable.path
        whole = np.array(x)
        whole[tuple(slice(n) for n in variable.logical_shape)] = 0
        assert not whole.any(), variable.path


@pytest.mark.full
def test_a_run_that_goes_from_8_to_4_to_8_devices_has_the_losses_of_one_that_stays():
    def steps(partitioner, state, batches):
        step = partitioner.partition(step_fns.train_step, SHAPES, is_eval=False)
        losses = []
        for batch in batches:
            state, out = step(state, KEY, partitioner.layout.put(batch))
            losses.append(float(out.loss))
        return state, losses

    eight, four = on((1, 4, 2)), on((1, 2, 2))
    _, stayed = steps(eight, eight.initialize_train_state(KEY), BATCHES)
    state, losses = steps(eight, eight.initialize_train_state(KEY), BATCHES[:2])
    state, more = steps(four, moving.move_state(state, eight.metadata, four.metadata), BATCHES[2:4])
    _, last = steps(eight, moving.move_state(state, four.metadata, eight.metadata), BATCHES[4:])
    np.testing.assert_allclose(losses + more + last, stayed, rtol=1e-5)


@pytest.mark.full
def test_the_old_state_is_used_up_when_donated_and_stays_when_not():
    old, new = on((1, 4, 2)), on((1, 2, 2))
    state = old.initialize_train_state(KEY)
    moving.move_state(state, old.metadata, new.metadata, donate=False)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))
    moving.move_state(state, old.metadata, new.metadata)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))


@pytest.mark.full
def test_from_training_layout_to_decode_layout_without_optimizer_states():
    train, decode = on((1, 8, 1)), on((1, 1, 8))
    state = train.initialize_train_state(KEY)
    old, new = train.layout.without_opt_states(), decode.layout.without_opt_states()
    moved = moving.move_state(state.to_eval_state(), old, new, donate=False)
    before = logical(train, state)
    arrays = zip(new.records(), jax.tree.leaves(moved), strict=True)
    for variable, x in arrays:
        index = tuple(slice(n) for n in variable.logical_shape)
        np.testing.assert_array_equal(np.asarray(x)[index], before[variable.path])


@pytest.mark.full
def test_another_models_layout_is_refused_by_name():
    other_p = EXPERIMENT.task()
    other_p.model.lm_tpl.vocab_size = 59
    other = pjit.PjitPartitioner()
    other.setup(tasks_lib.build_task(other_p), SHAPES)
    old = on((1, 4, 2))
    with pytest.raises(ValueError, match=r"softmax/logits_ffn/.* is \(\(.*61.*59"):
        moving.move_state(old.initialize_train_state(KEY), old.metadata, other.metadata)
