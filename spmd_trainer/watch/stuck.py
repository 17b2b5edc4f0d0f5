"""Beats (heartbeats), which say where a process of a run is, and which process is behind when the run makes no progress.

All processes of a run take the same steps in the same order, and most of their work needs all of them. So when one process stops,
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
    """Heartbeat of a process: where it is in the run.

    Attributes:
      number: number of the beat among the beats of this process, from 1; 0 for a process that has sent no beat yet.
      step: the last training step that the process has dispatched.
      finished: the last step whose scalars have arrived.
      activity: the current activity, e.g. 'training step 12'.
      part: the current part of the work, one of `callbacks.PARTS`, or the reason for waiting: `DEVICES`, `OTHERS_INPUT`,
        `OTHERS`.
      seconds: seconds since `part` began.
      phase: a phase within the activity, e.g. 'evaluating heldout at step 20'; '' if there is none.
      batches: number of batches that the phase has finished.
      window: JSON with the times of this process's last steps, see `StepParts.window`; or None.
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
        """The fields that change when the process makes progress. Two beats with equal fields mean no progress in between."""
        return (self.step, self.finished, self.activity, self.part, self.phase, self.batches)

    @property
    def where(self) -> str:
        """Where the process is, as text, e.g. 'training step 12, input' or 'evaluation at step 20, other, 3 batches'."""
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
        """Reads what `to_json` wrote.

        Raises:
          ValueError: the text is no beat.
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
    """A process as another process knows it from its beats.

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
      text: a clause that names these processes, and says where they and the other processes are.
    """

    behind: tuple[int, ...]
    text: str


def standing_still(seen: Sequence[Seen]) -> float:
    """Returns the seconds since the last progress of any process; 0 for no processes."""
    return min((one.still for one in seen), default=0.0)


def find(seen: Sequence[Seen], silent_after: float) -> Verdict:
    """Finds the processes that are behind, by rules. The first rule that is true for some, but not for all processes decides.

    The rules, in order: the process's beats have stopped (this rule decides even if it is true for all processes); the process
    has dispatched the fewest steps; it has finished the fewest steps; it has not reached the point where others wait for all
    processes; it has finished the fewest batches of an activity that all processes share; it does something alone, such as
    reading input, while others wait; it is elsewhere than more than half of all processes, which are at the same place.

    Args:
      seen: all processes, as known from their beats.
      silent_after: seconds without a beat after which a process counts as stopped, or its interpreter as held by C code.

    Returns:
      The verdict. For a single process, `text` says where the process is, and `behind` is empty unless the beats have stopped.
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
