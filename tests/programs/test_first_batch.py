"""An input that doesn't give what its specs declare is refused at its first batch, leaf by leaf."""

import jax
import numpy as np
import pytest
from praxis.py_utils import NestedMap
from trained_helpers import make_job, trained

from spmd_trainer.errors import UserError
from spmd_trainer.programs import evaluate, first_batch, train

pytestmark = pytest.mark.xdist_group("trained")

DECLARED = NestedMap(
    ids=jax.ShapeDtypeStruct((4, 8), np.int32), image=NestedMap(pixels=jax.ShapeDtypeStruct((4, 3), np.float32))
)


def batch(**changes):
    return NestedMap(ids=np.zeros((4, 8), np.int32), image=NestedMap(pixels=np.zeros((4, 3), np.float32)), **changes)


def test_what_is_declared_passes():
    first_batch.check("x", batch(), DECLARED)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda b: b.update(ids=b.ids.astype(np.int64)), r"ids is int64 \[4, 8\], declared int32 \[4, 8\]"),
        (lambda b: b.update(ids=b.ids[:, :7]), r"ids is int32 \[4, 7\], declared int32 \[4, 8\]"),
        (lambda b: b.image.pop("pixels"), r"image/pixels is missing, declared float32 \[4, 3\]"),
        (lambda b: b.update(more=np.zeros(4, np.float32)), r"more, float32 \[4\], is not declared"),
    ],
)
def test_each_difference_is_named(change, words):
    given = batch()
    change(given)
    with pytest.raises(UserError, match=rf"first batch of input 'x' is not what its specs declare: {words}\. Make"):
        first_batch.check("x", given, DECLARED)


def test_a_long_list_is_cut():
    given = NestedMap({f"leaf{i}": np.zeros(1) for i in range(9)})
    with pytest.raises(UserError, match="and 4 more"):
        first_batch.check("x", given, NestedMap())


class Casts:
    """An input whose labels have another dtype than is declared."""

    def __init__(self, source):
        self._source = source

    def __getattr__(self, name):
        return getattr(self._source, name)

    def get_next_padded(self):
        given = self._source.get_next_padded()
        return NestedMap({**given, "labels": given.labels.astype(np.int64)})


def test_training_and_evaluation_refuse_such_an_input_unless_told_not_to_look(tmp_path):
    fields = ("task.train.num_train_steps=1", "task.train.eval_interval_steps=0")
    job = make_job(tmp_path / "a", mesh=(1, 1, 1), fields=fields, enable_checkpoint_saving=False)
    build = job.build_train_input
    job.build_train_input = lambda: Casts(build())
    with pytest.raises(UserError, match=r"'stdlib_train' failed at batch 0.*labels is int64 \[8, 32\], declared int32"):
        train.train(job)
    fields = (*fields, "task.train.enforce_input_specs=False")
    unchecked = make_job(tmp_path / "b", mesh=(1, 1, 1), fields=fields, enable_checkpoint_saving=False)
    build_unchecked = unchecked.build_train_input
    unchecked.build_train_input = lambda: Casts(build_unchecked())
    assert train.train(unchecked).step == 1

    job = make_job(tmp_path / "c", mesh=(1, 1, 1), restore_checkpoint_dir=trained() / "checkpoints", mode="eval")
    build_input = job.build_input
    job.build_input = lambda input_p: Casts(build_input(input_p))
    with pytest.raises(UserError, match=r"first batch of input 'heldout'.*labels is int64 \[8, 32\]"):
        evaluate.evaluate_checkpoints(job)
