"""Calls the callbacks of a run. Errors name the callback that raised. A callback that hangs can be abandoned."""

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
    """The callbacks of a run, sorted by their `turn`. Calls only the methods that a callback overrides."""

    def __init__(self, callbacks: Sequence[Callback]):
        """Sorts the callbacks.

        Args:
          callbacks: the callbacks. Those with the same `turn` are called in the given order.

        Raises:
          UserError: one of them is not a `Callback`.
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
        """Calls the method `hook` of every callback that overrides it; returns the results.

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
        """Calls `on_failure` of every callback. Exceptions of callbacks are only logged, because `error` is the one to report.

        Args:
          error: the error that ended the run.
          seconds: timeout for each callback, after which the next callback is called; None for no timeout.
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
    """Runs `work` in a daemon thread, and waits until it ends or a timeout passes. Exceptions are logged.

    Args:
      seconds: the timeout. After it, the thread is abandoned; it doesn't keep the process alive.
      what: names the work in the log, e.g. 'closing the logs'.
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
