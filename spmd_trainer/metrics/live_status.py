"""What a run does at this moment, for a display that looks at it when it likes.

The run only stores what it has anyway; a display such as `cli/live_line.py` reads it on a thread of its own. Without a display
nobody reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:  # takes a tenth of a second, and is needed only where there is a terminal
    from rich.console import RenderableType

# `logging.info(..., extra=SHOWN_LIVE)`: a line that the display shows in its own way. Files and other terminals get the line.
SHOWN_LIVE: Final = {"spmd_trainer_shown_live": True}
# For a signal handler's message while a display is on: it must take no lock, so it can't print above.
ERASE_ROW: Final = "\r\x1b[J"


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory of a process's devices, in bytes: that of the fullest one.

    Attributes:
      in_use: what is allocated now.
      peak: the most that was allocated at once.
      limit: what can be allocated; None if the backend doesn't say.
    """

    in_use: int
    peak: int
    limit: int | None


@dataclasses.dataclass(frozen=True)
class TrainingStatus:
    """A moment of training.

    Attributes:
      step: the last step whose scalars have arrived.
      num_steps: training is complete at this step.
      loss: that step's loss; None before the first step.
      seconds_per_step: mean over the last steps; None until it is known.
      items_per_step: tokens (or examples) in a global batch.
      unit: name of an item.
      mfu: the model FLOPs utilization, from 0 to 1; None if it is unknown.
      memory: of this process's devices; None if the backend doesn't say.
      due: the step of the next 'save', 'eval' and 'decode', as far as there are any.
      activity: what the run does instead of training, e.g. 'saving step 12'; empty while it trains.
    """

    step: int
    num_steps: int
    loss: float | None = None
    seconds_per_step: float | None = None
    items_per_step: int = 0
    unit: str = "examples"
    mfu: float | None = None
    memory: Memory | None = None
    due: Mapping[str, int] = dataclasses.field(default_factory=dict)
    activity: str = ""


@dataclasses.dataclass(frozen=True)
class PhaseStatus:
    """A moment of a phase, such as compiling or evaluating.

    Attributes:
      what: what is being done.
      seconds: how long it has lasted.
      batches: finished batches; None if it has none.
      total: number of batches; None if it is unknown.
    """

    what: str
    seconds: float
    batches: int | None = None
    total: int | None = None


class ShownPhase(Protocol):
    """A phase that can be shown."""

    def status(self) -> PhaseStatus | None:
        """Returns this moment of the phase, or None while a phase inside it is shown instead. Called by any thread."""


class Display(Protocol):
    """Shows the status on a terminal."""

    def print(self, content: RenderableType) -> None:
        """Prints something above what is shown live. Text that is too long for a row is not broken, but left to the terminal."""


class LiveStatus:
    """What goes on in this process.

    Attributes:
      training: returns the moment of the training run; None if there is none. Called by any thread.
      display: shows this status now; None if nothing does.
    """

    def __init__(self) -> None:
        self.training: Callable[[], TrainingStatus | None] | None = None
        self.display: Display | None = None
        self._phases: dict[int, ShownPhase] = {}

    def begin(self, phase: ShownPhase) -> None:
        """Notes that a phase has begun."""
        self._phases[id(phase)] = phase

    def end(self, phase: ShownPhase) -> None:
        """Notes that a phase has ended."""
        self._phases.pop(id(phase), None)

    def phases(self) -> Iterator[PhaseStatus]:
        """Yields the phases that go on, the first to begin first."""
        for phase in tuple(self._phases.values()):
            status = phase.status()
            if status is not None:
                yield status


live = LiveStatus()
