"""Collectives of a compiled program, counted in its text: kind, how often a step runs them, and their bytes.

Loops count as often as they run (XLA writes a scan's trip count into the program), which `cost_analysis()` does not do.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

_ITEM_BITS = re.compile(r"\d+")
_COLLECTIVE = re.compile(
    r" = (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|ragged-all-to-all)(?:-start)?\("
)
_BODY = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*?\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
# A list of lists of device positions; or the same as an array: its shape, and how it is cut out of all positions.
_GROUPS = re.compile(r"replica_groups=(?:\{(\{[\d,{}]*\})\}|\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?)")
_PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{}]*\})\}")
_CALLED = re.compile(
    r" (?:call|conditional|fusion|async-start)\(.*?(?:to_apply|calls|branch_computations)=\{?%?([\w.-]+)"
)


@dataclasses.dataclass
class CollectiveTotals:
    """What one kind of collective adds up to.

    Attributes:
      count: how often one run of the program executes it, loops multiplied out.
      num_bytes: bytes of its whole arrays on one device, summed over these: the results; of a reduce-scatter its operand.
      largest: bytes of the largest single one.
    """

    count: int = 0
    num_bytes: int = 0
    largest: int = 0

    def add(self, times: int, num_bytes: int) -> None:
        """Adds a collective of `num_bytes` that runs `times` times."""
        self.count += times
        self.num_bytes += times * num_bytes
        self.largest = max(self.largest, num_bytes)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
      kind: 'all-reduce', 'all-gather', ...
      times: how often one run of the program executes it.
      num_bytes: as in `CollectiveTotals`, of one execution.
      groups: device positions that exchange with each other, [number of groups, members]; empty where the text names none.
    """

    kind: str
    times: int
    num_bytes: int
    groups: np.ndarray

    def axes(self, mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
        """Returns the mesh axes that it crosses; positions are those of the mesh's devices in order."""
        if not self.groups.size:
            return tuple(axis for axis, size in mesh_shape.items() if size > 1)
        places = np.stack(np.unravel_index(self.groups, tuple(mesh_shape.values())))  # [axes, groups, members]
        crossed = (places != places[:, :, :1]).any((1, 2))
        return tuple(axis for axis, across in zip(mesh_shape, crossed, strict=True) if across)


def computations(hlo: str) -> tuple[dict[str, str], str | None]:
    """Returns the instructions of each computation of a program, as text by its name, and the name of the program's own."""
    found = _BODY.findall(hlo)
    entry = next((name for is_entry, name, _ in found if is_entry), None)
    return {name: body for _, name, body in found}, entry


def find_collectives(hlo: str) -> Iterator[Collective]:
    """Yields each collective of a compiled program (`jax.stages.Compiled.as_text()`)."""
    bodies, entry = computations(hlo)
    channels: set[str] = set()
    pending = [(entry, 1, False)] if entry else []
    while pending:
        name, times, in_fusion = pending.pop()
        for line in bodies.get(name, "").splitlines():
            found = _COLLECTIVE.search(line)
            channel = re.search(r"channel_id=(\d+)", line)
            # TPU programs write an asynchronous collective into several fusions: where it starts, goes on and is done.
            repeated = in_fusion and channel is not None and channel[1] in channels
            if found and not repeated:
                if in_fusion and channel:
                    channels.add(channel[1])
                groups = _groups(line)
                members = groups.shape[-1] if found[2] == "reduce-scatter" and groups.size else 1
                yield Collective(found[2], times, array_bytes(found[1]) * members, groups)
            loop = re.search(r" while\(.*body=%?([\w.-]+)", line)
            if loop:
                pending.append((loop[1], times * _trips(line, bodies), in_fusion))
            pending += [(called, times, in_fusion or " fusion(" in line) for called in _CALLED.findall(line)]


def count_collectives(hlo: str) -> dict[str, CollectiveTotals]:
    """Returns {kind: totals} of a compiled program, e.g. of kind 'all-gather'."""
    totals: dict[str, CollectiveTotals] = {}
    for found in find_collectives(hlo):
        totals.setdefault(found.kind, CollectiveTotals()).add(found.times, found.num_bytes)
    return totals


def collectives_text(hlo: str) -> str:
    """Returns the totals in one line: '8 all-reduce 12.50 MiB, ...'."""
    totals = sorted(count_collectives(hlo).items())
    return ", ".join(f"{t.count} {kind} {t.num_bytes / 2**20:.2f} MiB" for kind, t in totals) or "no collectives"


def _trips(line: str, bodies: Mapping[str, str]) -> int:
    """Returns how often a loop runs: as XLA notes it, else the bound that its condition counts up to, else 1."""
    noted = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
    if noted:
        return int(noted[1])
    condition = re.search(r"condition=%?([\w.-]+)", line)
    body = bodies.get(condition[1], "") if condition else ""
    bounds = re.findall(r" constant\((\d+)\)", body)
    return int(bounds[0]) if len(bounds) == 1 and "direction=LT" in body else 1


def array_bytes(result: str) -> int:
    """Returns the bytes of an array or a tuple of arrays as the text writes it, e.g. 'f32[8,128]{1,0}'."""
    arrays = re.findall(r"\b(\w+)\[([\d,]*)\]", result)
    return sum(_item_bytes(kind) * math.prod(int(n) for n in sizes.split(",") if n) for kind, sizes in arrays)


def _item_bytes(kind: str) -> int:
    """Bytes of one element of an XLA type such as f32, bf16, s8, pred, f8e4m3fn."""
    bits = _ITEM_BITS.search(kind)
    return 1 if bits is None else max(1, int(bits[0]) // 8)


def _groups(line: str) -> np.ndarray:
    """Returns the groups of a collective, or the pairs of a permutation: [number of groups, members]."""
    found = _GROUPS.search(line)
    if found and found[2]:
        shape = [int(n) for n in found[4].split(",")]
        order = np.arange(math.prod(shape)).reshape(shape)
        if found[5]:
            order = order.transpose([int(n) for n in found[5].split(",")])
        return order.reshape(int(found[2]), int(found[3]))
    listed = found or _PAIRS.search(line)
    if not listed:
        return np.zeros((0, 0), int)
    groups = [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed[1])]
    return np.array(groups) if len({len(group) for group in groups}) == 1 else np.zeros((0, 0), int)
