"""Collectives of a compiled program, counted in its text: kind, how often a step runs them, and their bytes.

Loops count as often as they run (XLA writes a scan's trip count into the program), which `cost_analysis()` does not do.
"""

from __future__ import annotations

import dataclasses
import math
import re

_ITEM_BITS = re.compile(r"\d+")
_COLLECTIVE = re.compile(
    r" = (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|ragged-all-to-all)(?:-start)?\("
)
_BODY = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*?\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_GROUP_SIZE = re.compile(r"replica_groups=(?:\[\d+,(\d+)\]|\{\{([\d,]*)\})")


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


def count_collectives(hlo: str) -> dict[str, CollectiveTotals]:
    """Returns {kind: totals} of a compiled program (`jax.stages.Compiled.as_text()`), e.g. of kind 'all-gather'."""
    bodies = dict(_BODY.findall(hlo))
    entry = re.search(r"^ENTRY %?([\w.-]+)", hlo, re.MULTILINE)
    totals: dict[str, CollectiveTotals] = {}

    def visit(name: str, times: int) -> None:
        for line in bodies.get(name, "").splitlines():
            found = _COLLECTIVE.search(line)
            if found:
                size = _bytes(found[1]) * (_group_size(line) if found[2] == "reduce-scatter" else 1)
                totals.setdefault(found[2], CollectiveTotals()).add(times, size)
            loop = re.search(r" while\(.*body=%?([\w.-]+)", line)
            if loop:
                trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
                visit(loop[1], times * (int(trips[1]) if trips else 1))
            for called in re.findall(r" (?:call|conditional)\(.*?(?:to_apply|calls)=%?([\w.-]+)", line):
                visit(called, times)

    visit(entry[1] if entry else "", 1)
    return totals


def collectives_text(hlo: str) -> str:
    """Returns the totals in one line: '8 all-reduce 12.50 MiB, ...'."""
    totals = sorted(count_collectives(hlo).items())
    return ", ".join(f"{t.count} {kind} {t.num_bytes / 2**20:.2f} MiB" for kind, t in totals) or "no collectives"


def _bytes(result: str) -> int:
    arrays = re.findall(r"\b(\w+)\[([\d,]*)\]", result)
    return sum(_item_bytes(kind) * math.prod(int(n) for n in sizes.split(",") if n) for kind, sizes in arrays)


def _item_bytes(kind: str) -> int:
    """Bytes of one element of an XLA type such as f32, bf16, s8, pred, f8e4m3fn."""
    bits = _ITEM_BITS.search(kind)
    return 1 if bits is None else max(1, int(bits[0]) // 8)


def _group_size(line: str) -> int:
    found = _GROUP_SIZE.search(line)
    if not found:
        return 1
    return int(found[1]) if found[1] else len(found[2].split(","))
