"""Which rule of a warm start a variable gets, by its name alone."""

import pytest

from spmd_trainer.checkpointing.rule_matching import LOAD_ALL, Match, first_match, template_problem

RULES = [("params/emb/(.*)", "params/token.{}"), ("params/(.*)/(w|b)$", "old/{}/{}"), ("params/", "rest")]


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("params/emb/w", Match(0, "params/token/w", None)),  # with the dots of older files of Pax
        ("params/ffn/w", Match(1, "old/ffn/w", None)),
        ("params/ffn/scale", Match(2, "rest", None)),
        ("params/ffn/b", Match(1, "old/ffn/b", ".*/b$")),
        # A rule's regex stands at the beginning of a name, not in its middle.
        ("lm/params/emb/w", None),
        ("non_trainable/x", None),
    ],
)
def test_the_first_rule_that_matches_the_beginning_of_a_name_decides(name, match):
    assert first_match(RULES, [".*/b$", "w"], name) == match


def test_dots_in_a_variables_own_name_stay():
    assert first_match([LOAD_ALL], [], "params/layer.0.weight") == Match(0, "params/layer.0.weight", None)
    assert first_match(RULES, [], "params/emb/w.0") == Match(0, "params/token/w.0", None)


def test_a_field_with_a_dot_is_refused():
    assert template_problem("(.*)", "params/{0.upper}") is not None
