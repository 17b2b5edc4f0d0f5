"""Which variables a learner's regexes select, in either spelling of list indices, and how messages spell the paths."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from facts import raises_naming
from learner_helpers import NestedMap, build, hparams, sgd, two_groups

from spmd_trainer import learners


def layered_model() -> NestedMap:
    """WeightHParams of a model whose layers are a list."""
    return NestedMap(params=NestedMap(emb=hparams((2,)), x_layers=[NestedMap(w=hparams((2,))) for _ in range(11)]))


def layer_indices(selected: Any) -> list[int]:
    return [index for index, layer in enumerate(selected.params.x_layers) if layer.w]


@pytest.mark.parametrize(
    ("regex", "expected"),
    [
        (r"params/x_layers/1/w", [1]),
        (r"params/x_layers\[1\]/w", [1]),
        (r"params/x_layers.1./w", [1]),
        (r"params\.x_layers\[1\]\.w", [1]),
        (r".*/[89]/w", [8, 9]),
        (r".*\[[89]\]/w", [8, 9]),
        (r".*/x_layers(/1|\[2\])/w", [1, 2]),
        (r"(?!.*(emb|x_layers/[0-8]/)).*", [9, 10]),
        (r"(?!.*(emb|x_layers\[[0-8]\])).*", [9, 10]),
    ],
)
def test_list_indices_in_regexes_have_either_spelling(regex: str, expected: list[int]) -> None:
    var_hparams = layered_model()
    excluded = learners.get_excluded_var_mask_for_grad(var_hparams, build(sgd(), bprop_variable_exclusion=regex))
    assert layer_indices(excluded) == expected
    assert not excluded.params.emb
    trained = learners.get_excluded_var_mask_for_grad(var_hparams, build(sgd(), bprop_variable_inclusion=[regex]))
    assert layer_indices(jax.tree.map(lambda is_excluded: not is_excluded, trained)) == expected


def test_a_negative_lookahead_on_a_path_excludes_only_that_path() -> None:
    learner = build(sgd(), bprop_variable_inclusion=["(?!params/a).*"])
    excluded = learners.get_excluded_var_mask_for_grad(
        NestedMap(params=NestedMap(a=hparams((2,)), b=hparams((2,)))), learner
    )
    assert excluded.params.a
    assert not excluded.params.b


@pytest.mark.parametrize("regex", [r"params/x_layers/1/", r"params/x_layers\[1\]/"])
def test_auxiliary_regexes_spell_list_indices_either_way(regex: str) -> None:
    (chosen,), rest = two_groups(sgd(), sgd(), regex).get_masks(layered_model())
    assert layer_indices(chosen) == [1]
    assert layer_indices(rest) == [index for index in range(11) if index != 1]


def test_messages_spell_paths_as_the_reports_do() -> None:
    learner = build(sgd(), bprop_variable_exclusion="nowhere")
    with raises_naming(ValueError, "'nowhere'", "not match", "params/emb, params/x_layers/0/w"):
        learners.get_excluded_var_mask_for_grad(layered_model(), learner)
