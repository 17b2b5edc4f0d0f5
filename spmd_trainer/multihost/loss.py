"""Who is lost: notices that a process of the job died, failed or stopped, and ends the others with a message that names it.

Every process beats: it counts up a number in the key-value store of JAX's coordination service. Process 0 watches all
numbers; the others watch that of process 0. Whoever knows a reason to end writes it as the job's *news* and rings a bell, on
which every process waits between two beats. A process whose collective breaks rings without news, and all beat at once: then
a process that is gone is known after seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping

import jax
from absl import logging

from spmd_trainer.errors import terminal
from spmd_trainer.multihost import service
from spmd_trainer.multihost.join import one_line, opened, sealed

# Exit status of a process that exits because another one is gone. The work is unfinished; starting the job again resumes it.
STATUS_LOST_PROCESS = 3
# Processes often fail together, with the same error: each gets this much time to print its own.
_GRACE_SECONDS = 3.0
# How long process 0 waits for the others to be gone, because the service ends with it.
_LAST_SECONDS = 5.0
# After a bell without news, a process that has not beaten for this long is lost.
_CALLED_SECONDS = 6.0
# Beats within the time after which a silent process is lost.
_BEATS = 4
_CLOCK_SECONDS = 0.5
_POLL_SECONDS = 0.1
_PREFIX = "spmd_trainer/loss"
_BEAT, _GONE, _ALL_DONE, _BELL, _NEWS = (f"{_PREFIX}/{name}" for name in ("beat", "gone", "all_done", "bell", "news"))
_FAILED, _LOST = "failed", "lost"
_DONE = "done"


@dataclasses.dataclass(frozen=True)
class _News:
    """Why the job ends: how (`_FAILED` or `_LOST`) and which process, and what to say of it."""

    kind: str
    process: int
    what: str

    @classmethod
    def parse(cls, sealed: str | None) -> _News | None:
        """Returns the news that a process has published; None if a stranger has, or nobody."""
        text = None if sealed is None else opened(sealed)
        if text is None:
            return None
        kind, process, what = text.split(" ", 2)
        return cls(kind, int(process), one_line(what))

    def text(self) -> str:
        """Returns what `parse` reads."""
        return sealed(f"{self.kind} {self.process} {self.what}")


@dataclasses.dataclass
class _Other:
    """What is known of another process: its last beat, and when it came."""

    beat: str
    heard: float
    warned: bool = False


class Peers:
    """Watches the other processes of the job from this one.

    Attributes:
      count: number of processes in the job.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        index: int,
        heartbeat_seconds: float,
        last_beat: Callable[[int], str] = lambda process: "",
    ):
        """Stores the settings; `start` begins to watch.

        Args:
          names: of all processes, for messages.
          index: id of this process.
          heartbeat_seconds: a process that is silent for this long counts as lost; after half of it, a warning names it.
          last_beat: returns where a process of the run was last, or ''.
        """
        client = service.client()
        if client is None:
            raise RuntimeError("this process has not joined the others")
        self.count = len(names)
        self._client = client
        self._names = names
        self._index = index
        self._limit = heartbeat_seconds
        self._last_beat = last_beat
        self._leaving = threading.Event()
        self._stopped = threading.Event()
        self._has_news = threading.Event()
        now = time.monotonic()
        # Process 0 hears of all others; each of them hears of process 0.
        watched = range(1, self.count) if index == 0 else (0,)
        self._others = {process: _Other("", now) for process in watched}
        self._number = 0
        self._called: float | None = None
        self._refused: float | None = None
        self._looked = now
        self._lock = threading.Lock()

    def start(self) -> None:
        """Starts the threads: one beats, which can take as long as process 0 doesn't answer; one looks at the clock."""
        self._thread = threading.Thread(target=self._beats, name="heartbeat", daemon=True)
        self._thread.start()
        threading.Thread(target=self._clock, name="peer-watch", daemon=True).start()

    def lost(self) -> tuple[int, ...]:
        """Returns the ids of the processes that are silent now."""
        now = time.monotonic()
        return tuple(process for process, other in self._others.items() if now - other.heard > self._limit)

    def begin_to_leave(self) -> None:
        """From now on the loss of another process is no news for this one, which beats on until it has ended."""
        self._leaving.set()

    def say_goodbye(self) -> None:
        """Tells the others that this process has finished its work, and waits until all have.

        The devices of the others may still wait for what this process's devices send.
        """
        self.begin_to_leave()
        self._stopped.set()
        # A thread that is in a call of jaxlib when Python ends aborts the process.
        self._client.key_value_set(f"{_BELL}/{self._index}", "", allow_overwrite=True)
        self._thread.join(_LAST_SECONDS)
        self._say_gone(_DONE)
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 ends as soon as all have finished
            if self._index == 0:
                self._let_others_go(math.inf)
                self._client.key_value_set(_ALL_DONE, "")
                time.sleep(_POLL_SECONDS)
            while self._index and not self.lost():
                if service.wait_for(self._client, _ALL_DONE, self._limit / _BEATS) is not None:
                    break
                self._beat()
        service.let_go()

    def say_failed(self, why: str, how: str = "failed", *, seconds: float = _LAST_SECONDS) -> None:
        """Tells the others that this process exits before its work is finished. Process 0 lets them exit first.

        Args:
          why: the reason.
          how: what the process did, e.g. 'was interrupted'.
          seconds: how long process 0 waits for them.
        """
        self.begin_to_leave()
        text = one_line(f"{self._names[self._index]} of {self.count} {how}: {why}")
        self._tell(_News(_FAILED, self._index, text))
        self._say_gone(text)
        self._let_others_go(seconds)

    def wait_for_news(self) -> None:
        """Waits for news of a lost process, on which this process ends; called where a collective has broken.

        Returns if there is none, because what broke it was this process's own doing.
        """
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._ring()
        if self._has_news.wait(_CALLED_SECONDS + _LAST_SECONDS):
            time.sleep(_GRACE_SECONDS + _LAST_SECONDS + 1)

    def _beats(self) -> None:
        bell = f"{_BELL}/{self._index}"
        while not self._stopped.is_set():
            try:
                self._beat()
                wait = self._limit / _BEATS if self._called is None else _CLOCK_SECONDS
                if service.wait_for(self._client, bell, wait) is not None:
                    self._client.key_value_delete(bell)
                    self._called = time.monotonic()
                    if (news := _News.parse(service.look(self._client, _NEWS))) is not None:
                        self._on_news(news)
            except jax.errors.JaxRuntimeError as error:
                if "refused" in str(error):  # the service is gone, and never comes back
                    self._refused = self._refused or time.monotonic()
                time.sleep(_CLOCK_SECONDS)

    def _beat(self) -> None:
        """Beats once, and notes who else has."""
        self._number += 1
        self._client.key_value_set(f"{_BEAT}/{self._index}", str(self._number), allow_overwrite=True)
        if self._index:
            beats = {0: service.look(self._client, f"{_BEAT}/0") or ""}
        else:
            beats = {int(key.rsplit("/", 1)[1]): text for key, text in self._client.key_value_dir_get(_BEAT)}
            self._take_gone()
        self._refused, now = None, time.monotonic()
        for process, other in list(self._others.items()):
            beat = beats.get(process, "")
            if beat == other.beat:
                continue
            other.beat, other.heard = beat, now
            if other.warned:
                other.warned = False
                logging.warning("%s answers again", self._names[process])

    def _clock(self) -> None:
        while not self._stopped.wait(_CLOCK_SECONDS):
            now = time.monotonic()
            if now - self._looked > self._limit / _BEATS + 2 * _CLOCK_SECONDS:  # this process was the silent one
                for other in list(self._others.values()):
                    other.heard = now
            self._looked = now
            self._look(now)

    def _look(self, now: float) -> None:
        """Ends the job if a process is lost."""
        if self._leaving.is_set():
            return
        called = self._called
        for process, other in list(self._others.items()):
            silent = now - other.heard
            since = "" if not self._last_beat(process) else f" (its last beat: {self._last_beat(process)})"
            what = f"has not answered for {silent:.0f} s: it died, is stopped or overloaded, or its host is gone{since}"
            is_gone = self._refused is not None and now - self._refused > 2 * _CLOCK_SECONDS
            is_deaf = called is not None and now - called > _CALLED_SECONDS and other.heard < called
            if is_gone:
                what = f"died or was killed{since}"
            if silent > self._limit or is_gone or is_deaf:
                self._end(_News(_LOST, process, f"{self._names[process]} of {self.count} is lost. It {what}"))
            elif silent > self._limit / 2 and not other.warned:
                other.warned = True
                logging.warning("%s %s. After %g s this process exits", self._names[process], what, self._limit)
        if called is not None and now - called > _CALLED_SECONDS:
            self._called = None

    def _end(self, news: _News) -> None:
        if self._index == 0:
            self._tell(news)
        self._on_news(news)

    def _on_news(self, news: _News) -> None:
        """Ends this process because another one is gone."""
        with self._lock:
            if self._leaving.is_set():
                return
            self._has_news.set()
            if news.kind == _FAILED:
                time.sleep(_GRACE_SECONDS)
                if self._leaving.is_set():  # it has met the same error meanwhile, and exits with its own status
                    return
            self._leaving.set()
            why = f"the others took it for lost: {news.what}" if news.process == self._index else news.what
            terminal.write(
                f"spmd-trainer: process {self._index} exits because {why}. Start the job again, with the same number of "
                "processes or fewer; it resumes from the newest complete checkpoint.\n",
                sys.stderr,
            )
            self._say_gone(f"exited because {why}")
            self._let_others_go(_LAST_SECONDS)
            os._exit(STATUS_LOST_PROCESS)

    def _tell(self, news: _News) -> None:
        """Publishes the news, unless there are some already."""

        def publish() -> None:
            service.set_first(self._client, _NEWS, news.text())
            self._ring()

        _briefly(publish)

    def _ring(self) -> None:
        for process in range(self.count):
            self._client.key_value_set(f"{_BELL}/{process}", "", allow_overwrite=True)

    def _say_gone(self, why: str) -> None:
        _briefly(lambda: self._client.key_value_set(f"{_GONE}/{self._index}", why, allow_overwrite=True))

    def _take_gone(self) -> None:
        """Watches those no more that have said that they end. One that has not finished its work ends the others."""
        for key, why in self._client.key_value_dir_get(_GONE):
            process = int(key.rsplit("/", 1)[1])
            if self._others.pop(process, None) is None or why == _DONE or self._leaving.is_set():
                continue
            if service.look(self._client, _NEWS) is None:  # it took this process for lost
                self._end(_News(_LOST, process, f"{self._names[process]} of {self.count} {one_line(why)}"))

    def _let_others_go(self, seconds: float) -> None:
        """Lets the others exit before process 0, with which the service ends."""
        ends = time.monotonic() + seconds
        while self._index == 0 and self._others and time.monotonic() < ends:
            self._beat()
            for process in self.lost():
                self._others.pop(process, None)
            time.sleep(_POLL_SECONDS)


def _briefly(call: Callable[[], object]) -> None:
    """Makes a call of the service, but does not wait for long: it may not answer any more."""

    def work() -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            call()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(_LAST_SECONDS)
