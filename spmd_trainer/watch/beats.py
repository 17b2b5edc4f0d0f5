"""A beat: where a process of a run is at this moment."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

DEVICES = "waiting for the devices"
# This process's batch is ready.
OTHERS_INPUT = "input of other processes"


@dataclasses.dataclass(frozen=True)
class Beat:
    """Where a process is.

    Attributes:
      process: its index.
      number: counts the beats of this process, from 1; 0 stands for a process that has not beaten yet.
      step: the last training step that it has handed to its devices.
      finished: the last step whose scalars have arrived.
      activity: what it does, e.g. 'training step 12'.
      part: what its time counts as, one of `metrics.run_times.PARTS`, or what it waits for: `DEVICES`, `OTHERS_INPUT`.
      seconds: how long that part has lasted.
      phase: what goes on within the activity, e.g. 'evaluating heldout at step 20'; empty for nothing of its own.
      batches: batches that the phase has finished.
      input_seconds: how long the process has waited for input since the run began.
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
    input_seconds: float = 0.0
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
        """Returns it as one line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Beat:
        """Reads what `to_json` wrote.

        Raises:
          ValueError: the text is no beat.
        """
        try:
            return cls(**json.loads(text))
        except TypeError as error:
            raise ValueError(f"not a beat: {text:.100}") from error


def not_yet(process: int) -> Beat:
    """Returns what stands for a process that has not beaten yet."""
    return Beat(process, 0, 0, 0, "before its first beat", "start", 0.0)
