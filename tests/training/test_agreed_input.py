"""Inputs that several processes read: other data is refused, unknown ends are voted on."""

import numpy as np
import pytest
from facts import raises_naming
from trained_helpers import make_job

from spmd_trainer.errors import UserError
from spmd_trainer.training import agreed_input
from spmd_trainer.training.agreed_input import AgreedInput, agree_on_input

pytestmark = pytest.mark.xdist_group("trained")


@pytest.fixture
def source(tmp_path):
    return make_job(tmp_path, mesh=(1, 1, 1)).build_train_input()


def answers(monkeypatch, *others):
    """Other processes that answer with these functions of this process's text."""
    monkeypatch.setattr(
        agreed_input.multihost, "gather", lambda name, text: [text, *(answer(text) for answer in others)]
    )


def test_one_process_needs_no_agreement(source):
    assert agree_on_input(source, "training", count=1, must_end_together=False) is source


def test_an_endless_input_of_the_same_data_is_not_voted_on(source, monkeypatch):
    answers(monkeypatch, lambda text: text)
    agreed = agree_on_input(source, "training", count=2, must_end_together=False)
    assert not isinstance(agreed, AgreedInput)
    assert agreed.get_state() == source.get_state()
    first = agreed.get_next_padded()
    source.reset()
    np.testing.assert_array_equal(first.ids, source.get_next_padded().ids)


def test_an_endless_input_that_ends_is_an_error(source, monkeypatch):
    answers(monkeypatch, lambda text: text)
    agreed = agree_on_input(source, "training", count=2, must_end_together=False)
    monkeypatch.setattr(source, "get_next_padded", lambda: next(iter(())))
    with raises_naming(UserError, "training input", repr(source.name), "process 0", "num_batches"):
        agreed.get_next_padded()


def test_other_data_on_another_process_is_refused(source, monkeypatch):
    answers(
        monkeypatch,
        lambda text: text,
        lambda text: text.replace("693 files", "692 files").replace('"seed": 1', '"seed": 2'),
    )
    facts = (repr(source.name), "process 2", "process 0", '"seed": 27', '"seed": 17')
    with raises_naming(UserError, "training input", *facts):
        agree_on_input(source, "training", count=3, must_end_together=False)


class Finite:
    name = "finite"

    def __init__(self, num_batches):
        self.num_batches = num_batches


@pytest.mark.parametrize(("own", "other", "votes"), [(4, 4, False), (4, 3, True), (None, None, True), (0, 0, True)])
def test_ends_are_voted_on_where_they_are_unknown_or_differ(monkeypatch, own, other, votes):
    answers(monkeypatch, lambda text: str(other))
    agreed = agree_on_input(Finite(own), "evaluation", count=2, must_end_together=True)
    assert isinstance(agreed, AgreedInput) == votes
    assert agreed.name == "finite"
