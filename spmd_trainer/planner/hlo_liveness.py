"""Finds the arrays that are live at each instruction of a compiled program, from its text.

XLA writes the instructions in execution order. In the schedule, the instructions of a loop's body or of a called computation
follow the loop or call instruction, and appear once.

The result is an estimate, because the text does not contain the buffer assignment. The estimate follows XLA's rules: loops and
tuples work in place, a result reuses the buffer of an operand that has the same shape and is not read afterwards, and an output
that aliases a donated argument uses the argument's buffer. Tile padding and gaps between buffers are not counted.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from spmd_trainer.planner import hlo_text
from spmd_trainer.planner.hlo_text import Instruction

_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}")
_CALLED = re.compile(
    r"(?:body|to_apply|branch_computations|true_computation|false_computation)=\{?((?:%?[\w.-]+(?:, )?)+)"
)
_IN_PLACE = frozenset({"bitcast", "optimization-barrier", "while", "add-dependency"})
_HOLDS_NOTHING = frozenset({"constant", "partition-id", "replica-id", "after-all", "create-token"})
# Operations that can't overwrite an operand of the same shape: they read and write elements in different orders.
_NEEDS_OWN = frozenset(
    {
        "all-gather",
        "all-to-all",
        "cholesky",
        "collective-permute",
        "concatenate",
        "convolution",
        "copy",
        "copy-start",
        "custom-call",
        "dot",
        "fft",
        "gather",
        "pad",
        "reduce-window",
        "reverse",
        "slice",
        "transpose",
        "triangular-solve",
    }
)
# XLA gives a merged operation one name that lists all of them: 'scope/(a/mul:b/add)'.
_MERGED = re.compile(r"\(([^():]*):.*")
# Operations that make the zeros that a loop fills: 'jit(step)/jvp(...)/broadcast_in_dim', or XLA's own 'broadcast.65'.
_ZEROS = re.compile(r"(?:^|/)broadcast(?:_in_dim|\.\d+|)$")
# Positions before the first instruction and after the last one.
_BEFORE, _AT_THE_END = -1, 2**62


@dataclasses.dataclass(frozen=True)
class LiveArray:
    """One array of a compiled program.

    Attributes:
      num_bytes: bytes of the array on one device.
      array: the array's type and shape in XLA's notation, e.g. 'bf16[32,1024,192]'.
      made_by: name of the model's operation that makes the array (XLA's `op_name`); '' if the compiler added the array.
      is_argument: True if the array is an argument of the program.
    """

    num_bytes: int
    array: str
    made_by: str
    is_argument: bool = False


@dataclasses.dataclass(frozen=True)
class LiveRange:
    """An array, and the range of positions in the schedule at which it is live.

    Attributes:
      begin, end: first and last position at which the array is live.
      filled_by: name of the loop whose iterations each fill one entry of the array's first dimension, e.g. with residuals for
        the backward pass, or with gradients of repeated layers. '' for other arrays.
    """

    array: LiveArray
    begin: int
    end: int
    filled_by: str = ""


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of a schedule.

    Attributes:
      begin, end: first and last position of the loop's body in the schedule.
      times: number of iterations.
      made_by: name of the model's operation that became this loop; '' if the compiler added the loop.
      depth: number of loops that enclose this loop.
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
      made_by: for each position, the name of the model's operation (XLA's `op_name`); '' if the compiler added the instruction.
      ranges: the program's arrays, and the positions at which each is live.
      loops: the program's loops, outer loops first.
    """

    made_by: Sequence[str]
    ranges: Sequence[LiveRange]
    loops: Sequence[Loop]

    def totals(self) -> np.ndarray:
        """Returns the live bytes at each position, int64[positions]."""
        return live_bytes(self.ranges, len(self.made_by))

    def thinned(self, most: int) -> np.ndarray:
        """Returns at most `most` positions of the schedule, for a chart, as an integer array.

        The schedule is divided into intervals of equal length. For each interval, the result has the first position with the
        most live bytes. So the peak of the whole schedule is included.
        """
        totals = self.totals()
        parts = np.array_split(np.arange(len(totals)), min(most, len(totals)))
        return np.array([part[np.argmax(totals[part])] for part in parts], int)


def live_bytes(ranges: Sequence[LiveRange], length: int) -> np.ndarray:
    """Returns the total bytes of the live arrays at each of the schedule's `length` positions, int64[length]."""
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
    # The indices of the outputs that reuse the buffer of an argument.
    aliased = {int(output or 0) for output, _ in _ALIAS.findall(header.partition("input_output_alias=")[2])}
    found = _Schedules(bodies).of(entry, aliased, is_entry=True)
    return dataclasses.replace(found, loops=sorted(found.loops, key=lambda loop: (loop.depth, loop.begin)))


def first_operation(made_by: str) -> str:
    """Returns the name of an operation; if XLA has merged several operations, the name of the first one."""
    return _MERGED.sub(r"\1", made_by)


@dataclasses.dataclass
class _Buffer:
    """The buffer of one array.

    Attributes:
      leaf: the array's type, shape and layout in XLA's notation.
      born, last: indices of the instruction that makes the array, and of the last instruction that reads it.
    """

    leaf: str
    array: LiveArray
    born: int
    last: int

    @property
    def key(self) -> tuple[str, bool]:
        """Key for buffer reuse: (type and shape, True if in main memory). Arrays with equal keys can use the same buffer."""
        return self.array.array, hlo_text.is_in_main_memory(self.leaf)


class _Value(NamedTuple):
    """An instruction's result: its shape, and the buffer index of each array in it."""

    shape: str
    numbers: list[int]


class _Schedules:
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
                loops += [
                    dataclasses.replace(
                        loop, begin=loop.begin + offset, end=loop.end + offset, depth=loop.depth + is_loop
                    )
                    for loop in inner.loops
                ]
                if is_loop:
                    times = hlo_text.trip_count(instruction.rest, self._bodies)
                    own_loops.append((place, Loop(offset, len(made_by) - 1, times, instruction.made_by, 0)))
            ends.append(len(made_by) - 1)
        for buffer in _buffers_of(instructions, aliased_outputs, is_entry=is_entry):
            if buffer.array.num_bytes:
                begin = starts[buffer.born] if buffer.born >= 0 else 0
                end = ends[buffer.last] if buffer.last < len(ends) else len(made_by) - 1
                # A loop fills zeros that were made before it, with one entry for each of its iterations.
                entries = hlo_text.dimensions(buffer.array.array)[:1] if _ZEROS.search(buffer.array.made_by) else ()
                fills = [loop for at, loop in own_loops if buffer.born < at <= buffer.last and entries == (loop.times,)]
                ranges.append(LiveRange(buffer.array, begin, end, fills[0].made_by if fills else ""))
        return Schedule(made_by, ranges, loops + [loop for _, loop in own_loops])

    def _called(self, instruction: Instruction) -> Schedule | None:
        """Returns the schedule of what `instruction` runs, or None. For a conditional, uses the branch with the highest peak."""
        if instruction.opcode not in ("while", "call", "conditional"):
            return None
        called = [name for group in _CALLED.findall(instruction.rest) for name in re.findall(r"[\w.-]+", group)]
        names = [name for name in called if name in self._bodies]
        for name in names:
            if name not in self._known:
                self._known[name] = self.of(name, set())
        return max((self._known[name] for name in names), key=lambda s: s.totals().max(initial=0), default=None)


def _buffers_of(instructions: Sequence[Instruction], aliased: set[int], *, is_entry: bool) -> list[_Buffer]:
    """Returns the buffers of one computation. `aliased`: positions of the outputs that reuse an argument's buffer."""
    buffers: list[_Buffer] = []
    held: dict[str, _Value] = {}
    for place, instruction in enumerate(instructions):
        operands = [held[name] for name in instruction.operands if name in held]
        numbers = list(_results(place, instruction, operands, buffers, is_entry=is_entry))
        # get-tuple-element reads one element of the tuple only.
        of_operands = [n for operand in operands for n in operand.numbers]
        for number in numbers if instruction.opcode == "get-tuple-element" else of_operands:
            buffers[number].last = max(buffers[number].last, place)
        held[instruction.name] = _Value(instruction.shape, numbers)
        for number in numbers:  # a compiler's copy counts for the operation that uses it
            if instruction.made_by and not buffers[number].array.made_by:
                buffers[number].array = dataclasses.replace(buffers[number].array, made_by=instruction.made_by)
    outputs = [number for i in instructions if i.is_root for number in held[i.name].numbers]
    for position, number in enumerate(outputs):
        buffer = buffers[number]
        buffer.last = len(instructions)
        # An aliased output is in the buffer of a donated argument; a called computation's results are in the caller's buffers.
        if (position in aliased or not is_entry) and not buffer.array.is_argument:
            buffer.array = dataclasses.replace(buffer.array, num_bytes=0)
    return _without_reused(instructions, held, buffers)


def _results(
    place: int, instruction: Instruction, operands: Sequence[_Value], buffers: list[_Buffer], *, is_entry: bool
) -> Iterator[int]:
    """Yields the buffer index of each array in the result of instruction number `place`. Appends new buffers to `buffers`."""
    opcode = instruction.opcode
    flat = [number for operand in operands for number in operand.numbers]
    if opcode in _IN_PLACE and operands:
        yield from operands[0].numbers
    elif opcode == "tuple":
        yield from flat
    elif opcode == "get-tuple-element":
        shape, numbers = operands[0]
        found = re.search(r"\bindex=(\d+)", instruction.rest)
        sizes, index = [len(hlo_text.arrays(e)) for e in hlo_text.tuple_elements(shape)], int(found[1]) if found else 0
        begin = sum(sizes[:index])
        yield from numbers[begin : begin + sizes[index]]
    else:
        # Each result's index, and the operand that it aliases; operands are arrays.
        _, _, text = instruction.rest.partition("output_to_operand_aliasing=")
        aliased = {int(of or 0): int(operand) for of, operand in _ALIAS.findall(text.partition(")}")[0] + ")")}
        for position, leaf in enumerate(hlo_text.arrays(instruction.shape)):
            same = [number for number in flat if buffers[number].leaf == leaf]
            if position in aliased:
                yield operands[aliased[position]].numbers[0]
            elif opcode.endswith("-done") and same:  # the result of its start, not the start's operand
                yield max(same, key=lambda number: buffers[number].born)
            elif opcode.endswith("-start") and same and instruction.shape.startswith("("):  # repeats an operand
                flat.remove(same[0])
                yield same[0]
            else:
                buffers.append(_new_buffer(leaf, place, instruction, is_entry=is_entry))
                yield len(buffers) - 1


def _new_buffer(leaf: str, place: int, instruction: Instruction, *, is_entry: bool) -> _Buffer:
    is_argument = instruction.opcode == "parameter"
    here = instruction.opcode not in _HOLDS_NOTHING and hlo_text.is_in_main_memory(leaf)
    counts = here and (is_entry or not is_argument)
    shape = leaf.partition("{")[0]
    array = LiveArray(hlo_text.array_bytes(shape) if counts else 0, shape, instruction.made_by, is_argument)
    # The program's arguments stay allocated until it ends.
    last = _AT_THE_END if is_argument and is_entry else place
    return _Buffer(leaf, array, _BEFORE if is_argument else place, last)


def _without_reused(
    instructions: Sequence[Instruction], held: dict[str, _Value], buffers: list[_Buffer]
) -> list[_Buffer]:
    """Returns the buffers that remain if each result is written, where possible, into the buffer of one of its operands.

    An operand's buffer can take a result of the same type and shape if the operand isn't read later. `held` has the buffers of
    each value.
    """
    lies_in = list(range(len(buffers)))
    for place, instruction in enumerate(instructions):
        if instruction.opcode in _NEEDS_OWN or (
            instruction.opcode == "fusion" and "kind=kLoop" not in instruction.rest
        ):
            continue
        flat = [number for name in instruction.operands if name in held for number in held[name].numbers]
        free = dict.fromkeys(lies_in[number] for number in flat if buffers[lies_in[number]].last == place)
        for number in held[instruction.name].numbers:
            buffer = buffers[number]
            fitting = [n for n in free if n != number and buffers[n].key == buffer.key]
            # A buffer without bytes is already part of another one.
            if buffer.born == place and buffer.array.num_bytes and fitting:
                del free[fitting[0]]
                lies_in[number] = fitting[0]
                buffers[fitting[0]].last = buffer.last
    return [buffer for number, buffer in enumerate(buffers) if lies_in[number] == number]
