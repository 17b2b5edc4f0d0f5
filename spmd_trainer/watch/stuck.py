"""Beats, which say where a process of a run is; and who is behind the others when the run makes no progress.

All processes of a run take the same steps in the same order, and most of what they do needs all of them. So when one stops, the
others stop too, a little later: whoever has got the least far is the one that they wait for.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence

from spmd_trainer.sharding.messages import format_duration, named_text
from spmd_trainer.storage import json_values

DEVICES = "waiting for the devices"
# This process's batch is ready.
OTHERS_INPUT = "input of other processes"
# It has come to a point where all processes meet.
OTHERS = "waiting for other processes"
# Parts in which a process waits for nothing but itself.
_ALONE = frozenset({"input", "other", "compile"})
# Processes, and places, that a text names.
_NAMED = 8


@dataclasses.dataclass(frozen=True)
class Beat:
    """Where a process is.

    Attributes:
      number: counts the beats of this process, from 1; 0 stands for a process that has not beaten yet.
      step: the last training step that it has handed to its devices.
      finished: the last step whose scalars have arrived.
      activity: what it does, e.g. 'training step 12'.
      part: what its time counts as, one of `callbacks.PARTS`, or what it waits for: `DEVICES`, `OTHERS_INPUT`, `OTHERS`.
      seconds: how long that part has lasted.
      phase: what goes on within the activity, e.g. 'evaluating heldout at step 20'; empty for nothing of its own.
      batches: batches that the phase has finished.
      window: what another part of the trainer says of this process's last steps, or None; JSON.
      stacks: its Python stacks, if it is behind the others; else empty.
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
        """What changes when the process gets on; equal beats by this measure have no progress between them."""
        return (self.step, self.finished, self.activity, self.part, self.phase, self.batches)

    @property
    def where(self) -> str:
        """Where it is, e.g. 'training step 12, input' or 'evaluation at step 20, evaluating heldout at step 20, 3 batches'."""
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
    """A process as another one sees it.

    Attributes:
      still: seconds since something has changed in its beats.
      silent: seconds since its last beat came.
    """

    beat: Beat
    still: float
    silent: float


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Who is behind.

    Attributes:
      behind: their indices, ascending; empty if nobody can be named.
      text: a clause that names them and says where they and the others are.
    """

    behind: tuple[int, ...]
    text: str


def standing_still(seen: Sequence[Seen]) -> float:
    """Returns the seconds since any process has made progress; 0 for no processes."""
    return min((one.still for one in seen), default=0.0)


def find(seen: Sequence[Seen], silent_after: float) -> Verdict:
    """Says who is behind. The first of these rules that names some processes, but not all of them, decides.

    Behind are those whose beats have stopped; those that have dispatched the fewest steps; those that have finished the fewest;
    those that have not come where others wait for all; those with the fewest batches of the activity that all are in; those
    that do something alone, such as reading input, while others are where processes wait for each other; those that are
    elsewhere than more than half of all.

    Args:
      silent_after: a process that has not beaten for this many seconds has stopped, or its interpreter is held.

    Returns:
      The verdict. Of a single process it says where it is, and names it only if it is silent.
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
    """Returns 'process 1 is behind: training step 12, input, for 10m; processes 0, 2 are in training step 13'."""
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
    """Returns 'process 0 is in training step 13, step; processes 2, 3 are in training step 14, step'."""
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
