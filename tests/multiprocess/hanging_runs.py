"""Experiments that hang on purpose, once: a file tells one process to, and that process removes it first."""

from __future__ import annotations

import os
import pathlib
import time

from praxis import pax_fiddle

from spmd_trainer import experiment_registry
from spmd_trainer.callbacks import Callback
from spmd_trainer.experiments.lm.stdlib import StdlibBytesTiny
from spmd_trainer.inputs import text

# Its text is the process that is to hang.
FILE = "HANG_FILE"
# The batch, or step, at which it does: after a checkpoint, of step 4.
WHERE = 7


def is_asked(process: int) -> bool:
    """Returns True once, to the process that is to hang."""
    path = pathlib.Path(os.environ[FILE])
    if not path.exists() or int(path.read_text()) != process:
        return False
    path.unlink()
    return True


def wait_for_data_that_never_comes() -> None:
    while True:
        time.sleep(0.1)


class Blocking(text.TextInput):
    """Bytes of text, until there are none for ever."""

    def __post_init__(self):
        super().__post_init__()
        self._given = 0

    def get_next(self):
        self._given += 1
        if self._given == WHERE and is_asked(self.infeed_host_index):
            wait_for_data_that_never_comes()
        return super().get_next()


@experiment_registry.register
class InputBlocks(StdlibBytesTiny):
    """The training input of a process blocks."""

    def datasets(self):
        training, *others = super().datasets()
        pax_fiddle.fdl.update_callable(training, Blocking)
        return [training, *others]


class Sleeps(Callback):
    """Does nothing for ever."""

    def after_dispatch(self, run, step):
        if step == WHERE and is_asked(0):
            wait_for_data_that_never_comes()


@experiment_registry.register
class CallbackSleeps(StdlibBytesTiny):
    """A callback hangs."""

    def task(self):
        task_p = super().task()
        task_p.train.callbacks = [pax_fiddle.Config(Sleeps)]
        return task_p
