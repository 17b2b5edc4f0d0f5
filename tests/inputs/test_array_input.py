"""Arrays in memory as an input, and properties of all inputs over numbered examples."""

import numpy as np
import pytest
from facts import raises_naming
from input_helpers import assert_same, drain, stack_processes, take
from praxis import base_hyperparams, pax_fiddle
from praxis.py_utils import NestedMap

from spmd_trainer.inputs import batches, examples


def arrays(size=7):
    return {"x": np.arange(size * 6, dtype=np.float64).reshape(size, 2, 3), "src.y": np.arange(size)}


def make(**kwargs):
    defaults = {"arrays": arrays, "batch_size": 3}
    return base_hyperparams.instantiate(pax_fiddle.Config(examples.ArrayInput, **{**defaults, **kwargs}))


def test_evaluation_gives_every_example_once_and_fills_up_with_weight_0():
    given = drain(make())
    assert [batch.src.y.tolist() for batch in given] == [[0, 1, 2], [3, 4, 5], [6, 6, 6]]
    assert [batch.eval_sample_weights.tolist() for batch in given] == [[1, 1, 1], [1, 1, 1], [1, 0, 0]]
    np.testing.assert_array_equal(given[1].x, arrays()["x"][3:6])


def test_batches_are_what_input_specs_says():
    def transform(batch):
        return NestedMap(small=batch.x[:, 0] / 2, weights=np.ones((len(batch.x), 2)), y=batch.src.y)

    for source in (make(), make(transform=transform)):
        specs = source.input_specs()
        for batch in drain(source):
            assert dict(batches.dataset_input_specs(source).FlattenItems()) == dict(specs.FlattenItems())
            assert {path: (x.shape, x.dtype) for path, x in batch.FlattenItems()} == {
                path: (spec.shape, spec.dtype) for path, spec in specs.FlattenItems()
            }
    assert not batch.weights[1:].any()  # rows that fill up count for nothing in any weight
    assert batch.y.dtype == np.int32


def test_training_is_shuffled_and_resumes_for_any_number_of_processes():
    source = make(is_training=True, batch_size=2, input_random_seed=3)
    epoch = np.concatenate([batch.src.y for batch in take(source, 7)])
    assert sorted(epoch[:7]) == sorted(epoch[7:]) == list(range(7))
    assert epoch[:7].tolist() != epoch[7:].tolist()
    state = source.get_state()
    shares = [
        make(is_training=True, batch_size=1, input_random_seed=3, num_infeed_hosts=2, infeed_host_index=i)
        for i in (0, 1)
    ]
    for share in shares:
        share.set_state(state)
    expected = [dict(batch.FlattenItems()) for batch in take(source, 5)]
    flat = [[dict(batch.FlattenItems()) for batch in take(share, 5)] for share in shares]
    assert_same(stack_processes(*flat), expected)


def test_a_position_in_other_arrays_is_refused():
    state = make(is_training=True).get_state()
    changed = {**arrays(), "src.y": np.arange(7)[::-1]}
    with pytest.raises(ValueError, match="arrays was"):
        make(is_training=True, arrays=changed).set_state(state)


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"arrays": {}}, ["`arrays`", "no array"]),
        ({"arrays": {"x": np.zeros(3), "y": np.zeros(2)}}, ["{'x': 3, 'y': 2}", "same number"]),
        ({"arrays": {"x": np.zeros((0, 2))}}, ["{'x': 0}", "same number", "1 or more"]),
        ({"arrays": {"keys": np.zeros(3)}}, ["'keys' can't", "a name"]),
        ({"arrays": {"x": np.array([1, 2**40])}}, ["x holds 1099511627776", "int32"]),
        ({"transform": 3}, ["transform=3;", "a function"]),
        ({"transform": lambda batch: batch.x}, ["result of transform", "not a batch", "ndarray"]),
        ({"transform": lambda batch: {"x": batch.x[:1]}}, ["x", "shape (1, 2, 3)", "3 rows"]),
    ],
)
def test_bad_settings_say_what_to_do(change, facts):
    with raises_naming(ValueError, *facts):
        make(**change).get_next()
