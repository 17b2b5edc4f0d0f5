"""Grain datasets with random access, and streams."""

import numpy as np
import pytest
from facts import raises_naming
from input_helpers import assert_same, drain, stack_processes, take
from praxis import base_hyperparams, pax_fiddle

from spmd_trainer.inputs import grain_input

grain = pytest.importorskip("grain")
SIZE = 11


def numbered():
    """Elements in order, with a number of their own drawn by Grain."""
    elements = [{"x": np.array([i, i + 0.5]), "n": i} for i in range(SIZE)]
    return grain.MapDataset.source(elements).seed(3).random_map(lambda e, rng: {**e, "noise": rng.random()})


def shuffled():
    return numbered().shuffle(seed=4)


def stream(index, count):
    """The elements of a share that 3 doesn't divide, without end."""
    share = numbered().slice(slice(index, None, count)).repeat().to_iter_dataset()
    return share.filter(lambda element: element["n"] % 3 != 0)


def make(dataset, kind=grain_input.GrainInput, **kwargs):
    return base_hyperparams.instantiate(pax_fiddle.Config(kind, **{"dataset": dataset, "batch_size": 4, **kwargs}))


def make_stream(dataset=stream, **kwargs):
    return make(dataset, grain_input.GrainStreamInput, **kwargs)


def assert_fits_specs(source, taken):
    for batch in taken:
        assert {name: (x.shape, x.dtype) for name, x in batch.items()} == {
            name: (spec.shape, spec.dtype) for name, spec in source.input_specs().items()
        }


@pytest.mark.parametrize("read_threads", [0, 2])
def test_evaluation_gives_every_element_once(read_threads):
    source = make(numbered, read_threads=read_threads)
    given = drain(source)
    assert np.concatenate([batch.n for batch in given]).tolist() == [*range(SIZE), SIZE - 1]
    assert np.concatenate([batch.eval_sample_weights for batch in given]).tolist() == [1] * SIZE + [0]
    assert_fits_specs(source, given)
    source.reset()
    assert_same(drain(source), given)


def test_training_repeats_with_an_order_for_each_epoch():
    given = take(make(shuffled, is_training=True), 11)
    epochs = np.concatenate([batch.n for batch in given]).reshape(4, SIZE)
    for epoch in epochs:
        assert sorted(epoch) == list(range(SIZE))
    assert len({tuple(epoch) for epoch in epochs}) == 4
    noise = np.concatenate([batch.noise for batch in given])
    assert len(set(noise.tolist())) == len(noise)


def test_training_resumes_exactly_for_any_number_of_processes():
    source = make(shuffled, is_training=True)
    take(source, 5)
    state = source.get_state()
    expected = take(source, 6)
    resumed = make(shuffled, is_training=True)
    take(resumed, 2)
    resumed.set_state(state)
    assert resumed.get_state() == state
    assert_same(take(resumed, 6), expected)
    shares = [make(shuffled, is_training=True, batch_size=2, num_infeed_hosts=2, infeed_host_index=i) for i in (0, 1)]
    for share in shares:
        share.set_state(state)
    assert_same(stack_processes(*(take(share, 6) for share in shares)), expected)


def test_two_processes_evaluate_every_element_once():
    alone = make(numbered)
    shares = [make(numbered, batch_size=2, num_infeed_hosts=2, infeed_host_index=i) for i in (0, 1)]
    assert_same(stack_processes(*(drain(share) for share in shares)), drain(alone))


@pytest.mark.parametrize("consumed", [0, 1, 4])
def test_a_stream_resumes_exactly(consumed):
    source = make_stream(is_training=True)
    take(source, consumed)
    state = source.get_state()
    expected = take(source, 5)
    assert_fits_specs(source, expected)
    resumed = make_stream(is_training=True)
    take(resumed, 2)
    resumed.set_state(state)
    assert_same(take(resumed, 5), expected)


def test_each_process_reads_its_own_share_of_a_stream():
    shares = [make_stream(is_training=True, batch_size=3, num_infeed_hosts=2, infeed_host_index=i) for i in (0, 1)]
    seen = [set(np.concatenate([batch.n for batch in take(share, 5)]).tolist()) for share in shares]
    assert seen == [{2, 4, 8, 10}, {1, 5, 7}]


def test_a_finite_stream_is_evaluated_once():
    source = make_stream(lambda index, count: numbered().to_iter_dataset())
    given = drain(source)
    counted = np.concatenate([batch.n[batch.eval_sample_weights > 0] for batch in given])
    assert counted.tolist() == list(range(SIZE))
    assert_fits_specs(source, given)
    assert drain(source) == []
    source.reset()
    assert_same(drain(source), given)
    padded = make_stream(lambda index, count: numbered().to_iter_dataset(), batch_padding_size=4).get_next_padded()
    assert padded.eval_sample_weights.tolist() == [1] * 4 + [0] * 4


def test_positions_of_other_pipelines_are_refused():
    state = make(numbered, is_training=True).get_state()
    with pytest.raises(ValueError, match="num_examples was 11 and is 5"):
        make(lambda: numbered()[:5], is_training=True).set_state(state)
    with raises_naming(ValueError, "saved position", "b'{}'"):
        make_stream(is_training=True).set_state(b"{}")
    with raises_naming(ValueError, "saved position", "1 processes", "these are 2"):
        make_stream(is_training=True, num_infeed_hosts=2).set_state(make_stream(is_training=True).get_state())


@pytest.mark.parametrize(
    ("dataset", "facts"),
    [
        (lambda: numbered().to_iter_dataset(), ["an IterDataset", "GrainStreamInput"]),
        (lambda: [1, 2], ["dataset gives list", "grain.MapDataset"]),
        (lambda: numbered()[:0], ["the dataset", "no element"]),
        (lambda: numbered().repeat(), ["without end", "leave out repeat"]),
        (lambda: numbered().map(lambda e: {"x": "text"}), ["x holds <U4", "no device"]),
        (lambda: numbered().map(lambda e: {"x": 1e300}), ["x holds 1e+300", "float32"]),
        (lambda: numbered().filter(lambda element: element["n"] != 1), ["leaves out elements"]),
        (lambda: grain.MapDataset.range(5), ["element 0", "not an example", "int"]),
        (lambda: numbered().map(lambda e: {"ids": np.zeros(e["n"])}), ["element 1", "ids of shape (1,)", "crop, pad"]),
    ],
)
def test_datasets_that_do_not_fit_say_why(dataset, facts):
    with raises_naming(ValueError, "GrainInput 'input':", *facts):
        drain(make(dataset))


def test_streams_that_do_not_fit_say_why():
    with raises_naming(ValueError, "2 processes", "shares", "GrainInput", "grain.MapDataset"):
        make_stream(num_infeed_hosts=2)
    with raises_naming(ValueError, f"dataset gives {type(numbered()).__name__}", "grain.IterDataset"):
        make_stream(lambda index, count: numbered())
    with raises_naming(ValueError, "'input': dataset=None", "a function"):
        make_stream(None)
    with raises_naming(ValueError, "the dataset", "no element"):
        make_stream(lambda index, count: numbered()[:0].to_iter_dataset()).get_next()
