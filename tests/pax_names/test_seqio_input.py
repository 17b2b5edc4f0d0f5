"""SeqIOInput: the rows of Pax's feature converters, positions, and every evaluation example once."""

import itertools
import sys

import jax
import numpy as np
import pax_helpers
import pytest
import seqio
import tensorflow as tf
from facts import raises_naming
from praxis import base_hyperparams, pax_fiddle

from spmd_trainer import seqio_input
from spmd_trainer.errors import UserError
from spmd_trainer.inputs import dataset_input_specs

NAME = "seqio_input_test"


@pytest.fixture(autouse=True, scope="module")
def task():
    return pax_helpers.add_token_task(NAME, splits=("train", "validation"))


def config(is_training=True, **fields):
    given = {
        "mixture_name": NAME,
        "split_name": "train" if is_training else "validation",
        "task_feature_lengths": {"targets": 16},
        "feature_converter": seqio_input.LanguageModelFeatures(pack=is_training),
        "is_training": is_training,
        "batch_size": 4,
        "input_random_seed": 3,
        "reset_for_eval": not is_training,
    }
    return pax_fiddle.Config(seqio_input.SeqIOInput, name="data", **given | fields)


def built(*args, **fields):
    return base_hyperparams.instantiate(config(*args, **fields))


def rows(converter, examples, lengths):
    types = {name: tf.TensorSpec([None], tf.int32) for name in examples[0]}
    ds = tf.data.Dataset.from_generator(lambda: iter(examples), output_signature=types)
    return [jax.tree.map(np.asarray, row) for row in converter(ds, lengths).as_numpy_iterator()]


@pytest.mark.full
def test_packed_prefix_rows_are_those_that_pax_documents():
    examples = [
        {"inputs": [7, 8, 5, 1], "targets": [3, 9, 1]},
        {"inputs": [8, 4, 9, 3, 1], "targets": [4, 1]},
    ]
    (row,) = rows(seqio_input.LanguageModelFeatures(pack=True), examples, {"inputs": 7, "targets": 8})
    expected = {
        "labels": [7, 8, 5, 1, 3, 9, 1, 8, 4, 9, 3, 1, 4, 1, 0],
        "ids": [0, 7, 8, 5, 1, 3, 9, 0, 8, 4, 9, 3, 1, 4, 0],
        "weights": [1] * 14 + [0],
        "segment_pos": [*range(7), *range(7), 0],
        "segment_ids": [1] * 7 + [2] * 7 + [0],
        "paddings": [0] * 14 + [1],
    }
    for name, values in expected.items():
        np.testing.assert_array_equal(row[name], values, err_msg=name)
    assert row.inputs_indicator[:4].tolist() == [1, 1, 1, 1]
    assert row.inputs_indicator[5:7].tolist() == [0, 0]


@pytest.mark.full
def test_weights_of_targets_alone_and_of_negative_ids():
    example = [{"inputs": [7, 8], "targets": [3, -9, 1]}]
    lengths = {"inputs": 2, "targets": 4}
    for only, weights in ((None, [1, 1, 1, 0, 1, 0]), (True, [0, 0, 1, 0, 1, 0]), (False, [1, 1, 1, 1, 1, 0])):
        (row,) = rows(seqio_input.LanguageModelFeatures(weights_on_targets_only=only), example, lengths)
        np.testing.assert_array_equal(row.weights, weights)
        assert row.labels.tolist() == [7, 8, 3, 9, 1, 0]


@pytest.mark.full
def test_reverse_bos_padding_moves_the_labels():
    converter = seqio_input.LanguageModelFeatures(reverse_bos_padding=True, eos_id=1)
    (row,) = rows(converter, [{"targets": [5, 6, 7]}], {"targets": 5})
    assert row.ids.tolist() == [5, 6, 7, 0, 0]
    assert row.labels.tolist() == [6, 7, 0, 0, 1]
    assert row.weights.tolist() == [1, 1, 0, 0, 0]
    assert row.paddings.tolist() == [0, 0, 1, 1, 1]


def test_sequence_model_rows():
    (row,) = rows(
        seqio_input.SequenceModelFeatures(), [{"inputs": [7, 8], "targets": [3, 1]}], {"inputs": 3, "targets": 3}
    )
    assert row.src.ids.tolist() == [7, 8, 0]
    assert row.src.paddings.tolist() == [0, 0, 1]
    assert row.tgt.labels.tolist() == [3, 1, 0]
    assert row.tgt.ids.tolist() == [0, 3, 1]
    assert row.tgt.segment_pos.tolist() == [0, 1, 0]


@pytest.mark.full
def test_specs_are_those_of_the_batches_and_need_no_data():
    for is_training in (True, False):
        batch = built(is_training).get_next()
        found = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
        assert dataset_input_specs(config(is_training)) == found
    unreachable = config(mixture_name="no_such_task")
    assert dataset_input_specs(unreachable).ids.shape == (4, 16)


@pytest.mark.full
def test_a_resumed_input_gives_the_batches_of_one_that_was_not_interrupted():
    first = built()
    batches = [first.get_next() for _ in range(6)]
    stopped = built()
    for _ in range(3):
        stopped.get_next()
    resumed = built()
    resumed.set_state(stopped.get_state())
    for expected in batches[3:]:
        jax.tree.map(np.testing.assert_array_equal, resumed.get_next(), expected)
    assert any((a.ids != b.ids).any() for a, b in itertools.pairwise(batches))


def test_the_position_of_other_batches_is_refused():
    state = built().get_state()
    for other, says in (
        ({"batch_size": 8}, "batch_size was 4 and is 8"),
        ({"input_random_seed": 4}, "seed was 3 and is 4"),
        ({"num_infeed_hosts": 2}, "processes was 1 and is 2"),
    ):
        with raises_naming(UserError, "other batches", says):
            built(**other).set_state(state)


@pytest.mark.full
def test_training_begins_after_the_batches_to_skip():
    whole, later = built(), built(num_batches_to_skip=2)
    for _ in range(2):
        whole.get_next()
    jax.tree.map(np.testing.assert_array_equal, later.get_next(), whole.get_next())


@pytest.mark.full
def test_an_evaluation_gives_every_example_once_on_any_number_of_processes():
    def evaluation(hosts, host):
        return built(False, num_infeed_hosts=hosts, infeed_host_index=host)

    def tokens(sources):
        found = []
        for source in sources:
            while True:
                try:
                    batch = source.get_next()
                except StopIteration:
                    break
                found += [tuple(row) for row, real in zip(batch.ids, batch.eval_sample_weights, strict=True) if real]
                assert not batch.weights[batch.eval_sample_weights == 0].any()
        return sorted(found)

    alone = tokens([evaluation(1, 0)])
    assert len(alone) % 4  # so that the last batch has rows to fill up
    assert tokens([evaluation(2, 0), evaluation(2, 1)]) == alone
    again = evaluation(1, 0)
    assert tokens([again]) == alone
    again.reset()
    assert tokens([again]) == alone


def test_without_reset_for_eval_an_evaluation_has_so_many_batches():
    source = built(False, reset_for_eval=False, eval_loop_num_batches=2, repeat=True)
    for _ in range(2):
        first = source.get_next()
        source.get_next()
        with pytest.raises(StopIteration):
            source.get_next()
        source.reset()
    jax.tree.map(np.testing.assert_array_equal, source.get_next(), first)


def test_configs_for_the_tasks_of_a_mixture():
    seqio.MixtureRegistry.remove("seqio_input_mixture")
    seqio.MixtureRegistry.add("seqio_input_mixture", [NAME], default_rate=1.0)
    lengths = {"inputs": 8, "targets": 4}
    kind = seqio_input.MetricType
    configs = seqio_input.get_eval_hparams_for_seqio(
        "seqio_input_mixture", 4, lengths, 1, kind.PREDICT, require_metric_fns=False
    )
    assert [p.name for p in configs] == [NAME]
    assert configs[0].task_feature_lengths == {"inputs": 8, "targets": 1}
    assert not seqio_input.get_eval_hparams_for_seqio("seqio_input_mixture", 4, lengths, 1, kind.SCORE)


@pytest.mark.parametrize(
    ("metric_type", "flags", "wanted"),
    [
        ("SCORE", [], {"inputs": 8, "targets": 4}),
        ("SCORE", ["eval_metrics_retain_task_features"], {"inputs": 8, "targets": 4, "notes": 2}),
        ("PREDICT", ["eval_metrics_retain_task_features"], {"inputs": 8, "targets": 1}),
        ("PREDICT", ["pass_entire_feature_lengths"], {"inputs": 8, "targets": 1, "notes": 2}),
    ],
)
def test_lengths_of_further_features_are_kept_if_asked(metric_type, flags, wanted):
    (config,) = seqio_input.get_eval_hparams_for_seqio(
        NAME,
        4,
        {"inputs": 8, "targets": 4, "notes": 2},
        1,
        seqio_input.MetricType[metric_type],
        require_metric_fns=False,
        **dict.fromkeys(flags, True),
    )
    assert config.task_feature_lengths == wanted


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"mixture_name": None}, "either mixture_name or mixture_or_task"),
        ({"task_feature_lengths": None}, "task_feature_lengths is not"),
        ({"deterministic_input": True}, "not published"),
    ],
)
def test_settings_that_make_no_input(fields, says):
    with pytest.raises(UserError, match=says):
        built(**fields)


def test_a_task_that_is_not_registered():
    with raises_naming(UserError, "no_such_task", "Import the module"):
        built(mixture_name="no_such_task").get_next()


def test_without_the_extra_the_module_imports_and_says_what_to_install(monkeypatch):
    made = config()
    monkeypatch.setitem(sys.modules, "seqio", None)
    with raises_naming(UserError, "Install", "extra `seqio`"):
        base_hyperparams.instantiate(made)
    with raises_naming(UserError, "LanguageModelFeatures:", "Install", "extra `seqio`"):
        seqio_input.LanguageModelFeatures(pack=True)
    with pytest.raises(UserError, match="not published"):
        seqio_input.configure_deterministic_input(made, remove_provenance_fc=None)


@pytest.mark.parametrize("limit", [None, -1, 0])
def test_an_evaluation_without_end_is_refused(limit):
    with raises_naming(UserError, "eval_loop_num_batches", "repeat=False"):
        built(False, reset_for_eval=False, eval_loop_num_batches=limit, repeat=True)
