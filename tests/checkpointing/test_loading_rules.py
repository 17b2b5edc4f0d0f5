"""Warm starts by regex: what is loaded from where, and rules that are refused before an array is read."""

from __future__ import annotations

import types

import jax
import numpy as np
import pytest
from checkpoint_helpers import logical_of, make_mesh, partition_specs, place, specs_for, train_state
from facts import assert_names, raises_naming
from praxis import pax_fiddle
from warm_starts import init_from_rules

from spmd_trainer.checkpointing import (
    LOAD_ALL,
    CheckpointLoadingRules,
    CheckpointMismatchError,
    loading_rules,
    orbax_io,
)
from spmd_trainer.errors import UserError


@pytest.fixture
def model(saved) -> types.SimpleNamespace:
    """The saved model with other initial values, on another mesh."""
    mesh = make_mesh(1, 2, 2)
    logical = train_state(99)
    variables = specs_for(logical, partition_specs(logical), mesh)
    return types.SimpleNamespace(mesh=mesh, logical=logical, variables=variables, state=place(logical, variables, mesh))


def load(model, rules):
    return init_from_rules(model.state, model.variables, model.mesh, rules)


def by_path(state, variables):
    specs = jax.tree.leaves(variables)
    return {spec.path: logical_of(leaf, spec) for spec, leaf in zip(specs, jax.tree.leaves(state), strict=True)}


def refused(model, rules, monkeypatch) -> str:
    """Returns the message of a refusal, and checks that no array was read."""
    monkeypatch.setattr(orbax_io, "read_arrays", lambda *args, **kwargs: pytest.fail("an array was read"))
    with pytest.raises(CheckpointMismatchError) as error:
        load(model, rules)
    return str(error.value)


def test_loads_by_rule_and_leaves_the_rest_at_init(saved, model):
    rules = CheckpointLoadingRules(
        load_rules=[("params/emb/w", "params.emb.w"), ("params/ffn_?(.*)", "params/ffn{}")], ignore_rules=[".*/b$"]
    )
    state, report = load(model, {saved.directory: rules})
    loaded, ours, theirs = (
        by_path(state, model.variables),
        by_path(model.state, model.variables),
        by_path(place(saved.states[30], saved.variables, saved.mesh), saved.variables),
    )
    status = {row.path: row.status for row in report.rows}
    for path, array in loaded.items():
        wanted = theirs if status[path] == "loaded" else ours
        np.testing.assert_array_equal(array, wanted[path])
    taken = {path for path, value in status.items() if value == "loaded"}
    assert taken == {path for path in status if path.startswith(("mdl_vars/params/emb", "mdl_vars/params/ffn"))} - {
        path for path, value in status.items() if value == "skipped"
    }
    assert [path for path, value in status.items() if value == "skipped"] == ["mdl_vars/params/ffn/0/b"]
    assert f"step 30 in {saved.directory}" in str(report)


def test_a_directory_may_be_relative(saved, model, monkeypatch):
    monkeypatch.chdir(saved.directory.parent)
    _, report = load(model, {saved.directory.name: CheckpointLoadingRules(load_rules=[LOAD_ALL])})
    assert f"step 30 in {saved.directory}" in str(report)


def test_regexes_match_from_the_beginning_of_a_name_and_not_to_its_end_as_in_pax(saved, model, monkeypatch):
    rules = CheckpointLoadingRules(load_rules=[("params/emb", "params/emb/w")], ignore_rules=["params/ffn/1"])
    _, report = load(model, {saved.directory: rules})
    assert [row.path for row in report.rows if row.status == "loaded"] == ["mdl_vars/params/emb/w"]
    inside = CheckpointLoadingRules(load_rules=[LOAD_ALL, ("emb/w", "params/emb/w")], ignore_rules=["ffn/"])
    message = refused(model, {saved.directory: inside}, monkeypatch)
    assert_names(message, "load_rules[1] ('emb/w', 'params/emb/w')", "ignore_rules[0] 'ffn/'", "from the beginning")
    assert message.count("no variable") == 2


def test_averages_can_be_taken_as_variables(saved, model):
    rules = CheckpointLoadingRules(load_rules=[("params/emb/w", "ema/params/emb/w")])
    state, _ = load(model, {saved.directory: rules})
    averages = saved.states[30].opt_states[0][2].ema.params.emb.w
    np.testing.assert_array_equal(by_path(state, model.variables)["mdl_vars/params/emb/w"], averages)


def test_a_rule_that_matches_no_variable_is_refused_with_the_nearest(saved, model, monkeypatch):
    rules = CheckpointLoadingRules(load_rules=[("params/ffn/(.*)", "params/ffn/{}"), ("params/emd/w", "params/emb/w")])
    message = refused(model, {saved.directory: rules}, monkeypatch)
    for words in (
        f"step 30 in {saved.directory}",
        "load_rules[1] ('params/emd/w', 'params/emb/w') matches no variable of the model",
        "matches no variable of the model; the nearest are params/emb/w",
        "In the checkpoint, for its template, the nearest are params/emb/w",
        "Fix: ",
    ):
        assert words in message
    assert "load_rules[0]" not in message


def test_rules_of_another_model_are_refused_where_all_was_left_at_init(saved, model, monkeypatch):
    """Such rules used to leave every variable at its initial value, with nothing but a log line."""
    rules = CheckpointLoadingRules(load_rules=[("params/decoder/(.*)", "params/{}")])
    message = refused(model, {saved.directory: rules}, monkeypatch)
    assert_names(message, "load_rules[0] ('params/decoder/(.*)', 'params/{}')", "no variable")


def test_a_source_that_the_checkpoint_lacks_is_refused_with_the_nearest(saved, model, monkeypatch):
    rules = CheckpointLoadingRules(load_rules=[("params/emb/w", "params/embd/w")], step=20)
    message = refused(model, {saved.directory: rules}, monkeypatch)
    for words in (
        f"step 20 in {saved.directory}",
        "mdl_vars/params/emb/w, by load_rules[0] ('params/emb/w', 'params/embd/w')",
        "the checkpoint has no 'params/embd/w'; the nearest is params/emb/w",
    ):
        assert words in message
    rules = CheckpointLoadingRules(load_rules=[("params/emb/w", "ema/params/embd/w")])
    assert_names(refused(model, {saved.directory: rules}, monkeypatch), "nearest", "ema/params/emb/w")


def test_an_ignore_rule_that_matches_nothing_is_refused(saved, model, monkeypatch):
    rules = CheckpointLoadingRules(load_rules=[LOAD_ALL], ignore_rules=["params/ffn/.*/b", "params/embedding/.*"])
    message = refused(model, {saved.directory: rules}, monkeypatch)
    assert_names(message, "ignore_rules[1] 'params/embedding/.*'", "no variable", "nearest", "params/emb/w")
    assert "ignore_rules[0]" not in message


def test_a_rule_behind_a_broader_one_is_told_with_a_place_for_it(saved, model):
    rules = CheckpointLoadingRules(
        load_rules=[("params/ffn.*", "params.emb.w"), LOAD_ALL, ("params/emb/w", "ema/params/emb/w")],
        ignore_rules=["params/ffn"],
    )
    _, report = load(model, {saved.directory: rules})
    (warning,) = report.warnings
    assert_names(
        warning,
        "load_rules[2] ('params/emb/w', 'ema/params/emb/w')",
        "no effect",
        "before load_rules[1]",
        f"step 30 in {saved.directory}",
    )
    assert f"warning: {warning}" in str(report)


def test_a_rule_for_the_rest_is_valid_where_there_is_no_rest(saved, model):
    """The warning does not advise to move it up: it would then match all variables of the rule before it."""
    rules = CheckpointLoadingRules(load_rules=[("([a-z_]+/.*)", "{}"), LOAD_ALL])
    state, report = load(model, {saved.directory: rules})
    assert all(row.status == "loaded" for row in report.rows if row.path.startswith("mdl_vars/"))
    (warning,) = report.warnings
    assert_names(warning, "load_rules[1] ('(.*)', '{}')", "no effect")
    assert "move" not in warning
    wanted = by_path(place(saved.states[30], saved.variables, saved.mesh), saved.variables)
    np.testing.assert_array_equal(
        by_path(state, model.variables)["mdl_vars/params/emb/w"], wanted["mdl_vars/params/emb/w"]
    )


def test_rules_that_all_decide_something_give_no_warning(saved, model):
    rules = CheckpointLoadingRules(load_rules=[("params/emb/w", "ema/params/emb/w"), LOAD_ALL])
    _, report = load(model, {saved.directory: rules})
    assert report.warnings == ()
    assert "warning" not in str(report)


def test_a_plan_without_contents_leaves_out_what_is_plainly_damaged(saved, model):
    """The newest step's record is overwritten, and the step before lacks a file."""
    record = saved.directory / "30" / "record" / "record.json"
    record.write_text("x" * len(record.read_text()))
    (saved.directory / "20" / "manifest.json").unlink()
    rules = {saved.directory: CheckpointLoadingRules(load_rules=[LOAD_ALL])}
    for check_contents in (False, True):
        plan = loading_rules.resolve_rules(model.variables, rules, check_contents=check_contents)
        assert f"step 10 in {saved.directory}" in str(plan.report)


@pytest.mark.parametrize("ignore", [True, False])
def test_rules_that_load_nothing_are_refused(saved, model, monkeypatch, ignore):
    """Either all variables are ignored, or all are loaded from the checkpoint before."""
    only = CheckpointLoadingRules(load_rules=[("params/emb/.*", "params/emb/w")], ignore_rules=["params/emb/w"])
    second = saved.directory.parent / "second"
    second.symlink_to(saved.directory)
    everything = CheckpointLoadingRules(load_rules=[LOAD_ALL])
    rules = {saved.directory: only} if ignore else {saved.directory: everything, second: everything}
    message = refused(model, rules, monkeypatch)
    assert f"step 30 in {saved.directory if ignore else second}" in message
    assert_names(message, "nothing", "loaded")


def test_a_second_checkpoint_is_checked_before_the_first_is_read(saved, model, monkeypatch):
    second = saved.directory.parent / "second"
    second.symlink_to(saved.directory)
    rules = {
        saved.directory: CheckpointLoadingRules(load_rules=[("params/emb/w", "params/emb/w")]),
        second: CheckpointLoadingRules(load_rules=[("params/none", "params/emb/w")]),
    }
    assert f"step 30 in {second}" in refused(model, rules, monkeypatch)


def test_optimizer_states_that_rules_match_and_cannot_load_are_told(saved, model):
    rules = CheckpointLoadingRules(
        load_rules=[("params/emb/w", "params/emb/w"), ("(0/1)/(mu|nu)/x?(.*)", "{}/{}/{}")],
        partial_load_opt_states=True,
    )
    _, report = load(model, {saved.directory: rules})
    assert report.opt_states_loaded
    # The regex drops the name's last letter, so the checkpoint lacks the resulting name.
    assert_names(report, "no '0/1/nu/'")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"load_rules": [("(params", "{}")]}, "is not a valid regex"),
        ({"load_rules": [("params/(.*)", "params/{}/{}")]}, "has 2 fields, but regex 'params/(.*)' has 1 groups"),
        ({"load_rules": [("params/(.*)", "params/{name}")]}, "can't be filled"),
        ({"load_rules": [("params/(.*)", "params/{")]}, "can't be filled"),
        ({}, "these rules load nothing"),
    ],
)
def test_rules_that_cannot_be_meant_are_refused_when_they_are_made(fields, message):
    with pytest.raises(ValueError, match=r"init_from_checkpoint_rules: ") as error:
        CheckpointLoadingRules(**fields)
    assert message in str(error.value)


def test_configs_of_rules_are_checked_as_rules_are(saved, model):
    good = pax_fiddle.Config(CheckpointLoadingRules, load_rules=[LOAD_ALL])
    state, _ = load(model, {saved.directory: good})
    wanted = by_path(place(saved.states[30], saved.variables, saved.mesh), saved.variables)
    np.testing.assert_array_equal(
        by_path(state, model.variables)["mdl_vars/params/emb/w"], wanted["mdl_vars/params/emb/w"]
    )
    bad = pax_fiddle.Config(CheckpointLoadingRules, load_rules=[("(", "{}")])
    with raises_naming(UserError, "init_from_checkpoint_rules[", "'('", "a valid regex"):
        load(model, {saved.directory: bad})


@pytest.mark.parametrize("rules", ["/some/directory", {"/some/directory": [LOAD_ALL]}])
def test_what_is_no_rules_at_all_is_refused(model, rules):
    with pytest.raises(UserError, match=r"give \{checkpoint directory: CheckpointLoadingRules"):
        loading_rules.resolve_rules(model.variables, rules, check_contents=False)
