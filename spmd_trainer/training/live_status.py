"""The current status of a run, for displays that poll it.

The run computes nothing for a display: it stores values that it has anyway. A display, e.g. `cli/live_line.py`, reads these
values in another thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:  # takes a tenth of a second, and only terminals need it
    from rich.console import RenderableType

# `logging.info(..., extra=SHOWN_LIVE)`: the display formats this line itself; files and other terminals get it as is.
SHOWN_LIVE: Final = {"spmd_trainer_shown_live": True}
# Erases the live line, before a signal handler's message. The handler must not take a lock, so it can't use `Display.print`.
ERASE_ROW: Final = "\r\x1b[J"


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory use, in bytes, of the device whose memory is fullest among a process's devices.

    Attributes:
      limit: capacity of the device's memory; None if the backend doesn't report it.
    """

    in_use: int
    peak: int
    limit: int | None


@dataclasses.dataclass(frozen=True)
class TrainingStatus:
    """Current status of training.

    Attributes:
      step: the last step whose scalars have arrived.
      num_steps: the step at which training is complete.
      loss: the loss of `step`; None before the first step.
      seconds_per_step: mean over the last steps; None until measured.
      items_per_step: number of tokens (or examples) in a global batch.
      unit: what the items are, 'tokens' or 'examples'.
      utilization: {way of counting FLOPs, see `watch.progress.flops_per_item`: model FLOPs utilization, 0 to 1}; {} if unknown.
      memory: memory use of this process's fullest device; None if the backend doesn't report it.
      due: {'save', 'eval' or 'decode': the next step at which it is due}. Disabled ones are left out.
      steps_left: the number of remaining steps, converted to steps of the current batch size; None: num_steps - step.
      activity: current activity other than training, e.g. 'saving step 12'; empty during training.
    """

    step: int
    num_steps: int
    loss: float | None = None
    seconds_per_step: float | None = None
    items_per_step: int = 0
    unit: str = "examples"
    utilization: Mapping[str, float] = dataclasses.field(default_factory=dict)
    memory: Memory | None = None
    due: Mapping[str, int] = dataclasses.field(default_factory=dict)
    steps_left: float | None = None
    activity: str = ""


@dataclasses.dataclass(frozen=True)
class PhaseStatus:
    """Current status of a phase, such as compiling or evaluating.

    Attributes:
      batches: finished batches; None for a phase without batches.
      total: number of batches; None if unknown.
    """

    what: str
    seconds: float
    batches: int | None = None
    total: int | None = None


class Display(Protocol):
    """Shows the status on a terminal."""

    def print(self, content: RenderableType) -> None:
        """Prints above the live status line. Doesn't break long lines; the terminal wraps them."""


class LiveStatus:
    """Current activities of this process.

    Attributes:
      training: function that returns the status of the training run; None without a training run. Any thread may call it.
      display: the active display; None if there is none.
      running: one function per active phase, the oldest first. Each returns its phase's status; None while a nested phase runs.
    """

    def __init__(self) -> None:
        self.training: Callable[[], TrainingStatus | None] | None = None
        self.display: Display | None = None
        self.running: list[Callable[[], PhaseStatus | None]] = []

    def phases(self) -> list[PhaseStatus]:
        """Returns the statuses of the active phases, the oldest first. Called by any thread."""
        return [status for phase in tuple(self.running) if (status := phase())]


live = LiveStatus()
