"""Overrides of an experiment's class attributes, e.g. 'NUM_LAYERS=3'. The caller's class and instance are not changed."""

from __future__ import annotations

import ast
import copy
import inspect
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spmd_trainer.base_experiment import BaseExperiment, swept_attributes
from spmd_trainer.errors import UserError, did_you_mean

# Paths that start with one of these are fields of the config; all others are class attributes.
CONFIG_ROOTS = ("task", "train_datasets", "eval_datasets", "decode_datasets")
# Words in annotations that allow None, and all words of annotations that allow only strings and None. The words are those of
# the annotation's text, e.g. "<class 'str'>" or "typing.ClassVar[str]".
_NONE = {"None", "Optional"}
_OF_STRINGS = {"str", "class", "typing", "ClassVar", "Final", *_NONE}
_FIRST_NAME = re.compile(r"\s*(\w*)")


def is_of_class(assignment: str) -> bool:
    """Returns True if an override sets a class attribute, such as 'NUM_LAYERS=3', and not a field of the config."""
    match = _FIRST_NAME.match(assignment.partition("=")[0])
    return match is not None and match[1] not in ("", *CONFIG_ROOTS)


def parse_value(assignment: str, path: str, text: str) -> Any:
    """Parses and returns the value of an override.

    Args:
      assignment: the whole override, for the error message.
      path: the overridden path or attribute, for the error message.
      text: the value as text: a Python literal, or true or false in any case.

    Raises:
      UserError: the text is not a Python literal.
    """
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    # MemoryError and RecursionError: the value is too large or nested too deeply.
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise UserError(
            f"override {assignment!r}: {text!r} is not a Python literal; strings need quotes, e.g. {path}='\"{text}\"'"
        ) from error


def make_experiment(
    exp: object, cls: type[BaseExperiment], assignments: Sequence[str]
) -> tuple[BaseExperiment, dict[str, Any]]:
    """Returns an instance of an experiment with overridden class attributes, and the overridden values by name.

    The attributes are set on a subclass, because experiments read them through the instance, through its type and in class
    methods. If the constructor copies an attribute into the instance, as a dataclass does, the copy is set too.

    The value of an attribute that is a string, or annotated as a string or Any, may be text without quotes. An attribute that
    is annotated as `str` or `str | None` also takes numbers, true and false as text; and takes None as text, unless its
    annotation allows None or its value was None.

    Args:
      exp: the experiment as the caller gave it: a name, class or instance. An instance is copied.
      assignments: overrides, each as 'NAME=value'.

    Raises:
      UserError: there is no such attribute, it is a method or property, or the value is not a Python literal.
    """
    own = vars(exp) if isinstance(exp, BaseExperiment) else {}
    values = dict(_parse(assignment, cls, own) for assignment in assignments)
    if values:
        cls = with_attributes(cls, values)
    if isinstance(exp, BaseExperiment):
        experiment = copy.copy(exp)
        experiment.__class__ = cls
    else:
        experiment = cls()
    for name in values.keys() & vars(experiment).keys():
        setattr(experiment, name, values[name])
    return experiment, values


def with_attributes(cls: type[BaseExperiment], values: Mapping[str, Any]) -> type[BaseExperiment]:
    """Returns a subclass of `cls` with the same name and module, whose class attributes have these values."""
    same = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return types.new_class(cls.__name__, (cls,), exec_body=lambda body: body.update({**same, **values}))


def _parse(assignment: str, cls: type, own: dict[str, Any]) -> tuple[str, Any]:
    path, equals, text = assignment.partition("=")
    match = _FIRST_NAME.match(path)
    name = match[1] if match else ""
    if not equals:
        raise UserError(f"override {assignment!r} is not of the form NAME=value or path.to.field=value")
    known = [*_attributes(cls), *own]
    if name not in known:
        is_method = hasattr(cls, name) and not name.startswith("_")
        kind = "is a method or property" if is_method else "is no attribute"
        near = did_you_mean(name, [*known, *CONFIG_ROOTS], otherwise="; paths of fields start with task")
        raise UserError(f"override of {path}: {name} {kind} of {cls.__name__}{near}")
    now = own.get(name, getattr(cls, name, None))
    if path.strip() != name:
        raise UserError(f"override of {path}: {name} is {now!r:.80}; override the whole attribute, {name}=VALUE")
    annotations = (str(inspect.get_annotations(base).get(name, "")) for base in cls.__mro__)
    words = set(re.findall(r"\w+", next(filter(None, annotations), "")))
    takes_text = isinstance(now, str) or bool(words & {"str", "Any"})
    try:
        value = parse_value(assignment, name, text)
    except UserError:
        if takes_text:
            return name, text
        raise
    is_none = value is None and now is not None and not words & _NONE
    is_wrong = is_none or isinstance(value, bool | int | float | complex)
    # With FOLDER: str, FOLDER=2024 names a folder. Without an annotation, SHUFFLE = "global" may take a number too.
    return name, text if "str" in words and words <= _OF_STRINGS and is_wrong else value


def _attributes(cls: type) -> Iterator[str]:
    """Yields the names of a class's public data attributes, including those that have only an annotation."""
    swept = swept_attributes(cls)
    for name in dict.fromkeys([*dir(cls), *(name for base in cls.__mro__ for name in inspect.get_annotations(base))]):
        value = inspect.getattr_static(cls, name, None)
        # A class is a value; everything else with __get__ is a method, a property or the like.
        is_value = isinstance(value, type) or not hasattr(type(value), "__get__")
        if not name.startswith("_") and (is_value or name in swept):
            yield name
