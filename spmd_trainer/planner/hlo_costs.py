"""FLOPs and bytes of each instruction of a compiled program, on one device.

FLOPs count dots, convolutions and kernels with matrix products (cuBLAS, cuDNN, Pallas). Additions and other element-wise
operations are counted separately. Bytes count reads and writes of main memory; a slice, an update or a gather counts only the
part of the array that it touches. An instruction in a loop counts once per iteration.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence

from spmd_trainer.planner import hlo_kernels, hlo_text
from spmd_trainer.planner.hlo_text import Instruction

# Instructions that move no data themselves.
_FREE = frozenset(
    {
        "add-dependency",
        "after-all",
        "bitcast",
        "call",
        "conditional",
        "constant",
        "domain",
        "get-tuple-element",
        "iota",
        "opt-barrier",
        "optimization-barrier",
        "parameter",
        "partition-id",
        "replica-id",
        "tuple",
        "while",
    }
)
# `links.py` estimates their time.
_COMMUNICATION = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast|send|recv|async)"
    r"(-start|-update|-done)?$"
)
# Operations per element of the result; for a reduction, per element of the operand.
_VECTOR = re.compile(
    r"abs|add|and|atan2|ceil|clamp|compare|convert|cosine|divide|erf|exponential(-minus-one)?|floor|is-finite|log(-plus-one)?|"
    r"logistic|maximum|minimum|multiply|negate|not|or|power|reduce|remainder|round-nearest-(afz|even)|rsqrt|select|"
    r"shift-(left|right-(arithmetic|logical))|sign|sine|sqrt|subtract|tan|tanh|xor"
)
_PARTS = frozenset({"dynamic-slice", "slice", "gather"})
_VIEWS = frozenset({"bitcast", "reshape", "get-tuple-element", "copy-done"})


@dataclasses.dataclass(frozen=True)
class InstructionCost:
    """Cost of one instruction on one device.

    Attributes:
      times: number of executions of the instruction in one run of the program.
      flops: FLOPs of the matrix products of one execution.
      num_bytes: bytes that one execution reads and writes in main memory.
      overlaps: True for asynchronous copies, which run while other instructions compute.
      float32_flops: FLOPs of only those matrix products that have float32 operands; included in `flops`.
      vector_ops: number of element-wise operations and reductions of one execution.
      attention: the work of an attention kernel; None for other instructions.
    """

    instruction: Instruction
    times: int
    flops: float
    num_bytes: int
    overlaps: bool
    float32_flops: float
    vector_ops: float
    attention: hlo_kernels.Attention | None


def instruction_costs(hlo: str) -> list[InstructionCost]:
    """Returns the cost of each instruction of a compiled program (`jax.stages.Compiled.as_text()`).

    Leaves out instructions with neither FLOPs nor bytes. A fusion counts as one instruction.
    """
    bodies, entry = hlo_text.computations(hlo)
    program = _Program({name: list(hlo_text.instructions(body)) for name, body in bodies.items()})
    costs = []
    for execution in hlo_text.executions(bodies, entry):
        if execution.in_fusion:
            continue  # counted with the fusion
        for instruction in program.computations.get(execution.name, []):
            cost = program.cost(instruction, execution.name, execution.times)
            if cost.flops or cost.num_bytes:
                costs.append(cost)
    return costs


class _Program:
    def __init__(self, computations: Mapping[str, Sequence[Instruction]]):
        self.computations = computations

    @functools.cache  # noqa: B019  # the object lives as long as one analysis
    def _by_name(self, computation: str) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self.computations[computation]}

    @functools.cache  # noqa: B019
    def _users(self, computation: str) -> dict[str, list[Instruction]]:
        users: dict[str, list[Instruction]] = {}
        for instruction in self.computations[computation]:
            for operand in dict.fromkeys(instruction.operands):
                users.setdefault(operand, []).append(instruction)
        return users

    def _shapes(self, instruction: Instruction, computation: str) -> list[str]:
        known = self._by_name(computation)
        return [known[name].shape for name in instruction.operands if name in known]

    def cost(self, instruction: Instruction, computation: str, times: int) -> InstructionCost:
        attention = None
        if instruction.opcode == "custom-call":
            attention = hlo_kernels.attention(instruction, self._shapes(instruction, computation))
        return InstructionCost(
            instruction,
            times,
            self.flops(instruction, computation),
            self.num_bytes(instruction, computation),
            overlaps=instruction.opcode in ("copy-start", "slice-start"),
            float32_flops=self.flops(instruction, computation, of_float32=True),
            vector_ops=attention.vector_ops if attention else self.vector_ops(instruction, computation),
            attention=attention,
        )

    def vector_ops(self, instruction: Instruction, computation: str) -> float:
        if instruction.opcode == "fusion":
            inner = instruction.called
            return sum(self.vector_ops(i, inner) for i in self.computations.get(inner, ())) if inner else 0.0
        if not _VECTOR.fullmatch(instruction.opcode):
            return 0.0
        shape = instruction.shape
        if instruction.opcode == "reduce":
            shape = next(iter(self._shapes(instruction, computation)), shape)
        return float(math.prod(hlo_text.dimensions(shape)))

    def flops(self, instruction: Instruction, computation: str, *, of_float32: bool = False) -> float:
        """Returns the FLOPs of the instruction's matrix products; if `of_float32`, only of products with float32 operands."""
        if instruction.opcode == "fusion":
            inner = instruction.called
            within = self.computations.get(inner, ()) if inner else ()
            return sum(self.flops(i, inner or "", of_float32=of_float32) for i in within)
        if of_float32 and not all(s.startswith("f32") for s in self._shapes(instruction, computation)[:2]):
            return 0.0
        if instruction.opcode == "dot":
            found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.rest)
            left = hlo_text.dimensions(self._shapes(instruction, computation)[0])
            contracted = math.prod(left[int(n)] for n in found[1].split(",") if n) if found else 1
            return 2.0 * math.prod(hlo_text.dimensions(instruction.shape)) * contracted
        if instruction.opcode == "convolution":
            image, kernel = self._shapes(instruction, computation)[:2]
            return hlo_kernels.convolution_flops(instruction, image, kernel, instruction.shape)
        if instruction.opcode == "custom-call":
            return hlo_kernels.flops(instruction, self._shapes(instruction, computation))
        return 0.0

    def num_bytes(self, instruction: Instruction, computation: str) -> int:
        opcode = instruction.opcode
        if opcode in _FREE or _COMMUNICATION.match(opcode) or opcode.endswith("-done"):
            return 0
        if opcode == "custom-call" and hlo_kernels.moves_nothing(instruction):
            return 0
        shapes = self._shapes(instruction, computation)
        if opcode == "fusion" and instruction.called in self.computations:
            return self._fusion_bytes(instruction, shapes)
        if opcode == "copy-start":  # (destination, source, ...)
            return sum(_main_memory(array) for array in hlo_text.tuple_elements(instruction.shape)[:2])
        if opcode == "slice-start":  # ((operand), result, ...)
            result = hlo_text.tuple_elements(instruction.shape)[1]
            return _main_memory(result) + _as_large_as(result, shapes[:1])
        if opcode in _PARTS:
            return _main_memory(instruction.shape) + _as_large_as(instruction.shape, shapes[:1])
        if opcode == "dynamic-update-slice":
            return _main_memory(shapes[1]) + _as_large_as(shapes[1], [instruction.shape])
        if opcode == "scatter":  # reads and writes the rows that the updates touch
            updates = shapes[len(shapes) // 2 + 1 :]
            return sum(3 * _main_memory(shape) for shape in updates)
        share = hlo_kernels.share_of_rows(instruction, shapes) if opcode == "custom-call" else 1.0
        arrays = [array for shape in (instruction.shape, *shapes) for array in hlo_text.arrays(shape)]
        return sum(int((share if len(hlo_text.dimensions(a)) == 2 else 1.0) * _main_memory(a)) for a in arrays)

    def _fusion_bytes(self, fusion: Instruction, shapes: Sequence[str]) -> int:
        inner = fusion.called or ""
        parameters = self._parameters(inner)
        read = sum(
            min(_main_memory(shape), self._read_of(parameters[number], inner))
            for number, shape in enumerate(shapes[: len(parameters)])
        )
        root, known = self._root(inner), self._by_name(inner)
        roots = [known[name] for name in root.operands] if root.opcode == "tuple" else [root]
        results = hlo_text.tuple_elements(fusion.shape) if fusion.shape.startswith("(") else [fusion.shape]
        written = sum(
            min(_main_memory(shape), self._written_by(result, inner))
            for result, shape in zip(roots, results, strict=False)
        )
        return read + written

    def _parameters(self, computation: str) -> dict[int, Instruction]:
        found = [i for i in self.computations[computation] if i.opcode == "parameter"]
        return {int(i.rest.partition(")")[0]): i for i in found}

    def _root(self, computation: str) -> Instruction:
        return next(i for i in self.computations[computation] if i.is_root)

    def _read_of(self, value: Instruction, computation: str) -> int:
        whole, read = hlo_text.array_bytes(value.shape), 0
        for user in self._users(computation).get(value.name, []):
            if user.opcode in _VIEWS:
                read += self._read_of(user, computation)
            elif user.opcode in _PARTS and user.operands[0] == value.name:
                read += hlo_text.array_bytes(user.shape)
            elif user.opcode == "fusion" and user.called in self.computations:
                parameters = self._parameters(user.called or "")
                numbers = [n for n, name in enumerate(user.operands) if name == value.name and n in parameters]
                read += sum(self._read_of(parameters[n], user.called or "") for n in numbers)
            elif user.opcode == "tuple" or _COMMUNICATION.match(user.opcode):
                continue
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == value.name:
                continue  # overwritten in place; the update counts as written
            elif user.opcode == "custom-call" and hlo_kernels.moves_nothing(user):
                continue
            else:
                return whole
        return min(whole, read)

    def _written_by(self, result: Instruction, computation: str) -> int:
        known = self._by_name(computation)
        while result.opcode in _VIEWS and result.operands[0] in known:
            result = known[result.operands[0]]
        if result.opcode == "dynamic-update-slice":
            return hlo_text.array_bytes(known[result.operands[1]].shape)
        if result.opcode == "parameter" or _COMMUNICATION.match(result.opcode):
            return 0
        if result.opcode == "fusion" and result.called in self.computations:
            return self._written_by(self._root(result.called or ""), result.called or "")
        return hlo_text.array_bytes(result.shape)


def _main_memory(shape: str) -> int:
    return sum(hlo_text.array_bytes(array) for array in hlo_text.arrays(shape) if hlo_text.is_in_main_memory(array))


def _as_large_as(part: str, shapes: Sequence[str]) -> int:
    """Returns the bytes of a slice (shape `part`) of an array (shape `shapes[0]`) if the array is in main memory; else 0."""
    return hlo_text.array_bytes(part) if any(_main_memory(shape) for shape in shapes) else 0
