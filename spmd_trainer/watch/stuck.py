"""Beats (heartbeats), which say what each process of a run is doing, and so which process is behind if there is no progress.

All processes of a run take the same steps in the same order, and most of their work is collective. So when one process stops,
the others stop a little later, and wait for the process that has made the least progress.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence

from spmd_trainer.sharding.messages import format_duration, named_text
from spmd_trainer.storage import json_values

DEVICES = "waiting for the devices"
# The process's own batch is ready.
OTHERS_INPUT = "input of other processes"
# The process has come to a point where all processes wait for each other.
OTHERS = "waiting for other processes"
# Parts of the work in which a process doesn't depend on other processes.
_ALONE = frozenset({"input", "other", "compile"})
# Maximum number of processes, and of places, that a text names.
_NAMED = 8


@dataclasses.dataclass(frozen=True)
class Beat:
    """Heartbeat of a process, which says what the process is doing.

    Attributes:
      number: number of this beat. A process numbers its beats from 1; 0 if it has sent no beat yet.
      step: the last training step that the process has dispatched.
      finished: the last step whose scalars have arrived.
      activity: what the process is doing, e.g. 'training step 12'.
      part: the current part of the work (one of `callbacks.PARTS`), or what the process waits for (`DEVICES`, `OTHERS_INPUT` or
        `OTHERS`).
      seconds: seconds since `part` began.
      phase: a phase within the activity, e.g. 'evaluating heldout at step 20'; '' if there is none.
      batches: number of batches that are finished in this phase.
      window: JSON with the times of this process's last steps (see `StepParts.window`); None if there is none.
      stacks: the process's Python stacks if it is behind the others; otherwise ''.
    """

    process: int
    number: int
    step: int
    finished: int
    activity: str
    part: str
    seconds: float
    phase: str = ""
    batches: int = 0
    window: Mapping[str, object] | None = None
    stacks: str = ""

    @property
    def progress(self) -> tuple[object, ...]:
        """The fields that change when the process makes progress. If they are equal in two beats, there was no progress."""
        return (self.step, self.finished, self.activity, self.part, self.phase, self.batches)

    @property
    def where(self) -> str:
        """What the process is doing, as text, e.g. 'training step 12, input' or 'evaluation at step 20, other, 3 batches'."""
        parts = [self.activity]
        if self.part != self.activity:
            parts.append(self.part)
        if self.phase:
            parts.append(self.phase)
        if self.batches:
            parts.append(f"{self.batches} batch{'es' * (self.batches > 1)}")
        return ", ".join(parts)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Beat:
        """Parses the result of `to_json`.

        Raises:
          ValueError: the text is not a beat.
        """
        try:
            return cls(**json_values.parse_object(text))
        except (TypeError, ValueError) as error:
            raise ValueError(f"not a beat: {text:.100}") from error


def not_yet(process: int) -> Beat:
    """Returns the beat to assume for a process that has not sent one yet."""
    return Beat(process, 0, 0, 0, "before its first beat", "start", 0.0)


@dataclasses.dataclass(frozen=True)
class Seen:
    """What is known about a process from its beats.

    Attributes:
      beat: the process's last beat.
      still: seconds since the process's beats last showed progress.
      silent: seconds since the process's last beat arrived.
    """

    beat: Beat
    still: float
    silent: float


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Which processes are behind.

    Attributes:
      behind: indices of the processes that are behind, ascending; empty if none can be named.
      text: a clause that names these processes, and says what they and the other processes are doing.
    """

    behind: tuple[int, ...]
    text: str


def standing_still(seen: Sequence[Seen]) -> float:
    """Returns the number of seconds for which no process has made progress; 0 for no processes."""
    return min((one.still for one in seen), default=0.0)


def find(seen: Sequence[Seen], silent_after: float) -> Verdict:
    """Finds the processes that are behind. The first of these rules that is true for some, but not all processes decides:

    (1) The process's beats have stopped. This rule decides even if it is true for all processes. (2) The process has dispatched
    the fewest steps. (3) It has finished the fewest steps. (4) It hasn't reached the point at which others wait for all
    processes. (5) All processes have the same activity, and it has finished the fewest batches. (6) It does something that needs
    no other process, e.g. reads input. (7) More than half of all processes are doing the same thing, but this process isn't.

    Args:
      seen: all processes, as known from their beats.
      silent_after: seconds without a beat after which the beats of a process count as stopped.

    Returns:
      The verdict. For a single process, `text` says what it is doing, and `behind` is empty unless its beats have stopped.
    """
    rules: tuple[Callable[[Sequence[Seen]], Sequence[Seen]], ...] = (
        lambda all_: [one for one in all_ if one.silent > silent_after],
        lambda all_: _least(all_, lambda beat: beat.step),
        lambda all_: _least(all_, lambda beat: beat.finished),
        lambda all_: [one for one in all_ if one.beat.part != OTHERS],
        _fewest_batches,
        lambda all_: [one for one in all_ if one.beat.part in _ALONE],
        _minority,
    )
    for rule in rules:
        behind = rule(seen)
        if behind and (len(behind) < len(seen) or rule is rules[0]):
            return Verdict(tuple(sorted(one.beat.process for one in behind)), _named(seen, behind, silent_after))
    return Verdict((), _nobody(seen))


def _least(seen: Sequence[Seen], key: Callable[[Beat], int]) -> Sequence[Seen]:
    least = min((key(one.beat) for one in seen), default=0)
    return [one for one in seen if key(one.beat) == least]


def _fewest_batches(seen: Sequence[Seen]) -> Sequence[Seen]:
    if len({(one.beat.activity, one.beat.phase) for one in seen}) > 1:
        return []
    return _least(seen, lambda beat: beat.batches)


def _minority(seen: Sequence[Seen]) -> Sequence[Seen]:
    places = collections.Counter(one.beat.where for one in seen)
    most, count = places.most_common(1)[0] if places else ("", 0)
    return [one for one in seen if one.beat.where != most] if 2 * count > len(seen) else []


def _named(seen: Sequence[Seen], behind: Sequence[Seen], silent_after: float) -> str:
    """Returns e.g. 'behind: process 1 in training step 12, input, for 10m. Processes 0, 2 are in training step 13, step'."""
    listed = []
    for one in sorted(behind, key=lambda one: one.beat.process):
        name, where = f"process {one.beat.process}", one.beat.where
        if one.silent > silent_after:
            why = "it is stopped or lost, or its interpreter is held by C code"
            listed.append(f"{name}, whose last beat came {format_duration(one.silent)} ago from {where} ({why})")
        else:
            listed.append(f"{name} in {where}, for {format_duration(one.beat.seconds + one.silent)}")
    more = f", and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    text = f"behind: {'; '.join(listed[:_NAMED])}{more}"
    others = [one for one in seen if one not in behind]
    return f"{text}. {_places(others)}" if others else text


def _nobody(seen: Sequence[Seen]) -> str:
    if len(seen) == 1:
        (one,) = seen
        return f"{one.beat.where}, for {format_duration(one.beat.seconds)}"
    if seen and {(one.beat.activity, one.beat.part) for one in seen} == {(seen[0].beat.activity, DEVICES)}:
        return f"nobody is behind: all {len(seen)} processes wait for the devices in {seen[0].beat.activity}"
    return f"nobody is behind. {_places(seen)}"


def _places(seen: Sequence[Seen]) -> str:
    """Returns e.g. 'Process 0 is in training step 13, step; processes 2, 3 are in training step 14, step'."""
    places: dict[str, list[int]] = {}
    for one in sorted(seen, key=lambda one: one.beat.process):
        places.setdefault(one.beat.where, []).append(one.beat.process)
    listed = []
    for where, numbers in places.items():
        more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
        listed.append(
            f"{named_text(numbers[:_NAMED], 'process', 'processes')}{more} {'is' if len(numbers) == 1 else 'are'} in {where}"
        )
    more = f"; {len(listed) - _NAMED} more places" if len(listed) > _NAMED else ""
    text = "; ".join(listed[:_NAMED]) + more
    return text[:1].upper() + text[1:]
