"""Training and evaluation refuse impossible values in any batch."""

import numpy as np
import pytest
from facts import raises_naming
from praxis.py_utils import NestedMap
from trained_helpers import make_job, trained

from spmd_trainer.errors import UserError
from spmd_trainer.training import evaluate, train
from spmd_trainer.training.job import Job

pytestmark = [pytest.mark.xdist_group("trained"), pytest.mark.full]


class Spoils:
    """An input that has an impossible value in its second batch."""

    def __init__(self, source, field, value):
        self._source = source
        self._field = field
        self._value = value
        self._given = 0

    def __getattr__(self, name):
        return getattr(self._source, name)

    def get_next_padded(self):
        batch = NestedMap(self._source.get_next_padded())
        self._given += 1
        if self._given == 2:
            values = np.array(batch[self._field])
            values[1, 2] = self._value
            batch[self._field] = values
        return batch


@pytest.mark.parametrize(
    ("field", "value", "facts"),
    [
        ("ids", 10**6, ("ids is 1000000", "row 1, position 2", "vocabulary is 0 to")),
        ("weights", np.nan, ("weights is nan", "row 1, position 2")),
    ],
)
def test_training_and_evaluation_refuse_an_impossible_value(tmp_path, monkeypatch, field, value, facts):
    checkpoints, build = trained() / "checkpoints", Job.build_input
    monkeypatch.setattr(Job, "build_input", lambda job, input_p: Spoils(build(job, input_p), field, value))
    fields = ("task.train.num_train_steps=3", "task.train.eval_interval_steps=0")
    job = make_job(tmp_path / "a", mesh=(1, 1, 1), fields=fields, enable_checkpoint_saving=False)
    with raises_naming(UserError, "input 'stdlib_train'", *facts):
        train.train(job)
    job = make_job(tmp_path / "b", mesh=(1, 1, 1), restore_checkpoint_dir=checkpoints, mode="eval")
    with raises_naming(UserError, "input 'heldout'", *facts):
        evaluate.evaluate_checkpoints(job)
