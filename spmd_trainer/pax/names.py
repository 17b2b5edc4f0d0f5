"""The names of variables on disk. This trainer writes a path as `opt_states/0/no_prefix/2/m/params/lm/w`.

Pax names a zarr directory `opt_states_0.no_prefix_2.m.params.lm.w`: keys are joined by dots, and list indices by underscores.
In an OCDBT database Orbax joins all keys by dots: `opt_states.0.no_prefix.2.m.params.lm.w`.
"""

from __future__ import annotations

import re

_INDEX = re.compile(r"/(\d+)(?=/|$)")
_TRAILING_INDICES = re.compile(r"^(.*?)((?:_\d+)*)$")
_INDEXED_ROOTS = ("opt_states", "extra_state")
# praxis keeps the optimizer states of repeated layers apart: 'p#2#i-1' is the key of those of 2 layers, 'no_prefix' of the rest.
_NO_PREFIX, _PREFIX = "no_prefix", "p#"


def directory_name(path: str) -> str:
    """Returns the name of a variable's zarr directory."""
    return _INDEX.sub(r"_\1", path).replace("/", ".")


def dotted_name(path: str) -> str:
    """Returns a variable's name with dots alone, as in an OCDBT database."""
    return path.replace("/", ".")


def path_of(name: str) -> str:
    """Returns the path of a variable, given its name on disk.

    A name does not say which underscores join an index. Here only those of `opt_states`, `extra_state` and of praxis' prefixes
    do, since layers have names such as `x_layers_0`. If a model is at hand, compare names made from its paths instead.
    """
    keys = name.split(".")
    root = _with_indices(keys[0])
    if root[0] not in _INDEXED_ROOTS:
        return "/".join(keys)
    path, rest = root, keys[1:]
    while rest and rest[0].isdigit():
        path.append(rest.pop(0))
    if rest and (size := _prefix_size(rest)):
        path += _with_indices(".".join(rest[:size]))
        rest = rest[size:]
    return "/".join(path + rest)


def _with_indices(key: str) -> list[str]:
    """Splits 'opt_states_0_2' into 'opt_states', '0' and '2'."""
    match = _TRAILING_INDICES.match(key)
    assert match is not None  # The regex matches every text.
    return [match[1], *match[2].split("_")[1:]]


def _prefix_size(keys: list[str]) -> int:
    """Returns how many of the first keys are one prefix of praxis: 'p#2.3#i0.i-1' has dots of its own."""
    if keys[0].startswith(_NO_PREFIX):
        return 1
    if not keys[0].startswith(_PREFIX):
        return 0
    for number, key in enumerate(keys):
        if key.removeprefix(_PREFIX if number == 0 else "").count("#"):
            return 2 * number + 1  # as many mappings as dimensions
    return 0
