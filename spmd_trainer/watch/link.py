"""Link between the command line and a training run, which is used when a process exits or is lost.

The training run knows when it hangs, and what each process did last. The command line has the connections between the job's
processes, over which a process tells the others why it exits. The modules of the two do not import each other.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import NoReturn

from spmd_trainer.errors import terminal
from spmd_trainer.training.callback_list import within

# Exit status after --hang_seconds without progress. Of several processes, only those that are behind exit with it, or all of them
# if it is not known which process is behind.
STATUS_HANG = 4
_LOGS_SECONDS = 10.0


class JobLink:
    """Link between the command line and a training run; see the module.

    Attributes:
      leaving: event that is set when this process begins to exit because of a hang. Later errors are not the reason for the exit.
      before_leaving: function that is called when `leaving` is set. After this, lost processes need not be reported.
      say_why: function that tells the other processes why this process exits.
      status_of_others: exit status of this process after a hang if only other processes are behind.
      last_beat: given a process index, returns a clause that describes the process's last beat (heartbeat); '' if unknown.
    """

    def __init__(self) -> None:
        self.leaving = threading.Event()
        self.before_leaving: Callable[[], object] = lambda: None
        self.say_why: Callable[[str], object] = lambda why: None  # one process has nobody to tell
        self.status_of_others = STATUS_HANG
        self.forget_run()

    def begin_to_leave(self) -> None:
        """Notes that this process is about to exit because of a hang."""
        self.leaving.set()
        self.before_leaving()

    def forget_run(self) -> None:
        self.last_beat: Callable[[int], str] = lambda process: ""

    def leave(self, why: str, *, is_behind: bool) -> NoReturn:
        """Exits this process at once, whatever its other threads are doing.

        Args:
          why: a clause, e.g. 'no progress for 30m; process 1 is behind'.
          is_behind: True if the other processes wait for this process, or if it is not known which process is behind.
        """
        status = STATUS_HANG if is_behind else self.status_of_others
        terminal.write_last(
            f"this process ends with status {status}: {why}. Start the job again; it resumes from the newest complete checkpoint."
        )
        self.say_why(why)
        within(_LOGS_SECONDS, "closing the logs", logging.shutdown)  # those in object stores are written now and then
        terminal.flush()
        os._exit(status)


job = JobLink()
