"""Parses the text of a compiled program: its computations, their instructions, array sizes and trip counts of loops.

The text is that of `jax.stages.Compiled.as_text()`. `executions` counts a loop's body once per iteration.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence

_BODY = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*?\{\n(.*?)^\}$", re.MULTILINE | re.DOTALL)
# Attributes of Pallas kernels contain line breaks.
_CONTINUED = re.compile(r"\n(?=[\"}][^\n])")
_INSTRUCTION = re.compile(r"^  (ROOT )?%?([\w.-]+) = (.*)$")
_CALLED = re.compile(r" (?:call|fusion|async-start)\(.*?(?:to_apply|calls)=%?([\w.-]+)")
# The last branch of a conditional is the one that a true predicate chooses.
_CHOSEN = re.compile(r" conditional\(.*?(?:branch_computations=\{(?:[^}]*, )?|true_computation=)%?([\w.-]+)")
_LOOP = re.compile(r" while\(.*body=%?([\w.-]+)")
_ITEM_BITS = re.compile(r"\d+")
# Each array in a shape, with its layout.
_LEAF = re.compile(r"\w+\[[\d,]*\](?:\{[^}]*\})?")
# In a layout, a memory space other than the device's main memory: a core's own memory, or the host's.
_ELSEWHERE = re.compile(r"S\([1-9]\d*\)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a computation.

    Attributes:
      name: the instruction's name, without '%'.
      shape: the result's shape in XLA's notation: an array such as 'f32[8,128]{1,0}', or a tuple in parentheses.
      opcode: e.g. 'fusion'.
      operands: names of the instructions that it reads.
      rest: the text after the opcode and its opening parenthesis: operands, attributes and metadata.
      is_root: True if the instruction's result is the computation's result.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str
    is_root: bool

    @property
    def made_by(self) -> str:
        """Name of the model's operation (XLA's `op_name`); '' if the compiler added the instruction."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""

    @property
    def called(self) -> str | None:
        """Name of the computation that a fusion, call or reduction runs; None for other instructions."""
        found = re.search(r"(?:calls|to_apply)=%?([\w.-]+)", self.rest)
        return found[1] if found else None


@dataclasses.dataclass(frozen=True)
class Execution:
    """How often a computation runs.

    Attributes:
      name: the computation's name.
      times: number of times that the computation runs in one run of the program.
      in_fusion: True if the computation is inside a fusion. A fusion runs as one kernel.
    """

    name: str
    times: int
    in_fusion: bool


def computations(hlo: str) -> tuple[dict[str, str], str | None]:
    """Returns {computation's name: its instructions as text}, and the name of the entry computation or None."""
    found = _BODY.findall(_CONTINUED.sub(" ", hlo))
    entry = next((name for is_entry, name, _ in found if is_entry), None)
    return {name: body for _, name, body in found}, entry


def instructions(body: str) -> Iterator[Instruction]:
    """Yields the instructions of one computation, in execution order if the program is scheduled."""
    for line in body.splitlines():
        found = _INSTRUCTION.match(line)
        if not found:
            continue
        shape, _, rest = found[3].partition(" ")
        if shape.startswith("("):
            end = _closing(found[3], 0)
            shape, rest = found[3][: end + 1], found[3][end + 2 :]
        opcode, _, after = rest.partition("(")
        arguments = after[: _closing("(" + after, 0) - 1]
        operands = tuple(re.findall(r"%([\w.-]+)", arguments))
        yield Instruction(found[2], shape, opcode, operands, after, bool(found[1]))


def executions(bodies: Mapping[str, str], entry: str | None) -> Iterator[Execution]:
    """Yields the entry computation and every computation that it runs, directly or indirectly.

    A loop's body counts once per iteration. A conditional is assumed to run its last branch. A computation with several callers
    is yielded once for each caller. `bodies` and `entry`: the result of `computations`.
    """
    pending = [Execution(entry, 1, False)] if entry else []
    while pending:
        current = pending.pop()
        yield current
        for line in bodies.get(current.name, "").splitlines():
            loop = _LOOP.search(line)
            if loop:
                times = current.times * trip_count(line, bodies)
                pending.append(Execution(loop[1], times, current.in_fusion))
            in_fusion = current.in_fusion or " fusion(" in line
            called = _CALLED.findall(line) + _CHOSEN.findall(line)
            pending += [Execution(name, current.times, in_fusion) for name in called]


def trip_count(line: str, bodies: Mapping[str, str]) -> int:
    """Returns a loop's trip count, from XLA's annotation or from the constant in the loop's condition; 1 if it has neither.

    `line`: the line of the program's text that has the loop's instruction.
    """
    noted = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
    if noted:
        return int(noted[1])
    condition, body = (re.search(rf"\b{name}=%?([\w.-]+)", line) for name in ("condition", "body"))
    test = bodies.get(condition[1], "") if condition else ""
    bounds = re.findall(r" constant\((\d+)\)", test)
    if len(bounds) != 1 or "direction=LT" not in test:
        return 1
    counter = re.search(r" get-tuple-element\(.*index=(\d+)", test)
    step = _step(bodies.get(body[1], ""), int(counter[1])) if body and counter else 1
    return -(-int(bounds[0]) // step)


def _step(body: str, index: int) -> int:
    """Returns the constant that a loop's body adds to element `index` of the loop's tuple; 1 if the body does something else."""
    inside = {instruction.name: instruction for instruction in instructions(body)}
    root = next((i for i in inside.values() if i.is_root and index < len(i.operands)), None)
    added = inside.get(root.operands[index]) if root else None
    if added is None or added.opcode != "add":
        return 1
    constants = [inside[name].rest for name in added.operands if name in inside and inside[name].opcode == "constant"]
    found = re.match(r"(\d+)\)", constants[0]) if constants else None
    return max(1, int(found[1])) if found else 1


def arrays(shape: str) -> list[str]:
    """Returns the arrays of a shape, with their layouts: ['f32[8,128]{1,0}', ...]."""
    return _LEAF.findall(shape)


def dimensions(array: str) -> tuple[int, ...]:
    """Returns the dimensions of an array in XLA's notation, e.g. (8, 128) for 'f32[8,128]{1,0}'."""
    found = re.search(r"\[([\d,]*)\]", array)
    return tuple(int(n) for n in found[1].split(",") if n) if found else ()


def array_bytes(result: str) -> int:
    """Returns the bytes of an array or a tuple of arrays in XLA's notation, e.g. 'f32[8,128]{1,0}'."""
    found = re.findall(r"\b(\w+)\[([\d,]*)\]", result)
    num_bytes = 0
    for kind, sizes in found:
        # XLA packs small elements, such as s4; pred has no number.
        bits = _ITEM_BITS.search(kind)
        num_bytes += -(-(int(bits[0]) if bits else 8) * math.prod(int(n) for n in sizes.split(",") if n) // 8)
    return num_bytes


def is_in_main_memory(array: str) -> bool:
    """Returns True if an array, written with its layout, lies in the device's main memory."""
    return not _ELSEWHERE.search(array)


def tuple_elements(shape: str) -> Sequence[str]:
    """Returns the elements of a tuple's shape, which are tuples or arrays."""
    elements, depth, begin = [], 0, 1
    for place, character in enumerate(shape):
        depth += (character in "({[") - (character in ")}]")
        if (character == "," and depth == 1) or (depth == 0 and place):
            elements.append(shape[begin:place])
            begin = place + 1
    return elements


def _closing(text: str, begin: int) -> int:
    depth = 0
    for place in range(begin, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if not depth:
            return place
    return len(text) - 1
