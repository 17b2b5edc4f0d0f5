"""Passes the learner's hyperparameters, such as the learning rate, to the compiled train step as inputs, not as constants.

Runs that differ only in these hyperparameters then have the same program, which is in JAX's compilation cache after the first
run. XLA may reorder arithmetic with constants, so the last bits of the results can differ from those of a run with constants.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import fiddle as fdl
import jax
from absl import logging
from fiddle import daglish
from praxis import pax_fiddle

from spmd_trainer.errors import first_paragraph
from spmd_trainer.step.layout import LogicalLayout


def differing(learner_p: fdl.Buildable[Any], other: fdl.Buildable[Any]) -> dict[str, float]:
    """Returns {path: value} for the floats in a learner's config whose values differ in the config `other`."""
    found = dict(_floats(other))
    return {path: value for path, value in _floats(learner_p) if found.get(path, value) != value}


def _floats(config: fdl.Buildable[Any]) -> Iterator[tuple[str, float]]:
    for value, path in daglish.iterate(config, memoized=False):
        if type(value) is float:
            yield daglish.path_str(path), value


def abstract(numbers: Mapping[str, float]) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns {path: ShapeDtypeStruct} for hyperparameters, as weakly typed scalars, which is how JAX types Python floats."""
    dtype = jax.dtypes.canonicalize_dtype(float)
    return {path: jax.ShapeDtypeStruct((), dtype, weak_type=True) for path in numbers}


def traceable(numbers: Mapping[str, float], lower: Callable[[Mapping[str, float]], object]) -> Mapping[str, float]:
    """Tries each hyperparameter separately as an input of the train step. Returns those that can be inputs; logs the others.

    Args:
      numbers: {path in the learner's config: the hyperparameter's value}.
      lower: traces the step with the given hyperparameters as inputs; raises an error if the step can't be traced.
    """
    constant = []
    for path in numbers:
        try:
            lower({path: numbers[path]})
        except Exception as error:  # JAX's error if Python compares or converts the number, or the optimizer's own
            constant.append(path)
            logging.info("each value of %s compiles a step of its own: %s", path.lstrip("."), first_paragraph(error))
    return {path: value for path, value in numbers.items() if path not in constant}


def with_numbers(
    layout: LogicalLayout, learner_p: fdl.Buildable[Any], numbers: Mapping[str, jax.Array]
) -> LogicalLayout:
    """Returns a layout whose learner computes with traced scalars instead of the values in its config.

    Args:
      numbers: {path in the learner's config: traced scalar}.

    Raises:
      Exception: the learner needs one of the values as a Python number, e.g. for an `if`.
    """
    traced = learner_p.clone().set(name="learner", loss_name=layout.task.learner.loss_name)
    for path, number in numbers.items():
        *parents, last = daglish.parse_path(path)
        node = daglish.follow_path(traced, tuple(parents)) if parents else traced
        if isinstance(last, daglish.Attr):
            setattr(node, last.name, number)
        else:
            node[last.key] = number
    return dataclasses.replace(layout, task=layout.task.with_learner(pax_fiddle.build(traced)))
