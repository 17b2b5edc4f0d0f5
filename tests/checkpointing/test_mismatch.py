"""The likely causes of a checkpoint that does not fit a model."""

import re

import pytest
from facts import assert_names

from spmd_trainer.checkpointing import mismatch
from spmd_trainer.checkpointing.records import SavedVariable


def variables(*paths: str, shape: tuple[int, ...] = (4,)) -> dict[str, SavedVariable]:
    return {path: SavedVariable(shape, "float32", shape, "P()") for path in paths}


def layers(stem: str, number: int) -> dict[str, SavedVariable]:
    return variables(*(f"{stem}{i}/attn/kernel" for i in range(number)))


def test_equal_variables_give_no_message():
    assert mismatch.explain(layers("layers/", 2), layers("layers/", 2), "Step 1") is None


@pytest.mark.parametrize("stem", ["mdl_vars/params/lm/layers/", "mdl_vars/params/lm/x_layers_"])
def test_another_number_of_layers(stem):
    message = str(mismatch.explain(layers(stem, 12), layers(stem, 16), "Step 1"))
    assert_names(message, "with 12 layers", "model has 16", f"{stem}#")
    assert re.search(rf"missing .*: {stem}15/attn/kernel, .*\(4,\) float32", message)


def test_a_longer_chain_of_the_optimizer_is_not_taken_for_layers():
    saved = variables("mdl_vars/w", "opt_states/0/0/w", "opt_states/0/1/w")
    message = str(mismatch.explain(saved, saved | variables("opt_states/0/2/w"), "Step 1"))
    assert_names(message, "lacks", "optimizer", "opt_states/0/2/w")
    assert "layers" not in message


def test_one_size_that_changed():
    saved, wanted = variables("emb/w", "softmax/w", shape=(8, 100)), variables("emb/w", "softmax/w", shape=(8, 128))
    assert_names(mismatch.explain(saved, wanted, "Step 1"), "one size", "100 when saved", "128 in the model")
