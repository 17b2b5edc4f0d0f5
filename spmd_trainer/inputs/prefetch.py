"""Prepares batches on the devices in a background thread while the training or evaluation step runs."""

from __future__ import annotations

import collections
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from absl import logging

from spmd_trainer.errors import UserError

# `Prefetcher.close` waits this long for its thread to end. A batch in progress normally takes less time; an input that waits
# for data that never arrive must not keep the process alive.
CLOSE_SECONDS = 10.0


class Input(Protocol):
    """The methods and attributes of praxis' `BaseInput` that a `Prefetcher` uses."""

    name: str

    def get_next_padded(self) -> Any:
        """Returns the next batch."""

    def get_state(self) -> bytes:
        """Returns the saved position: where the input continues after the batches returned so far."""


class Prefetched(NamedTuple):
    """A batch on the devices, and the input's position after this batch.

    Attributes:
      batch: the result of the prefetcher's function `put`.
      state: the input's `get_state()` right after this batch; None for inputs that can't save a position.
    """

    batch: Any
    state: bytes | None


class Prefetcher(Iterator[Prefetched]):
    """Iterates over an input's batches, which a background thread prepares ahead of time.

    The thread gets a batch with `get_next_padded`, passes it to `put`, and pauses while `depth` batches are ready. A
    checkpoint must save `state`, the position after the last batch that the iterator returned. (The input's own position is
    ahead of it.) The iteration stops when the input raises StopIteration or TensorFlow's OutOfRangeError. After any other
    error of the input or of `put`, `__next__` first returns the batches made before the error, and then always raises it.

    While a Prefetcher is open, only its thread may use the input. After `close()`, the input may be up to `depth`
    batches ahead of `state`; call its `set_state(prefetcher.state)` or `reset()` before using it again.

        with Prefetcher(train_input, put_on_mesh) as prefetched:
            for batch, input_state in prefetched:
                ...
    """

    def __init__(self, source: Input, put: Callable[[Any], Any], *, depth: int = 2):
        """Starts the thread.

        Args:
          source: the input.
          put: converts a batch of numpy arrays to what the step takes, e.g. to global arrays. The thread calls it.
          depth: number of batches to keep ready, 1 or more.

        Raises:
          ValueError: `depth` is below 1.
        """
        if depth < 1:
            raise ValueError(f"Prefetcher of input {source.name!r}: depth={depth}; keep 1 batch ready or more")
        self._source = source
        self._put = put
        self._depth = depth
        self._ready: collections.deque[Prefetched] = collections.deque()
        self._changed = threading.Condition()
        self._closed = False
        self._ended = False
        self._error: BaseException | None = None
        self._made = 0
        self._state = _state_of(source)
        self._thread = threading.Thread(target=self._run, name=f"prefetch-{source.name}", daemon=True)
        self._thread.start()

    @property
    def state(self) -> bytes | None:
        """The input's position after the last batch that `__next__` returned, or its initial position before any batch."""
        return self._state

    @property
    def state_is_shared(self) -> bool:
        """True if `state` can be restored on any number of processes. It is the input's `state_is_shared`, or else False."""
        return self._state is None or bool(getattr(self._source, "state_is_shared", False))

    @property
    def waits_for_others(self) -> bool:
        """True if this process's next batch is ready and another process's isn't; False if the input doesn't report it."""
        return bool(getattr(self._source, "waits_for_others", False))

    @property
    def skipped(self) -> Mapping[str, int]:
        """Number of bad records that the input has left out, by source; empty if the input doesn't count them."""
        return getattr(self._source, "skipped", {})

    @property
    def seconds_for_others(self) -> float:
        """Seconds that the input has waited for other processes' batches; 0 if the input doesn't report it."""
        return float(getattr(self._source, "seconds_for_others", 0.0))

    def __next__(self) -> Prefetched:
        """Returns the next batch and the position after it.

        Raises:
          StopIteration: the input has ended.
          UserError, ValueError, RuntimeError: the input or `put` failed. UserError and ValueError keep their type, other
            errors become a RuntimeError. The message names the input, and also the batch unless the original message
            already names the input. The original error is chained.
          RuntimeError: the prefetcher is closed.
        """
        with self._changed:
            item = self._wait_for_next()
            if item is None:
                raise StopIteration
            self._ready.popleft()
            self._state = item.state
            self._changed.notify_all()
            return item

    def peek(self) -> Prefetched | None:
        """Returns the next batch without consuming it, or None at the end. Raises the same errors as `__next__`."""
        with self._changed:
            return self._wait_for_next()

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Stops the thread, waits up to `timeout` seconds for it to end, and drops the batches that are ready.

        If the input blocks the thread for longer, logs a warning that says where, and abandons the thread; the process
        can exit nevertheless, but must not use the input again. Further calls of `close` do nothing.
        """
        with self._changed:
            closed_before, self._closed = self._closed, True
            self._ready.clear()
            self._changed.notify_all()
        cancel = getattr(self._source, "cancel", None)
        if cancel is not None:  # an input that may wait for other processes
            cancel()
        if closed_before or self._thread is threading.current_thread():
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            logging.warning(
                "input %r did not stop within %g s, so its thread is left behind; the process can end without it. The "
                "thread is %s",
                self._source.name,
                timeout,
                _where(self._thread),
            )

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _wait_for_next(self) -> Prefetched | None:
        self._changed.wait_for(lambda: self._ready or self._ended or self._closed)
        if self._closed:
            raise RuntimeError(f"the prefetcher of input {self._source.name!r} is closed; make a new one")
        if self._ready:
            return self._ready[0]
        if self._error is None:
            return None
        raise self._explain(self._error) from self._error

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
                    if self._closed:
                        break
                batch = self._put(self._source.get_next_padded())
                made = Prefetched(batch, _state_of(self._source))
                with self._changed:
                    self._made += 1
                    if not self._closed:
                        self._ready.append(made)
                        self._changed.notify_all()
        except BaseException as raised:  # else the consumer would wait forever
            error = None if is_end(raised) else raised
        with self._changed:
            self._error = error
            self._ended = True
            self._changed.notify_all()

    def _explain(self, error: BaseException) -> Exception:
        name = f"input {self._source.name!r}"
        where = f"{name} failed at batch {self._made} of this run"
        for kind in (UserError, ValueError):
            if isinstance(error, kind):
                return kind(str(error) if name in str(error) else f"{where}: {error}")
        return RuntimeError(f"{where}: {''.join(traceback.format_exception_only(error)).strip()}")


def _where(thread: threading.Thread) -> str:
    """Formats the source line that a thread is executing, e.g. 'at corpus.py:12 in get_next'."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return "about to end"
    return f"at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _state_of(source: Input) -> bytes | None:
    try:
        return source.get_state()
    except NotImplementedError:
        return None


def is_end(error: BaseException) -> bool:
    """Returns True if an exception raised by an input means that the input has ended."""
    # TensorFlow's error is recognized by name, because importing TensorFlow takes seconds.
    return isinstance(error, StopIteration) or any(
        kind.__name__ == "OutOfRangeError" and kind.__module__.startswith("tensorflow") for kind in type(error).__mro__
    )
