"""Matches the rules of `init_from_checkpoint_rules` against variable names, and finds rules that match nothing.

Regexes are matched with `re.match`, as in Pax: from the beginning of the name, not necessarily to its end. Other rules of
the trainer use `re.search`.
"""

from __future__ import annotations

import dataclasses
import difflib
import heapq
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import fiddle as fdl
from etils import epath

from spmd_trainer.errors import UserError

_WILDCARDS = re.compile(r"\.[*+]\??|[\\^$()\[\]{}|*+?]")

LOAD_ALL = ("(.*)", "{}")


@dataclasses.dataclass(frozen=True)
class CheckpointLoadingRules:
    """Rules that select the variables to load from one checkpoint. Field names and defaults are the same as in Pax.

    A rule names a model variable by its path below `mdl_vars`, with slashes: 'params/lm/softmax/w'. The first rule whose
    regex matches the name applies; its template, filled with the regex's groups, names the checkpoint's variable to
    load. Regexes are matched as in Pax, with `re.match`: from the beginning of the name, not necessarily to its end. (Other
    rules of the trainer use `re.search`.) Also as in Pax, a template may be written with dots instead of slashes.

    An error is raised if the rules load nothing, or if a rule matches no variable of the model. The warm start's report warns of
    a rule whose variables are all matched by earlier rules.

    For example, to load an LM's weights, but not its biases, into a decoder:

        CheckpointLoadingRules(load_rules=[('params/decoder/lm/(.*)', 'params/lm/{}')], ignore_rules=['.*/b$'])

    Attributes:
      task_p: ignored, because a checkpoint's record describes its variables. Only Pax needs this field.
      load_rules: pairs of regex and template. The pair `LOAD_ALL` loads every variable under its own name. A template that
        starts with 'ema/' loads the variable's moving average from the optimizer states.
      safe_load: ignored (a field of Pax). A rule that matches no variable always raises an error.
      ignore_rules: regexes of model variables to leave at their initial values, matched like those of `load_rules`. Each must
        match at least one variable.
      step: the step to load; None for the newest undamaged step.
      load_step: True also loads the step counter.
      load_opt_states: True also loads all optimizer states; they must have the model's paths, shapes and dtypes. States in
        a different `opt_state_dtype` are converted.
      load_ema_states: True if templates that start with 'ema/' select moving averages.
      partial_load_opt_states: True also loads the optimizer states whose names below `opt_states` match `load_rules`, and
        converts their dtypes in the same way. A state in 8 bits has one name for both of its arrays. States that the checkpoint
        lacks, or has with a different shape, keep their initial values.
      input_specs_provider_p: ignored, like `task_p`.
    """

    task_p: object = None
    load_rules: Sequence[tuple[str, str]] = ()
    safe_load: bool = False
    ignore_rules: Sequence[str] | None = None
    step: int | None = None
    load_step: bool = False
    load_opt_states: bool = False
    load_ema_states: bool = True
    partial_load_opt_states: bool = False
    input_specs_provider_p: object = None

    def __post_init__(self) -> None:
        for pattern in [pattern for pattern, _ in self.load_rules] + list(self.ignore_rules or ()):
            try:
                re.compile(pattern)
            except re.error as e:
                raise ValueError(f"init_from_checkpoint_rules: {pattern!r} is not a valid regex: {e}.") from e
        for pattern, template in self.load_rules:
            problem = template_problem(pattern, template)
            if problem:
                raise ValueError(f"init_from_checkpoint_rules: {problem}.")
        if not self.load_rules and not self.load_step and not self.load_opt_states:
            raise ValueError("init_from_checkpoint_rules: these rules load nothing. Give load_rules, e.g. [LOAD_ALL].")


RulesByDirectory: TypeAlias = Mapping[epath.PathLike, "CheckpointLoadingRules | fdl.Buildable[CheckpointLoadingRules]"]


def built(rules: object) -> dict[epath.PathLike, CheckpointLoadingRules]:
    """Returns {directory: rules}. Builds those rules that are given as Fiddle configs.

    Raises:
      UserError: `rules` does not map directories to CheckpointLoadingRules, or a rule is invalid.
    """
    wanted = "give {checkpoint directory: CheckpointLoadingRules(load_rules=[...])}"
    if not isinstance(rules, Mapping):
        raise UserError(f"task.train.init_from_checkpoint_rules is {rules!r:.200}; {wanted}")
    built = {}
    for directory, rule in rules.items():
        name = f"task.train.init_from_checkpoint_rules[{str(directory)!r}]"
        if isinstance(rule, fdl.Buildable) and fdl.get_callable(rule) is CheckpointLoadingRules:
            try:
                # `fdl.build` would also build `task_p`, which nothing reads.
                rule = CheckpointLoadingRules(**fdl.ordered_arguments(rule))
            except ValueError as error:
                raise UserError(f"{name}: {error}") from error
        if not isinstance(rule, CheckpointLoadingRules):
            raise UserError(f"{name} is {rule!r:.200}; {wanted}")
        built[directory] = rule
    return built


@dataclasses.dataclass(frozen=True)
class Match:
    """The load rule that applies to a variable.

    Attributes:
      rule: index of the rule in `load_rules`.
      source: the name of the variable in the checkpoint: the rule's template, filled with the regex's groups.
      ignored_by: the ignore rule that excludes the variable; None if no rule does.
    """

    rule: int
    source: str
    ignored_by: str | None


def first_match(load_rules: Sequence[tuple[str, str]], ignore_rules: Sequence[str], name: str) -> Match | None:
    """Returns the first load rule whose regex matches `name`, as a `Match`; None if no regex matches.

    Args:
      load_rules: pairs of regex and template. A regex must match from the beginning of `name` (`re.match`, as in Pax).
      ignore_rules: regexes of variables to exclude, matched in the same way.
      name: the variable's path below `mdl_vars` (or `opt_states`), e.g. 'params/lm/softmax/w'.
    """
    for index, (pattern, template) in enumerate(load_rules):
        match = re.match(pattern, name)
        if match:
            ignored_by = next((p for p in ignore_rules if re.match(p, name)), None)
            # Dots of the template become slashes; those of the variable's own name stay.
            groups = [group and group.replace(".", "\0") for group in match.groups()]
            return Match(index, template.format(*groups).replace(".", "/").replace("\0", "."), ignored_by)
    return None


def template_problem(pattern: str, template: str) -> str | None:
    """Returns the reason why a template can't be filled with the groups of its regex; None if it can.

    Raises:
      re.error: `pattern` is not a valid regex.
    """
    groups = re.compile(pattern).groups
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
        template.format(*[""] * groups)
    except (IndexError, KeyError, ValueError, AttributeError) as error:
        if isinstance(error, IndexError):
            return f"template {template!r} has {len(fields)} fields, but regex {pattern!r} has {groups} groups"
        return f"template {template!r} can't be filled ({error}); write {{}} for each group of the regex"
    if any({*".["} & {*name} for name in fields):
        return f"template {template!r} takes a part of a group; write {{}} or {{0}} for a whole group of the regex"
    return None


def without_match(
    load_rules: Sequence[tuple[str, str]], ignore_rules: Sequence[str], names: Sequence[str], saved: Sequence[str]
) -> list[str]:
    """Finds rules that match no variable of the model.

    Args:
      load_rules: pairs of regex and template. Regexes are matched with `re.match`.
      ignore_rules: regexes, matched in the same way.
      names: the names of the model's variables.
      saved: the names of the checkpoint's variables.

    Returns:
      A message for each rule that matches none of `names`.
    """
    faults = []
    for index, (pattern, template) in enumerate(load_rules):
        if not any(re.match(pattern, name) for name in names):
            rule = describe(index, pattern, template)
            in_model, in_checkpoint = nearest_to_regex(pattern, names), nearest_to_regex(template, saved)
            faults.append(
                f"{rule} matches no variable of the model; {in_model}. In the checkpoint, for its template, {in_checkpoint}"
            )
    for index, pattern in enumerate(ignore_rules):
        if not any(re.match(pattern, name) for name in names):
            near = nearest_to_regex(pattern, names)
            faults.append(f"ignore_rules[{index}] {pattern!r} matches no variable of the model; {near}")
    return faults


def shadowed(load_rules: Sequence[tuple[str, str]], names: Sequence[str]) -> list[str]:
    """Finds rules without effect, because earlier rules match all of their variables.

    Returns:
      A message for each rule without effect. If an earlier rule matches all of the rule's variables and more, the message
      advises moving the rule before that one.
    """
    matched = [{name for name in names if re.match(pattern, name)} for pattern, _ in load_rules]
    messages = []
    for index, (pattern, template) in enumerate(load_rules):
        if not matched[index] or not matched[index] <= set().union(*matched[:index]):
            continue
        broader = next((earlier for earlier in range(index) if matched[earlier] > matched[index]), None)
        advice = "" if broader is None else f"; move it before load_rules[{broader}]"
        messages.append(
            f"{describe(index, pattern, template)} has no effect: earlier rules match all of its variables{advice}"
        )
    return messages


def describe(index: int, pattern: str, template: str) -> str:
    """Returns the text by which messages refer to a load rule: its index, regex and template."""
    return f"load_rules[{index}] ({pattern!r}, {template!r})"


def nearest_to_regex(pattern: str, names: Iterable[str]) -> str:
    """Returns a text such as 'the nearest are a/w, b/w, c/w', with up to three names that begin or end most like `pattern`."""
    text = _WILDCARDS.sub("", pattern)

    def likeness(name: str) -> float:
        return max(_ratio(text, name[: len(text)]), _ratio(text, name[-len(text) :]))

    near = heapq.nlargest(3, names, key=likeness)
    return f"the nearest are {', '.join(near)}" if near else "there are none"


def nearest(wanted: str, names: Iterable[str]) -> str:
    """Returns a text such as 'the nearest is lm/softmax/w', with the name that is most like `wanted`."""
    near = max(names, key=lambda name: _ratio(wanted, name), default=None)
    return f"the nearest is {near}" if near else "there are none"


def _ratio(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b, autojunk=False).ratio()
