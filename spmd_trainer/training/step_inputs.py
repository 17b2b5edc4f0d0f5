"""Passes numbers of the learner, such as its learning rate, to the compiled train step as inputs instead of constants.

Runs that differ only in these numbers then have the same program, which JAX's compilation cache holds after the first run. XLA
may reorder arithmetic with constants, so the results can differ from those of an ordinary run in the last bits.
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
    """Returns {path: value} of the floats in a learner's config that differ from those in another config."""
    found = dict(_floats(other))
    return {path: value for path, value in _floats(learner_p) if found.get(path, value) != value}


def _floats(config: fdl.Buildable[Any]) -> Iterator[tuple[str, float]]:
    for value, path in daglish.iterate(config, memoized=False):
        if type(value) is float:
            yield daglish.path_str(path), value


def abstract(numbers: Mapping[str, float]) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns {path: ShapeDtypeStruct} of the numbers, typed as JAX types Python floats: weakly typed scalars."""
    dtype = jax.dtypes.canonicalize_dtype(float)
    return {path: jax.ShapeDtypeStruct((), dtype, weak_type=True) for path in numbers}


def traceable(numbers: Mapping[str, float], lower: Callable[[Mapping[str, float]], object]) -> Mapping[str, float]:
    """Tries each number alone as an input of the step. Returns the numbers that can be traced; logs those that stay constants.

    Args:
      numbers: the numbers by path.
      lower: traces the step with the given numbers as inputs; raises if it can't be traced.
    """
    constant = []
    for path in numbers:
        try:
            lower({path: numbers[path]})
        except Exception as error:  # JAX's of a number that Python compares or converts, or the optimizer's own
            constant.append(path)
            logging.info("each value of %s compiles a step of its own: %s", path.lstrip("."), first_paragraph(error))
    return {path: value for path, value in numbers.items() if path not in constant}


def with_numbers(
    layout: LogicalLayout, learner_p: fdl.Buildable[Any], numbers: Mapping[str, jax.Array]
) -> LogicalLayout:
    """Returns a layout whose learner computes with traced numbers.

    Args:
      numbers: {path in the config: scalar}.

    Raises:
      Exception: the learner needs one of them as a Python number, e.g. to compare it.
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
