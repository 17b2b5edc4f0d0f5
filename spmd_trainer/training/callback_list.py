"""Calls the callbacks of a run. An error of one of them names it; one that hangs can be left behind."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence

import jax
from absl import logging

from spmd_trainer.callbacks import Callback, CallbackError, Run
from spmd_trainer.errors import UserError

_HOOKS = tuple(name for name, value in vars(Callback).items() if callable(value) and not name.startswith("_"))


class CallbackList:
    """The callbacks of a run, in the order of their turns. Calls only the methods that a callback overrides."""

    def __init__(self, callbacks: Sequence[Callback]):
        """Sorts the callbacks.

        Args:
          callbacks: those of the same turn in the order in which they are called.

        Raises:
          UserError: one of them is no `Callback`.
        """
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise UserError(
                    f"task.train.callbacks has {callback!r:.200}, a {type(callback).__name__}; give configs of classes that "
                    "derive from spmd_trainer.callbacks.Callback, e.g. pax_fiddle.Config(MyCallback)"
                )
        self.callbacks = tuple(sorted(callbacks, key=lambda callback: type(callback).turn))
        self._overriding = {
            hook: [c for c in self.callbacks if getattr(type(c), hook) is not getattr(Callback, hook)]
            for hook in _HOOKS
        }

    def call(self, hook: str, run: Run, *args: object) -> list[object]:
        """Calls one method of every callback that overrides it.

        Raises:
          CallbackError: an experiment's or a caller's callback raised an exception.
        """
        results = []
        for callback in self._overriding[hook]:
            try:
                results.append(getattr(callback, hook)(run, *args))
            except Exception as error:
                if _is_own(callback):  # The trainer's own errors say what is wrong.
                    raise
                raise CallbackError(_explain(callback, hook, run, args, error)) from error
        return results

    def fail(self, run: Run, error: BaseException, *, seconds: float | None = None) -> None:
        """Calls `on_failure` of every callback. What one of them raises is logged: the first error is the one to report.

        Args:
          error: what has ended it.
          seconds: how long one of them may take before the next is called; None for as long as it takes.
        """
        for callback in self._overriding["on_failure"]:
            if seconds is not None:
                within(seconds, f"on_failure of {_name(callback)}", functools.partial(callback.on_failure, run, error))
                continue
            try:
                callback.on_failure(run, error)
            except Exception:
                logging.exception("callback %s failed in on_failure", _name(callback))


def _name(callback: Callback) -> str:
    return f"{type(callback).__module__}.{type(callback).__qualname__}"


def _is_own(callback: Callback) -> bool:
    module = type(callback).__module__
    return module.startswith("spmd_trainer.") and not module.startswith("spmd_trainer.experiments.")


def _explain(callback: Callback, hook: str, run: Run, args: Sequence[object], error: Exception) -> str:
    step = args[0] if args and isinstance(args[0], int) else run.step
    text = f"callback {_name(callback)} failed in {hook} at step {step}: {type(error).__name__}: {error}"
    if isinstance(error, jax.errors.JaxRuntimeError) and "transfer" in str(error):
        text += "\nRead arrays of the devices with jax.device_get; implicit copies are refused between two steps"
    return text


def within(seconds: float, what: str, work: Callable[[], object]) -> None:
    """Does something in a thread of its own and waits for it, but not for ever. What it raises is logged.

    Args:
      seconds: the longest wait. The thread is then left behind; it keeps no process alive.
      what: names the work for the log, e.g. 'closing the logs'.
    """

    def run() -> None:
        try:
            work()
        except Exception:
            logging.exception("%s failed", what)

    thread = threading.Thread(target=run, name=what, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        logging.error("%s did not end within %g s", what, seconds)
