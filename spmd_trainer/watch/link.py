"""What the command line and its run tell each other: how a process leaves its job, and what was last heard of another one.

The run knows when it hangs, and what each process did last. The command line holds the connections of the job's processes, over
which they tell each other why they leave. Neither imports the other.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from spmd_trainer.errors import terminal
from spmd_trainer.training.callback_list import within

# Exit status of a process that has made no progress for --hang_seconds. Of several processes only the one that is behind has it,
# or all of them if nobody can be named.
STATUS_HANG = 4
_LOGS_SECONDS = 10.0


class JobLink:
    """See the module.

    Attributes:
      leaving: set once this process is ending because of a hang: what fails in it from then on is not the reason.
      before_leaving: called then: the loss of another process is no news any more.
      say_why: tells the other processes why this one leaves.
      status_of_others: the exit status of a process that is not behind.
      last_beat: returns what a process did last, as a clause for a message, or '' if that is not known.
    """

    def __init__(self) -> None:
        self.leaving = threading.Event()
        self.before_leaving: Callable[[], object] = lambda: None
        self.say_why: Callable[[str], object] = lambda why: None  # one process has nobody to tell
        self.status_of_others = STATUS_HANG
        self.forget_run()

    def begin_to_leave(self) -> None:
        """Notes that this process is ending because of a hang."""
        self.leaving.set()
        self.before_leaving()

    def forget_run(self) -> None:
        self.last_beat: Callable[[int], str] = lambda process: ""

    def leave(self, why: str, *, is_behind: bool) -> NoReturn:
        """Ends this process at once, whatever its other threads do.

        Args:
          why: a clause, e.g. 'no progress for 30m; process 1 is behind'.
          is_behind: True if this process is the one that the others wait for, or if nobody can be named.
        """
        status = STATUS_HANG if is_behind else self.status_of_others
        terminal.write(
            f"spmd-trainer: this process ends with status {status}: {why}. Start the job again; it resumes from the newest "
            "complete checkpoint.\n",
            sys.stderr,
        )
        self.say_why(why)
        within(_LOGS_SECONDS, "closing the logs", logging.shutdown)  # those in object stores are written now and then
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


job = JobLink()
