"""The search space of a sweep: the config fields or class attributes that it varies, each with a list of values or a range."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from spmd_trainer.errors import UserError, did_you_mean

# A trial's values: {path of a field, or name of a class attribute: value}.
Values: TypeAlias = dict[str, Any]
# Points of a larger grid are drawn independently, so that a point may be drawn twice.
_MOST_SHUFFLED = 10**6


@dataclasses.dataclass(frozen=True)
class Range:
    """A range of numbers from which a trial's value is chosen, `low` and `high` included.

    Attributes:
      low, high: the bounds.
      log: True to draw the logarithm of the number uniformly, instead of the number itself.
      integer: True for whole numbers only.
    """

    low: float
    high: float
    log: bool = False
    integer: bool = False

    def sample(self, generator: np.random.Generator) -> float | int:
        # Each whole number gets an interval of length 1 around it, so that the bounds are as likely as the other numbers.
        low, high = (self.low - 0.5, self.high + 0.5) if self.integer else (self.low, self.high)
        scale, back = (math.log, math.exp) if self.log else (float, float)
        drawn = back(generator.uniform(scale(low), scale(high)))
        drawn = min(max(drawn, self.low), self.high)
        return round(drawn) if self.integer else drawn


# A list has at least one value.
Space: TypeAlias = Mapping[str, tuple[Any, ...] | Range]


def read_space(given: object, where: str = "sweep") -> Space:
    """Returns the search space that a mapping describes.

    The mapping is {path of a field or name of a class attribute: list of values, or {'low': ..., 'high': ..., 'log': True}}.
    Several names separated by commas vary together: {'NUM_LAYERS,MODEL_DIMS': [(2, 64), (4, 128)]}.

    Args:
      given: the mapping. A range has 'low' and 'high', and may have 'log' and 'integer'.
      where: where the mapping comes from, for error messages.

    Raises:
      UserError: `given` is not such a mapping. The message names the path.
    """
    if not isinstance(given, Mapping):
        raise UserError(f"{where} is {given!r:.80}; give a mapping such as {{'LEARNING_RATE': [1e-3, 1e-2]}}")
    space: dict[str, tuple[Any, ...] | Range] = {}
    for path, values in given.items():
        what = f"{where}[{path!r}]"
        if isinstance(values, Mapping):
            space[str(path)] = _range(values, what)
        elif isinstance(values, Sequence) and not isinstance(values, str) and values:
            for value in values:
                if not is_literal(value):
                    raise UserError(
                        f"{what} has {value!r:.80}, which is not a Python literal, such as a number, a text or a list of them; "
                        "vary a class attribute from which the experiment makes it"
                    )
                if (count := len(names_of(path))) > 1 and not (isinstance(value, list | tuple) and len(value) == count):
                    raise UserError(
                        f"{what} has {value!r:.80}; give a list of {count} values for each trial, one for each name"
                    )
            space[str(path)] = tuple(values)
        else:
            raise UserError(f"{what} is {values!r:.80}; give a list of values, or {{'low': 1e-4, 'high': 1e-2}}")
    return space


def names_of(path: str) -> list[str]:
    """Returns the names of fields or attributes in a key of a search space: ['a', 'b'] for 'a,b', ['a'] for 'a'.

    Fields that share a key vary together: each value of the key is a list with a value for each field.
    """
    return [name.strip() for name in str(path).split(",")]


def by_name(chosen: Values) -> Values:
    """Converts {key of a search space: value} to {name of a field or attribute: value}. See `names_of` for keys."""
    values: Values = {}
    for path, value in chosen.items():
        names = names_of(path)
        values |= {path: value} if len(names) == 1 else dict(zip(names, value, strict=True))
    return values


def is_literal(value: object) -> bool:
    """Returns True if a value's repr evaluates to an equal value, so that the value can be written in an override."""
    with contextlib.suppress(ValueError, SyntaxError):
        return bool(ast.literal_eval(repr(value)) == value)
    return False


def _range(given: Mapping[str, Any], what: str) -> Range:
    known = [field.name for field in dataclasses.fields(Range)]
    for name in given:
        if name not in known:
            raise UserError(f"{what} has {name!r}{did_you_mean(str(name), known)}; a range has {', '.join(known)}")
    bounds = [given.get(name) for name in ("low", "high")]
    if not all(isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) for x in bounds):
        raise UserError(f"{what} goes from {bounds[0]!r} to {bounds[1]!r}; 'low' and 'high' must be numbers")
    found = Range(**given)
    if not found.low < found.high:
        raise UserError(f"{what}: low={found.low:g} must be less than high={found.high:g}")
    if found.log and found.low <= 0:
        raise UserError(f"{what}: low={found.low:g} has no logarithm; give a positive one, or leave out 'log'")
    if found.integer and (found.low % 1 or found.high % 1):
        raise UserError(f"{what}: low={found.low:g} and high={found.high:g} of whole numbers must be whole")
    return found


def read_texts(texts: Sequence[str]) -> dict[str, Any]:
    """Combines the values of the flag `--sweep` into one mapping, in the form that `read_space` reads.

    Each value is the name of a JSON file, or 'PATH=[...]', or 'PATH={...}'.

    Raises:
      UserError: a file can't be read, or a value is not JSON.
    """
    found: dict[str, Any] = {}
    for text in texts:
        path, equals, value = text.partition("=")
        if not equals:
            found |= _of_file(text)
            continue
        try:
            found[path.strip()] = json.loads(value)
        except ValueError as error:
            raise UserError(
                f"--sweep={text}: {value!r} is not JSON, such as [1e-3, 1e-2] or "
                f'{{"low": 1e-4, "high": 1e-2, "log": true}}'
            ) from error
    return found


def _of_file(name: str) -> dict[str, Any]:
    try:
        content = json.loads(pathlib.Path(os.path.expanduser(name)).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"--sweep={name}: the file can't be read ({error.strerror}); give a JSON file, or PATH=[VALUE, ...]"
        ) from error
    except ValueError as error:
        raise UserError(f"--sweep={name}: the file is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"--sweep={name}: the file must hold an object, {{path: [values]}}")
    return content


def as_json(space: Space) -> dict[str, Any]:
    """Returns a search space as JSON values that `read_space` reads. Values that JSON can't represent become their repr."""
    shown = {path: dataclasses.asdict(x) if isinstance(x, Range) else x for path, x in space.items()}
    found: dict[str, Any] = json.loads(json.dumps(shown, default=repr))
    return found


def grid_size(space: Space) -> int:
    """Returns the number of points of a search space's grid. Raises UserError if the space has a range."""
    ranges = [path for path, x in space.items() if isinstance(x, Range)]
    if ranges:
        raise UserError(
            f"{ranges[0]} is a range, and a grid needs lists of values; give a list, or --sweep_method=random --sweep_trials=N"
        )
    return math.prod(len(x) for x in space.values() if not isinstance(x, Range))


def grid_point(space: Space, number: int) -> Values:
    """Returns the values at a point of a search space's grid. The last key of the space varies fastest.

    Args:
      space: the search space, which must have no ranges.
      number: number of the point, from 0 to `grid_size(space)` - 1.
    """
    values: Values = {}
    for path, choices in reversed(list(space.items())):
        assert not isinstance(choices, Range), path  # `grid_size` refuses them
        number, at = divmod(number, len(choices))
        values[path] = choices[at]
    return dict(reversed(values.items()))


def random_point(space: Space, seed: int, number: int) -> Values:
    """Returns random values for a trial, which depend only on the space, the seed and the trial's number.

    If the space has no ranges and at most a million grid points, each point is drawn once before any is drawn again.
    """
    if not any(isinstance(x, Range) for x in space.values()) and (size := grid_size(space)) <= _MOST_SHUFFLED:
        turn, at = divmod(number, size)
        return grid_point(space, int(np.random.default_rng([seed, turn]).permutation(size)[at]))
    generator = np.random.default_rng([seed, number])
    return {
        path: x.sample(generator) if isinstance(x, Range) else x[int(generator.integers(len(x)))]
        for path, x in space.items()
    }


def overrides(values: Values) -> list[str]:
    """Returns a trial's values as config overrides: 'path=value' for each value."""
    return [f"{path}={value!r}" for path, value in values.items()]
