"""Rules of `sharding_strategy` are matched against paths without the report's 'mdl_vars/'; one that matches nothing says so."""

import pytest
from facts import assert_names

import spmd_trainer
from spmd_trainer.errors import UserError

FSDP = 'fsdp(axis="data", min_size_to_shard_mb=0)'


def reasons(*regexes: str) -> dict[str, str]:
    """{path: reason} of a tiny model's variables, sharded by these rules."""
    strategy = [(regex, FSDP) for regex in regexes]
    override = f"task.train.sharding_strategy={strategy!r}"
    report = spmd_trainer.inspect("synthetic.structures.TinyByStrategy", overrides=[override])
    return {v.path: v.reason for v in report.variables if v.path.startswith("mdl_vars/")}


def test_an_anchor_begins_at_the_collection(caplog):
    found = reasons("^params/lm/softmax/", "^params/")
    assert "rule 1 " in found["mdl_vars/params/lm/softmax/logits_ffn/linear/w"]
    assert "rule 2 " in found["mdl_vars/params/lm/final_ln/scale"]
    assert "matches no variable" not in caplog.text


def test_the_reports_prefix_in_a_rule_is_refused_with_what_to_write():
    with pytest.raises(UserError) as error:
        reasons(".*bias", "^mdl_vars/params/lm/softmax")
    message = str(error.value)
    assert "rule 2 ('^mdl_vars/params/lm/softmax') matches no variable" in message
    assert "e.g. params/lm/final_ln/bias" in message
    assert "write '^params/lm/softmax'" in message


def test_a_rule_that_matches_nothing_is_a_warning_with_the_paths(caplog):
    found = reasons("^lm/softmax", ".*")
    assert all("rule 2 " in reason for reason in found.values())
    assert_names(caplog.text, "rule 1 ('^lm/softmax')", "no variable", "params/lm/final_ln/bias")
