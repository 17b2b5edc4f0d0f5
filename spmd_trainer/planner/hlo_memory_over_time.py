"""Memory of a compiled program over its schedule: the arrays live at each instruction, read from the program's
text.

Instructions of loops and calls stand in the schedule where they run, each once. `hlo_liveness` says how accurate the arrays
are.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from spmd_trainer.planner import hlo_liveness, hlo_text
from spmd_trainer.planner.hlo_liveness import LiveArray
from spmd_trainer.planner.hlo_text import Instruction

# Operations that make the zeros that a loop fills: 'jit(step)/jvp(...)/broadcast_in_dim', or XLA's own 'broadcast.65'.
_ZEROS = re.compile(r"(?:^|/)broadcast(?:_in_dim|\.\d+|)$")


@dataclasses.dataclass(frozen=True)
class LiveRange:
    """The part of the schedule in which an array is live.

    Attributes:
      array: the array.
      begin, end: first and last position.
      filled_by: the model's operation of the loop that fills the array, one entry of its first dimension per iteration:
        residuals that layers save for the backward pass, or the gradients of repeated layers. '' for other arrays.
    """

    array: LiveArray
    begin: int
    end: int
    filled_by: str = ""


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of the schedule.

    Attributes:
      begin, end: first and last position of its body.
      times: iterations.
      made_by: the model's operation; '' if the compiler added the loop.
      depth: number of loops around it.
    """

    begin: int
    end: int
    times: int
    made_by: str
    depth: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A compiled program's instructions in execution order, and its live arrays.

    Attributes:
      made_by: the model's operation at each position; '' for instructions that the compiler added.
      ranges: the arrays with their ranges.
      loops: the loops, outer ones first.
    """

    made_by: Sequence[str]
    ranges: Sequence[LiveRange]
    loops: Sequence[Loop]

    def totals(self) -> np.ndarray:
        """Returns the live bytes at each position, int64[positions]."""
        return live_bytes(self.ranges, len(self.made_by))

    def thinned(self, most: int) -> np.ndarray:
        """Returns at most `most` positions for a chart, int[n].

        The schedule is cut into equal parts, and each part gives its first position with the most bytes. So the peak is
        included.
        """
        totals = self.totals()
        parts = np.array_split(np.arange(len(totals)), min(most, len(totals)))
        return np.array([part[np.argmax(totals[part])] for part in parts], int)


def live_bytes(ranges: Sequence[LiveRange], length: int) -> np.ndarray:
    """Returns the bytes of the arrays that are live at each of `length` positions, int64[length]."""
    changes = np.zeros(length + 1, np.int64)
    if ranges:
        sizes = np.array([r.array.num_bytes for r in ranges], np.int64)
        np.add.at(changes, [r.begin for r in ranges], sizes)
        np.add.at(changes, [r.end + 1 for r in ranges], -sizes)
    return changes[:-1].cumsum()


def schedule(hlo: str) -> Schedule | None:
    """Returns the schedule of a compiled program. `hlo`: the program's text (`jax.stages.Compiled.as_text()`).

    Returns:
      The schedule; None if the program's instructions are not in execution order.
    """
    bodies, entry = hlo_text.computations(hlo)
    header = hlo.partition("\n")[0]
    if entry is None or "is_scheduled=true" not in header:
        return None
    found = _Schedules(bodies).of(entry, hlo_liveness.aliased_outputs(hlo), is_entry=True)
    return dataclasses.replace(found, loops=sorted(found.loops, key=lambda loop: (loop.depth, loop.begin)))


class _Schedules:
    """The schedules of a program's computations; each is worked out once."""

    def __init__(self, bodies: Mapping[str, str]):
        self._bodies = bodies
        self._known: dict[str, Schedule] = {}

    def of(self, name: str, aliased_outputs: set[int], *, is_entry: bool = False) -> Schedule:
        instructions = list(hlo_text.instructions(self._bodies[name]))
        # Each instruction's own position, and the last position of what it calls.
        starts, ends = list[int](), list[int]()
        made_by, ranges, loops = list[str](), list[LiveRange](), list[Loop]()
        own_loops = list[tuple[int, Loop]]()
        for place, instruction in enumerate(instructions):
            starts.append(len(made_by))
            made_by.append(instruction.made_by)
            inner = self._called(instruction)
            if inner is not None:
                offset = len(made_by)
                is_loop = instruction.opcode == "while"
                made_by += inner.made_by
                ranges += [dataclasses.replace(r, begin=r.begin + offset, end=r.end + offset) for r in inner.ranges]
                loops += list(_moved(inner.loops, offset, int(is_loop)))
                if is_loop:
                    times = hlo_text.trip_count(instruction.rest, self._bodies)
                    own_loops.append((place, Loop(offset, len(made_by) - 1, times, instruction.made_by, 0)))
            ends.append(len(made_by) - 1)
        for buffer in hlo_liveness.buffers_of(instructions, aliased_outputs, is_entry=is_entry):
            if buffer.array.num_bytes:
                begin = starts[buffer.born] if buffer.born >= 0 else 0
                end = ends[buffer.last] if buffer.last < len(ends) else len(made_by) - 1
                filled_by = next(
                    (
                        loop.made_by
                        for at, loop in own_loops
                        if buffer.born < at <= buffer.last and _fills(loop, buffer)
                    ),
                    "",
                )
                ranges.append(LiveRange(buffer.array, begin, end, filled_by))
        return Schedule(made_by, ranges, loops + [loop for _, loop in own_loops])

    def _called(self, instruction: Instruction) -> Schedule | None:
        """Returns the schedule that an instruction runs; of a conditional's branches, the one with the most bytes."""
        names = [name for name in hlo_liveness.called(instruction) if name in self._bodies]
        for name in names:
            if name not in self._known:
                self._known[name] = self.of(name, set())
        return max((self._known[name] for name in names), key=lambda s: s.totals().max(initial=0), default=None)


def _moved(loops: Sequence[Loop], offset: int, deeper: int) -> Iterator[Loop]:
    for loop in loops:
        yield dataclasses.replace(loop, begin=loop.begin + offset, end=loop.end + offset, depth=loop.depth + deeper)


def _fills(loop: Loop, buffer: hlo_liveness.Buffer) -> bool:
    """Returns True if the loop fills the array: zeros before it, with one entry for each iteration."""
    array = buffer.array
    return bool(_ZEROS.search(array.made_by)) and hlo_text.dimensions(array.array)[:1] == (loop.times,)
