"""The memory chart of a plan: live bytes of a chip over the program's schedule, grouped by the layer that made the arrays."""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from spmd_trainer.planner import hlo_liveness
from spmd_trainer.planner.hlo_liveness import LiveRange, Schedule

Path = tuple[str, ...]
Kind = Literal["variables", "optimizer", "batch", "saved", "gradients", "layer", "rest"]

_MOST_POINTS = 400
# Maximum number of groups of layers. The chart has this many colors.
_MOST_LAYERS = 5
# Maximum number of rows in the table of the largest arrays.
_MOST_ARRAYS = 8
# Share of the peak below which a group is part of the rest.
_LEAST_SHARE = 0.02
# Beginnings of the names of arguments, and of the copies that the compiler makes of them.
_ARGUMENTS: tuple[tuple[str, Kind], ...] = (
    ("state.mdl_vars", "variables"),
    ("state.opt_states", "optimizer"),
    ("inputs", "batch"),
)
_NAMES: Mapping[Kind, str] = {
    "variables": "variables",
    "optimizer": "optimizer state",
    "batch": "batch and other arguments",
    "saved": "residuals saved for the backward pass",
    "gradients": "gradients of repeated layers",
    "rest": "other temporaries",
}
# Components of an operation's name that JAX's transformations and control flow add.
_WRAPPER = re.compile(
    r"(?:jit|jvp|transpose|vmap|pjit|remat)\(.*|while|body|cond|closed_call|checkpoint|remat\w*|branch_\d+_fun|einsum|.*->.*"
)
# Number at the end of a layer's name, which distinguishes otherwise equal names.
_NUMBER = re.compile(r"(?:^|(?<=_))\d+$")


@dataclasses.dataclass(frozen=True)
class Group:
    """Arrays that the chart shows as one area.

    Attributes:
      kind: kind of the arrays, e.g. 'variables'. Temporaries that a layer's operations make have the kind 'layer'.
      name: the group's name in the chart; for a layer, its path, e.g. 'repeat/sub/x_layers_*/self_attention'.
      num_bytes: live bytes at each point of the chart.
    """

    kind: Kind
    name: str
    num_bytes: list[int]


@dataclasses.dataclass(frozen=True)
class PeakArray:
    """Temporaries of equal shape that one operation makes, and that are live when memory use is highest.

    Attributes:
      num_bytes: bytes of all these arrays together.
      count: number of these arrays.
      array: type and shape of one array in XLA's notation.
      group: name of the chart's `Group` that they belong to.
      operation: the model's operation that makes them, e.g. 'lm/softmax, backward: dot_general'; '' if the compiler added them.
    """

    num_bytes: int
    count: int
    array: str
    group: str
    operation: str


@dataclasses.dataclass(frozen=True)
class MemoryOverTime:
    """The memory chart: live bytes of a chip at some points of a compiled program's schedule.

    Attributes:
      positions: for each point of the chart, its position in the schedule.
      length: number of positions in the schedule.
      groups: the areas of the chart, lowest first.
      peak: index of the point with the most bytes.
      operations: for each point, the index of its operation in `operation_names`.
      operation_names: layer and pass of each operation, e.g. 'lm/softmax, backward'.
      loops: a record of each outermost loop: 'begin' and 'end' are the first and last position of its body, 'times' is the number
        of iterations, and 'part' is 'forward', 'backward', 'rematerialised' or ''.
      largest: the largest temporaries at the peak, largest first.
    """

    positions: list[int]
    length: int
    groups: list[Group]
    peak: int
    operations: list[int]
    operation_names: list[str]
    loops: list[dict[str, Any]]
    largest: list[PeakArray]


def memory_over_time(schedule: Schedule | None) -> MemoryOverTime | None:
    """Returns the memory chart of a compiled program's schedule; None if there is no schedule, or it has no arrays."""
    if schedule is None or not schedule.ranges:
        return None
    positions = schedule.thinned(_MOST_POINTS)
    named = _named_ranges(schedule)
    groups = [
        Group(kind, name, hlo_liveness.live_bytes(ranges, len(schedule.made_by))[positions].tolist())
        for kind, name, ranges in named
    ]
    peak = int(np.sum([group.num_bytes for group in groups], axis=0).argmax())
    texts = _operation_texts(schedule.made_by)
    names: dict[str, int] = {}
    operations = [names.setdefault(texts[position], len(names)) for position in positions]
    return MemoryOverTime(
        positions=positions.tolist(),
        length=len(schedule.made_by),
        groups=groups,
        peak=peak,
        operations=operations,
        operation_names=list(names),
        loops=[
            {"begin": loop.begin, "end": loop.end, "times": loop.times, "part": _pass(loop.made_by)}
            for loop in schedule.loops
            if not loop.depth and loop.times > 1
        ],
        largest=_largest(named, int(positions[peak])),
    )


def layer_path(operation: str) -> Path:
    """Returns the layers that contain an operation, outermost first, without the scopes that JAX adds; () if there are none.

    A number at the end of a layer's name becomes '*', e.g. 'x_layers_*'.
    """
    *scopes, _ = hlo_liveness.first_operation(operation).split("/")
    path: list[str] = []
    for scope in scopes:
        if _WRAPPER.fullmatch(scope):
            continue
        # praxis names a method's scope 'layer.method'.
        layer = _NUMBER.sub("*", scope.partition(".")[0])
        if layer and (not path or path[-1] != layer):
            path.append(layer)
    return tuple(path)


def operation_text(operation: str) -> str:
    """Returns an operation's layer and pass, e.g. 'lm/softmax, backward'; '' for operations that the compiler added."""
    if "/" not in operation:
        return ""
    part = _pass(operation)
    path = "/".join(layer_path(operation)) or "outside the layers"
    return f"{path}, {part}" if part else path


def _operation_texts(operations: Sequence[str]) -> list[str]:
    """Returns `operation_text` for each position. For operations added by the compiler, names the operation before them."""
    texts, before = list[str](), ""
    for operation in operations:
        text = operation_text(operation)
        texts.append(text or ("added by the compiler" + (f" after {before}" if before else "")))
        before = text or before
    return texts


def _pass(operation: str) -> str:
    """Returns the pass (e.g. 'backward') that an operation belongs to; '' for operations of the optimizer or the compiler."""
    if "rematted_computation" in operation:
        return "rematerialised"
    if "transpose(" in operation:
        return "backward"
    return "forward" if "jvp(" in operation else ""


def _kind(live: LiveRange) -> Kind:
    array = live.array
    if array.is_argument:
        return next((kind for prefix, kind in _ARGUMENTS if array.made_by.startswith(prefix)), "batch")
    if live.filled_by:
        return "gradients" if "transpose(" in live.filled_by else "saved"
    return "layer" if layer_path(array.made_by) else "rest"


def _named_ranges(schedule: Schedule) -> list[tuple[Kind, str, list[LiveRange]]]:
    by_kind: dict[Kind, list[LiveRange]] = collections.defaultdict(list)
    for live in schedule.ranges:
        by_kind[_kind(live)].append(live)
    length = len(schedule.made_by)
    layers, rest = _divided(by_kind["layer"], length, _LEAST_SHARE * schedule.totals().max())
    by_kind["rest"] += rest
    named: list[tuple[Kind, str, list[LiveRange]]] = [
        (kind, name, by_kind[kind]) for kind, name in _NAMES.items() if kind != "rest"
    ]
    named += [("layer", name, layers[name]) for name in sorted(layers)]
    named.append(("rest", _NAMES["rest"], by_kind["rest"]))
    return [(kind, name, ranges) for kind, name, ranges in named if ranges]


def _largest(named: Sequence[tuple[Kind, str, list[LiveRange]]], position: int) -> list[PeakArray]:
    """Returns the largest temporaries at a position of the schedule. Equal arrays of one group are merged into one entry."""
    counts = collections.Counter(
        (live.array, name)
        for _, name, ranges in named
        for live in ranges
        if live.begin <= position <= live.end and not live.array.is_argument
    )
    found = []
    for (array, name), count in heapq.nlargest(
        _MOST_ARRAYS, counts.items(), key=lambda item: item[0][0].num_bytes * item[1]
    ):
        scope = operation_text(array.made_by)
        operation = f"{scope}: {hlo_liveness.first_operation(array.made_by).rpartition('/')[2]}" if scope else ""
        found.append(PeakArray(array.num_bytes * count, count, array.array, name, operation))
    return found


def _divided(
    ranges: Sequence[LiveRange], length: int, least: float
) -> tuple[dict[str, list[LiveRange]], list[LiveRange]]:
    """Groups temporaries by the layers that make them. Returns {name of the group: its temporaries}, and the other temporaries.

    Repeatedly divides the largest group by the next component of its layer paths, unless this would give too many groups.

    Args:
      ranges: the temporaries.
      length: number of positions of the schedule.
      least: minimum number of live bytes that a group must reach; smaller groups are added to the other temporaries.
    """
    full = _full_paths([layer_path(live.array.made_by) for live in ranges])
    groups: dict[Path, list[LiveRange]] = {(): list(ranges)}
    pending: set[Path] = {()}
    while pending:
        largest = max(pending, key=lambda path: _most(groups[path], length))
        pending.remove(largest)
        inner: dict[Path, list[LiveRange]] = collections.defaultdict(list)
        for live in groups[largest]:
            inner[full[layer_path(live.array.made_by)][: len(largest) + 1]].append(live)
        own = inner.pop(largest, [])
        for path in [path for path, members in inner.items() if _most(members, length) < least]:
            own += inner.pop(path)
        divided = {path: members for path, members in groups.items() if path != largest} | inner | {largest: own}
        count = sum(bool(path) and _most(members, length) >= least for path, members in divided.items())
        # The outermost layers are always groups: arrays outside of all layers must not be with them.
        if largest and count > _MOST_LAYERS:
            continue
        groups = divided
        pending |= inner.keys()
    sizes = {path: _most(members, length) for path, members in groups.items() if path}
    chosen = heapq.nlargest(
        _MOST_LAYERS, (path for path in sizes if sizes[path] >= least), key=lambda path: sizes[path]
    )
    rest = [live for path in groups.keys() - set(chosen) for live in groups[path]]
    return {name: groups[path] for path, name in _layer_names(chosen).items()}, rest


def _most(ranges: Sequence[LiveRange], length: int) -> int:
    return int(hlo_liveness.live_bytes(ranges, length).max(initial=0))


def _full_paths(paths: Sequence[Path]) -> dict[Path, Path]:
    """Returns {path: complete path}. Where the compiler dropped a path's outer layers, takes them from a different path."""
    counts = collections.Counter(path[0] for path in paths if path)
    root = counts.most_common(1)[0][0] if counts else ""
    before: dict[str, Path] = {}
    for path in paths:
        if path and path[0] == root:
            for depth, layer in enumerate(path):
                before.setdefault(layer, path[:depth])
    return {path: before.get(path[0], ()) + path if path else () for path in paths}


def _layer_names(paths: Sequence[Path]) -> dict[Path, str]:
    """Returns {layer path: name of its group}. The name is the path without the outer layers that all paths share."""
    levels = zip(*(path[:-1] for path in paths), strict=False)
    common = len(list(itertools.takewhile(lambda level: len(set(level)) == 1, levels)))
    names = {}
    for path in paths:
        is_divided = any(other != path and other[: len(path)] == path for other in paths)
        names[path] = "/".join(path[common:]) + (" (other parts)" if is_divided else "")
    return names
