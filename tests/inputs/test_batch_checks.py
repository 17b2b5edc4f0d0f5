"""Impossible values in a batch are refused, with the input, the field, the row, the value and the valid range."""

import numpy as np
import pytest
from facts import raises_naming
from praxis.py_utils import NestedMap

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import synthetic
from spmd_trainer.inputs.batch_checks import check_values
from spmd_trainer.inputs.prefetch import Prefetcher

VOCABULARY = 61


def make_input(vocab_size=VOCABULARY):
    return synthetic.SyntheticLmInput(
        seq_len=5, vocab_size=vocab_size, batch_size=4, name="corpus", is_training=True, input_random_seed=1
    )


def changed(field, index, value):
    batch = make_input().get_next()
    batch[field] = batch[field].copy()
    batch[field][index] = value
    return batch


def test_a_good_batch_passes():
    batch = make_input().get_next()
    check_values("corpus", batch, VOCABULARY)
    batch.ids[0, 0], batch.labels[0, 0] = 0, VOCABULARY - 1
    check_values("corpus", batch, VOCABULARY)


@pytest.mark.parametrize(
    ("field", "index", "value", "facts"),
    [
        ("ids", (2, 3), 1_000_000, ["ids is 1000000", "row 2, position 3", "0 to 60"]),
        ("ids", (1, 0), -5, ["ids is -5", "row 1, position 0", "0 to 60"]),
        ("labels", (0, 4), VOCABULARY, ["labels is 61", "row 0, position 4", "0 to 60", "vocab_size"]),
        ("labels", (3, 1), -1, ["labels is -1", "row 3"]),
        ("weights", (1, 2), np.nan, ["weights is nan", "row 1, position 2", "finite", "0 or more"]),
        ("weights", (1, 2), np.inf, ["weights is inf", "row 1"]),
        ("weights", (3, 0), -0.5, ["weights is -0.5", "row 3, position 0"]),
        ("eval_sample_weights", (2,), -1.0, ["eval_sample_weights is -1.0", "row 2"]),
    ],
)
def test_an_impossible_value_is_refused(field, index, value, facts):
    with raises_naming(UserError, "input 'corpus':", *facts):
        check_values("corpus", changed(field, index, value), VOCABULARY)


def test_labels_without_weight_may_be_anything():
    batch = changed("labels", (0, 4), -100)
    batch.weights[0, 4] = 0
    check_values("corpus", batch, VOCABULARY)


def test_a_model_without_a_vocabulary_may_have_any_labels_but_no_negative_weights():
    batch = NestedMap(labels=np.array([-3, 10**6]), image=NestedMap(weight=np.array([1.0, -2.0])))
    with pytest.raises(UserError, match="image/weight is -2"):
        check_values("images", batch, None)
    batch.image.weight = np.zeros(2)
    check_values("images", batch, None)


def test_the_thread_that_makes_the_batches_refuses_a_bad_one_in_their_middle():
    batches = [make_input().get_next(), changed("ids", (2, 3), 99)]

    class Bad:
        name = "corpus"

        def get_next_padded(self):
            return batches.pop(0)

        def get_state(self):
            raise NotImplementedError

    def put(batch):
        check_values("corpus", batch, VOCABULARY)
        return batch

    with Prefetcher(Bad(), put) as prefetched:
        next(prefetched)
        with pytest.raises(UserError, match=r"^input 'corpus': ids is 99 at row 2"):
            next(prefetched)
