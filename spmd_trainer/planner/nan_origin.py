"""Finds where a NaN or infinity came from: follows it back through the program to the operations that produced it.

Other NaNs and infinities are ignored, e.g. a NaN that `jnp.where` drops, or an infinity in a mask.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

from spmd_trainer.planner.value_flags import FINITE, INFINITE, ITERATION, LITERAL, NAN, Frame, Operation

# Where a frame is: (index of the operation, iteration) of each loop around it. The program itself is at ().
Place: TypeAlias = tuple[tuple[int, int], ...]
# jvp(x), transpose(jvp(x)), vmap(x): what JAX writes around a name.
_TRANSFORMED = re.compile(r"^\w+\((.*)\)$")
_NO_LAYER = frozenset({"", "rematted_computation", "checkpoint", "remat", "while", "body", "cond", "scan"})
_BACKWARD = "transpose("


class Value(NamedTuple):
    """Identifies a value in one execution of a program: `place` identifies the value's frame, `number` is its id in the frame."""

    place: Place
    number: int


@dataclasses.dataclass(frozen=True)
class Found:
    """An operation of the program, or one of its arguments or constants, with a value that is not finite.

    Attributes:
      operation: the operation; None for an argument or a constant of the program.
      argument: the argument's position; None for an operation or a constant.
      layer: the operation's layer, with the iterations of loops, e.g. 'lm/transformer/repeat[1]/sub/ff_layer'; may be ''.
      backward: True if the operation belongs to the backward pass. False if it is only recomputed there.
      recomputed: True if the backward pass recomputes the operation (rematerialization).
      flag: `INFINITE` or `NAN`.
      from_infinity: True if the operation turned an infinity into a NaN.
      order: sort key by time of execution.
      index: position among the program's operations; for an operation inside a loop, the loop's position; -1 for an argument
        or a constant.
    """

    operation: Operation | None
    argument: int | None
    layer: str
    backward: bool
    recomputed: bool
    flag: int
    from_infinity: bool
    order: tuple[int, ...]
    index: int


class Flags:
    """A flag (`FINITE`, `INFINITE` or `NAN`) for each value in one execution of a program. `frame` and `flags` (as numpy arrays)
    come from `run_with_flags`.
    """

    def __init__(self, frame: Frame, flags: Any):
        self.frame = frame
        self._flags = flags

    def flag(self, value: Value) -> int:
        """Returns the flag of a value; `FINITE` for integers."""
        frame, flags, iterations = self.frame, self._flags, []
        for index, iteration in value.place:
            operation = frame.operations[index]
            frame, flags = _body(operation), flags["bodies"][str(index)]
            iterations += [iteration] if operation.length else []
        position = frame.flagged.get(value.number)
        return FINITE if position is None else int(flags["own"][(*iterations, position)])

    def causes(self, starts: Iterable[Value]) -> tuple[list[Found], list[Found]]:
        """Traces non-finite values back to their origins. `starts`: the values to trace; finite values are skipped.

        Returns:
          Two lists in execution order: the origins, and all operations, arguments and constants through which the NaNs and
          infinities passed, origins included. A NaN that came from an infinity has two origins: where the infinity began, and
          where it became a NaN.
        """
        begun, passed = list[Found](), list[Found]()
        waiting = [value for value in starts if self.flag(value) != FINITE]
        seen = set(waiting)
        while waiting:
            value = waiting.pop()
            flag, sources = self.flag(value), list(self._sources(value))
            flags = [self.flag(source) for source in sources]
            worst = max(flags, default=FINITE)
            wanted = [s for s, f in zip(sources, flags, strict=True) if f == worst and f != FINITE]
            found = self._describe(value, flag, from_infinity=flag == NAN and worst == INFINITE)
            if found is not None:
                passed.append(found)
                if worst < flag:
                    begun.append(found)
            for source in wanted:
                if source not in seen:
                    seen.add(source)
                    waiting.append(source)
        return sorted(begun, key=lambda f: f.order), sorted(passed, key=lambda f: f.order)

    def _frame(self, place: Place) -> Frame:
        frame = self.frame
        for index, _ in place:
            frame = _body(frame.operations[index])
        return frame

    def _sources(self, value: Value) -> Iterator[Value]:
        frame = self._frame(value.place)
        if value.number in frame.producers:
            index, position = frame.producers[value.number]
            operation = frame.operations[index]
            if operation.body is not None:
                sources: Iterable[Value] = self._of_result(value.place, index, operation, position)
            else:
                sources = [Value(value.place, number) for number in operation.inputs]
        elif value.place and value.number in frame.arguments:
            sources = [self._of_argument(value.place, frame.arguments.index(value.number))]
        else:
            sources = []
        return (source for source in sources if source.number != LITERAL)

    def _of_result(self, place: Place, index: int, operation: Operation, position: int) -> Iterator[Value]:
        """Yields the value in a loop's body that became result number `position` of the loop.

        A stacked result has a value per iteration: yields the first one with the worst flag. NaN is worse than infinity.
        """
        number = _body(operation).results[position]
        iterations = _in_order(operation)
        if operation.length and position < operation.num_carry:
            iterations = iterations[-1:]
        values = [Value((*place, (index, iteration)), number) for iteration in iterations]
        if number != LITERAL and values:
            yield max(values, key=self.flag)  # the first of the largest

    def _of_argument(self, place: Place, position: int) -> Value:
        """Returns the source of a loop body's argument: a result of the previous iteration, or a value outside of the loop."""
        *outer, (index, iteration) = place
        operation = self._frame(tuple(outer)).operations[index]
        carried = position - operation.num_consts
        iterations = _in_order(operation)
        if operation.length and 0 <= carried < operation.num_carry and iteration != iterations[0]:
            before = iterations[list(iterations).index(iteration) - 1]
            return Value((*outer, (index, before)), _body(operation).results[carried])
        return Value(tuple(outer), operation.inputs[position])

    def _describe(self, value: Value, flag: int, *, from_infinity: bool) -> Found | None:
        """Returns the operation, argument or constant that produced a value; None for operations that only pass a value on."""
        frame = self._frame(value.place)
        if value.number not in frame.producers:
            if value.number not in frame.arguments:
                return Found(None, None, "", False, False, flag, from_infinity, (-1, len(frame.arguments)), -1)
            if value.place:
                return None
            position = frame.arguments.index(value.number)
            return Found(None, position, "", False, False, flag, from_infinity, (-1, position), -1)
        index, _ = frame.producers[value.number]
        operation = frame.operations[index]
        if operation.body is not None:
            return None
        backward = any(_BACKWARD in part for part in operation.scope)
        loops = [self._frame(value.place[:n]).operations[at] for n, (at, _) in enumerate(value.place)]
        iterations = [at for loop, (_, at) in zip(loops, value.place, strict=True) if loop.length]
        layer = layer_of(operation.scope, iterations)
        recomputed = backward and "rematted_computation" in operation.scope
        order = (*self._order(value.place), index)
        top = value.place[0][0] if value.place else index
        return Found(operation, None, layer, backward and not recomputed, recomputed, flag, from_infinity, order, top)

    def _order(self, place: Place) -> Iterator[int]:
        for depth, (index, iteration) in enumerate(place):
            yield index
            yield list(_in_order(self._frame(place[:depth]).operations[index])).index(iteration)


def layer_of(scope: Iterable[str], iterations: Iterable[int] = ()) -> str:
    """Returns the layer in a name stack, e.g. 'lm/transformer/repeat[1]/sub/x_layers_0/ff_layer'.

    Args:
      scope: the components of the name stack.
      iterations: the iteration of each loop around the operation, outermost first.
    """
    numbers, names = iter(iterations), list[str]()
    for component in scope:
        if component == ITERATION:
            number = next(numbers, None)
            suffix = "[*]" if number is None else f"[{number}]"
            names[-1:] = [names[-1] + suffix] if names else [f"loop{suffix}"]
            continue
        while match := _TRANSFORMED.match(component):
            component = match[1]
        name = component.partition(".")[0]  # praxis' layers and Flax's modules write 'layer.method'
        if component in _NO_LAYER or "->" in component or "(" in component or not name:
            continue
        if not names or names[-1].partition("[")[0] != name:
            names.append(name)
    return "/".join(names)


def _in_order(operation: Operation) -> range:
    iterations = range(max(1, operation.length))
    return iterations[::-1] if operation.reverse else iterations


def _body(operation: Operation) -> Frame:
    assert operation.body is not None, operation.primitive
    return operation.body
