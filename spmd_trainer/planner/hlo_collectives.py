"""Collectives of a compiled program, read from its text: kind, executions per run, and bytes.

A collective in a loop counts once per iteration: XLA writes trip counts into the text, though `cost_analysis()` ignores them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from spmd_trainer.planner import hlo_text

_COLLECTIVE = re.compile(
    r" = (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|ragged-all-to-all)(-start)?\("
)
# Groups of device positions: either a list of lists, or the shape of an array and how to compute it from all positions.
_GROUPS = re.compile(r"replica_groups=(?:\{(\{[\d,{}]*\})\}|\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?)")
# The same groups in terms of a mesh: its axes, the order of the devices on it if not row-major, and the axes of each group,
# each a whole axis or, as 'axis':(N)SIZE, the part of size SIZE that has N devices before it.
_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)
_MESH_AXIS = re.compile(r"'([^']*)'=(\d+)")
_GROUP_AXIS = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")
# Name of TPU fusions that sum an array and keep this device's shard of the sum: in effect, a reduce-scatter.
_SCATTERED_SUM = "all-reduce-scatter"
_PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{}]*\})\}")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
      kind: 'all-reduce', 'all-gather', ...
      times: number of executions in one run of the program. A collective in a loop is executed once per iteration.
      num_bytes: bytes per device in one execution: the size of a reduce-scatter's operand, or of any other collective's result.
      groups: groups of devices that communicate with each other, as device positions: int [groups, devices per group]. For a
        collective-permute, the (source, target) pairs. Empty if the text has no groups, or has groups of different sizes.
    """

    kind: str
    times: int
    num_bytes: int
    groups: np.ndarray

    def axes(self, mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
        """Returns the mesh axes that the collective crosses. If `groups` is empty, returns all axes that are larger than 1.

        The device positions in `groups` must be indices into the mesh's devices in row-major order.
        """
        if not self.groups.size:
            return tuple(axis for axis, size in mesh_shape.items() if size > 1)
        coordinates = np.stack(np.unravel_index(self.groups, tuple(mesh_shape.values())))  # [axes, groups, members]
        crossed = (coordinates != coordinates[:, :, :1]).any((1, 2))
        return tuple(axis for axis, across in zip(mesh_shape, crossed, strict=True) if across)


def find_collectives(hlo: str) -> Iterator[Collective]:
    """Yields each collective of a compiled program (`jax.stages.Compiled.as_text()`)."""
    bodies, entry = hlo_text.computations(hlo)
    channels: set[str] = set()
    for execution in hlo_text.executions(bodies, entry):
        for line in bodies.get(execution.name, "").splitlines():
            found = _COLLECTIVE.search(line)
            if not found:
                continue
            channel = re.search(r"channel_id=(\d+)", line)
            # TPU programs repeat an asynchronous collective in several fusions: its start, its steps and its end.
            if execution.in_fusion and channel:
                if channel[1] in channels:
                    continue
                channels.add(channel[1])
            groups, kind = _groups(line), found[2]
            members = groups.shape[-1] if kind == "reduce-scatter" and groups.size else 1
            result = _result(kind, found[1], is_start=bool(found[3]))
            if kind == "all-reduce" and execution.name.startswith(_SCATTERED_SUM):
                kind = "reduce-scatter"
            yield Collective(kind, execution.times, hlo_text.array_bytes(result) * members, groups)


def _result(kind: str, shape: str, *, is_start: bool) -> str:
    """Returns the shape of a collective's result. The shape of a `-start` instruction is usually (operands, results, ...)."""
    if not is_start or (kind == "all-reduce" and not shape.startswith("((")):
        return shape
    elements = hlo_text.tuple_elements(shape)
    return elements[1] if len(elements) > 1 else shape


def _groups(line: str) -> np.ndarray:
    """Returns `Collective.groups` for the collective in a line of the program's text."""
    found = _GROUPS.search(line)
    if found and found[2]:
        shape = [int(n) for n in found[4].split(",")]
        return _order(shape, found[5]).reshape(int(found[2]), int(found[3]))
    mesh = _MESH_GROUPS.search(line)
    if mesh:
        return _mesh_groups(mesh)
    listed = found or _PAIRS.search(line)
    if not listed:
        return np.zeros((0, 0), int)
    groups = [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed[1])]
    return np.array(groups) if len({len(group) for group in groups}) == 1 else np.zeros((0, 0), int)


def _order(shape: Sequence[int], permutation: str | None) -> np.ndarray:
    order = np.arange(math.prod(shape)).reshape(shape)
    return order.transpose([int(n) for n in permutation.split(",")]) if permutation else order


def _mesh_groups(found: re.Match[str]) -> np.ndarray:
    """Returns the device groups as int [groups, devices per group], from XLA's notation `mesh[axes] {axes within a group}`."""
    sizes = {name: int(size) for name, size in _MESH_AXIS.findall(found[1])}
    order = np.arange(math.prod(sizes.values()))
    if found[2]:
        order = _order([int(n) for n in found[2].split(",")], found[3])
    shape: list[int] = []
    members: list[int] = []
    chosen = [
        (name, int(before or 1), int(size or sizes[name])) for name, before, size in _GROUP_AXIS.findall(found[4])
    ]
    for name, whole in sizes.items():
        # Each axis is cut where a chosen part of it begins or ends.
        cuts = {1, whole} | {cut for axis, before, size in chosen if axis == name for cut in (before, before * size)}
        for low, high in itertools.pairwise(sorted(cuts)):
            if any(axis == name and before <= low and high <= before * size for axis, before, size in chosen):
                members.append(len(shape))
            shape.append(high // low)
    others = [dim for dim in range(len(shape)) if dim not in members]
    count = math.prod(shape[dim] for dim in members)
    return order.reshape(shape).transpose(others + members).reshape(-1, count)
