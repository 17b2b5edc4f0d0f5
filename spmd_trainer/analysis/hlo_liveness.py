"""Which arrays of a compiled program are live at its peak, read from its text: XLA writes instructions in the order they run in.

An estimate: the text doesn't say where buffers lie. What is read into it is what XLA's buffer assignment does: loops and tuples
work in place, a result takes the place of an operand of its shape that no one reads afterwards, donated arguments hold the
outputs they alias. Padding of tiles and gaps between buffers aren't seen.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterator, Sequence

from spmd_trainer.analysis import hlo_collectives

_INSTRUCTION = re.compile(r"^  (ROOT )?%?([\w.-]+) = (.*)$")
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}")
_CALLED = re.compile(
    r"(?:body|to_apply|branch_computations|true_computation|false_computation)=\{?((?:%?[\w.-]+(?:, )?)+)"
)
# Another memory than the device's large one: a core's own, or the host's.
_ELSEWHERE = re.compile(r"S\([1-9]\d*\)")
# The arrays of a shape, each with its layout.
_LEAF = re.compile(r"\w+\[[\d,]*\](?:\{[^}]*\})?")
_IN_PLACE = frozenset({"bitcast", "optimization-barrier", "while", "add-dependency"})
_HOLDS_NOTHING = frozenset({"constant", "partition-id", "replica-id", "after-all", "create-token"})
# Of a shape with their operand and yet not written into its place: they read elements in another order than they write them.
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
# Positions before the first instruction and after the last.
_BEFORE, _AT_THE_END = -1, 2**62


@dataclasses.dataclass(frozen=True)
class LiveArray:
    """One array that is live at the peak.

    Attributes:
      num_bytes: of it, on one device.
      array: type and shape, as XLA writes them: 'bf16[32,1024,192]'.
      made_by: the operation of the model that makes it; empty where the compiler added it.
      is_argument: whether it is an argument of the program.
    """

    num_bytes: int
    array: str
    made_by: str
    is_argument: bool = False


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str
    is_root: bool

    @property
    def made_by(self) -> str:
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""


def live_at_peak(hlo: str) -> list[LiveArray]:
    """Returns the arrays of a compiled program (`jax.stages.Compiled.as_text()`) that are live at its peak, largest first.

    None of a program whose instructions aren't written in the order they run in.
    """
    bodies, entry = hlo_collectives.computations(hlo)
    header = hlo.partition("\n")[0]
    if entry is None or "is_scheduled=true" not in header:
        return []
    computations = {name: list(_instructions(body)) for name, body in bodies.items()}
    aliased = {int(output or 0) for output, _ in _ALIAS.findall(header.partition("input_output_alias=")[2])}
    return sorted(_Peaks(computations).of_entry(entry, aliased), key=lambda array: -array.num_bytes)


def _instructions(body: str) -> Iterator[_Instruction]:
    for line in body.splitlines():
        found = _INSTRUCTION.match(line)
        if not found:
            continue
        shape, rest = _split_shape(found[3])
        opcode, _, after = rest.partition("(")
        yield _Instruction(
            found[2], shape, opcode, tuple(re.findall(r"%([\w.-]+)", _arguments(after))), after, bool(found[1])
        )


def _split_shape(text: str) -> tuple[str, str]:
    """Splits '(f32[2], s32[]) while(...' behind the shape."""
    if not text.startswith("("):
        shape, _, rest = text.partition(" ")
        return shape, rest
    end = _closing(text, 0)
    return text[: end + 1], text[end + 2 :]


def _closing(text: str, begin: int) -> int:
    depth = 0
    for place in range(begin, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if not depth:
            return place
    return len(text) - 1


def _arguments(after: str) -> str:
    """What stands within an instruction's parentheses."""
    return after[: _closing("(" + after, 0) - 1]


@dataclasses.dataclass
class _Buffer:
    """What holds one array. `born` and `last`: positions of the instructions that make it and that are the last to read it."""

    leaf: str
    array: LiveArray
    born: int
    last: int

    @property
    def key(self) -> tuple[str, bool]:
        """What must be alike for one array to take another one's place."""
        return self.array.array, bool(_ELSEWHERE.search(self.leaf))


@dataclasses.dataclass(frozen=True)
class _Value:
    """A result: its shape, and the number of the buffer of each array in it."""

    shape: str
    numbers: list[int]


class _Peaks:
    """The arrays live at the peak of each computation, each worked out once."""

    def __init__(self, computations: dict[str, list[_Instruction]]):
        self._computations = computations
        self._known: dict[str, list[LiveArray]] = {}

    def of_entry(self, name: str, aliased_outputs: set[int]) -> list[LiveArray]:
        """Of the whole program; it holds its arguments from beginning to end."""
        return self._scan(self._computations[name], _buffers(self._computations[name], aliased_outputs, is_entry=True))

    def _of(self, name: str) -> list[LiveArray]:
        """Of a computation that another calls; the caller holds its arguments."""
        if name not in self._known:
            instructions = self._computations[name]
            self._known[name] = self._scan(instructions, _buffers(instructions, set(), is_entry=False))
        return self._known[name]

    def _scan(self, instructions: Sequence[_Instruction], buffers: Sequence[_Buffer]) -> list[LiveArray]:
        begins: dict[int, list[int]] = collections.defaultdict(list)
        ends: dict[int, list[int]] = collections.defaultdict(list)
        for number, buffer in enumerate(buffers):
            begins[buffer.born].append(number)
            ends[buffer.last].append(number)
        live = dict.fromkeys(begins[_BEFORE])
        size = sum(buffers[number].array.num_bytes for number in live)
        most, at_peak = -1, list[LiveArray]()
        for place, instruction in enumerate(instructions):
            live.update(dict.fromkeys(begins[place]))
            size += sum(buffers[number].array.num_bytes for number in begins[place])
            inner = max((self._of(name) for name in self._called(instruction)), key=_total, default=[])
            if size + _total(inner) > most:
                most = size + _total(inner)
                at_peak = [buffers[number].array for number in live] + inner
            for number in ends[place]:
                del live[number]
                size -= buffers[number].array.num_bytes
        return [array for array in at_peak if array.num_bytes]

    def _called(self, instruction: _Instruction) -> list[str]:
        if instruction.opcode not in ("while", "call", "conditional"):
            return []
        names = [name for group in _CALLED.findall(instruction.rest) for name in re.findall(r"[\w.-]+", group)]
        return [name for name in names if name in self._computations]


def _total(arrays: Sequence[LiveArray]) -> int:
    return sum(array.num_bytes for array in arrays)


def _buffers(instructions: Sequence[_Instruction], aliased_outputs: set[int], *, is_entry: bool) -> list[_Buffer]:
    """The buffers of one computation; a result that takes an operand's place lies in that one's."""
    buffers: list[_Buffer] = []
    held: dict[str, _Value] = {}
    for place, instruction in enumerate(instructions):
        operands = [held[name] for name in instruction.operands if name in held]
        numbers = list(_results(place, instruction, operands, buffers, is_entry=is_entry))
        # Of a tuple, only the element that is taken out of it is read.
        read = (
            numbers
            if instruction.opcode == "get-tuple-element"
            else [n for operand in operands for n in operand.numbers]
        )
        for number in read:
            buffers[number].last = max(buffers[number].last, place)
        held[instruction.name] = _Value(instruction.shape, numbers)
        for number in numbers:  # an array that the compiler moves belongs to the operation that it is moved for
            if instruction.made_by and not buffers[number].array.made_by:
                buffers[number].array = dataclasses.replace(buffers[number].array, made_by=instruction.made_by)
    outputs = [number for i in instructions if i.is_root for number in held[i.name].numbers]
    for position, number in enumerate(outputs):
        buffer = buffers[number]
        buffer.last = len(instructions)
        # Donated arguments hold the outputs that they alias; of what is called, the caller holds the results.
        if (position in aliased_outputs or not is_entry) and not buffer.array.is_argument:
            buffer.array = dataclasses.replace(buffer.array, num_bytes=0)
    return _without_reused(instructions, held, buffers)


def _results(
    place: int, instruction: _Instruction, operands: Sequence[_Value], buffers: list[_Buffer], *, is_entry: bool
) -> Iterator[int]:
    """Yields the buffer of each array of a result; those that the instruction makes are added to `buffers`."""
    opcode = instruction.opcode
    flat = [number for operand in operands for number in operand.numbers]
    if opcode in _IN_PLACE and operands:
        yield from operands[0].numbers
    elif opcode == "tuple":
        yield from flat
    elif opcode == "get-tuple-element":
        yield from _element(instruction, operands[0])
    else:
        aliased = _aliased_operands(instruction)
        for position, leaf in enumerate(_LEAF.findall(instruction.shape)):
            same = [number for number in flat if buffers[number].leaf == leaf]
            if position in aliased:
                yield operands[aliased[position]].numbers[0]
            elif opcode.endswith("-done") and same:  # what its start made, rather than what that was given
                yield max(same, key=lambda number: buffers[number].born)
            elif (
                opcode.endswith("-start") and same and instruction.shape.startswith("(")
            ):  # which names its operand again
                flat.remove(same[0])
                yield same[0]
            else:
                buffers.append(_new_buffer(leaf, place, instruction, is_entry=is_entry))
                yield len(buffers) - 1


def _aliased_operands(instruction: _Instruction) -> dict[int, int]:
    """Position of an array in the result -> number of the operand, an array, that it is the same as by the compiler's word."""
    _, _, text = instruction.rest.partition("output_to_operand_aliasing=")
    return {int(output or 0): int(operand) for output, operand in _ALIAS.findall(text.partition(")}")[0] + ")")}


def _new_buffer(leaf: str, place: int, instruction: _Instruction, *, is_entry: bool) -> _Buffer:
    is_argument = instruction.opcode == "parameter"
    here = instruction.opcode not in _HOLDS_NOTHING and not _ELSEWHERE.search(leaf)
    counts = here and (is_entry or not is_argument)
    shape = leaf.partition("{")[0]
    array = LiveArray(hlo_collectives.array_bytes(shape) if counts else 0, shape, instruction.made_by, is_argument)
    # The program's own arguments are held to its end.
    last = _AT_THE_END if is_argument and is_entry else place
    return _Buffer(leaf, array, _BEFORE if is_argument else place, last)


def _element(instruction: _Instruction, operand: _Value) -> Sequence[int]:
    """The buffers of one element of a tuple."""
    found = re.search(r"\bindex=(\d+)", instruction.rest)
    sizes = [len(_LEAF.findall(element)) for element in _tuple_elements(operand.shape)]
    index = int(found[1]) if found else 0
    begin = sum(sizes[:index])
    return operand.numbers[begin : begin + sizes[index]]


def _tuple_elements(shape: str) -> list[str]:
    """The elements of a tuple's shape, themselves tuples or arrays."""
    elements, depth, begin = [], 0, 1
    for place, character in enumerate(shape):
        depth += (character in "({[") - (character in ")}]")
        if (character == "," and depth == 1) or (depth == 0 and place):
            elements.append(shape[begin:place])
            begin = place + 1
    return elements


def _without_reused(
    instructions: Sequence[_Instruction], held: dict[str, _Value], buffers: list[_Buffer]
) -> list[_Buffer]:
    """Joins each result with an operand of the same array whose last reader makes it: it is written into that one's place."""
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
            # One without bytes of its own lies elsewhere already.
            if buffer.born == place and buffer.array.num_bytes and fitting:
                del free[fitting[0]]
                lies_in[number] = fitting[0]
                buffers[fitting[0]].last = buffer.last
    return [buffer for number, buffer in enumerate(buffers) if lies_in[number] == number]
