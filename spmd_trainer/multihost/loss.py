"""Notices that a process of the job died, failed or stopped. The other processes then exit with a message that names it.

Every process sends heartbeats ("beats"): it increments a number in the key-value store of JAX's coordination service. Process 0
watches the numbers of all processes; the others watch the number of process 0. A process that knows why the job must end writes
the reason to the store as the job's *news*, which all processes read about every half second. A process whose collective fails
sends a *call*, which the others must answer at once with a heartbeat. So a dead process is found within seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
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
# How long process 0 waits for the others to exit, because the service ends with process 0; also the timeout of `_tried`.
_LAST_SECONDS = 5.0
# After a call, a process that sends no heartbeat for this long counts as lost.
_CALLED_SECONDS = 6.0
# Number of heartbeats within the time after which a silent process counts as lost.
_BEATS = 4
_TURN_SECONDS = 0.5
# A process that is about to exit reads the news more often, so that all processes end soon.
_LAST_TURN_SECONDS = 0.1
_REPORT_SECONDS = 30.0
_PREFIX = "spmd_trainer/loss"
_BEAT, _GONE, _END = (f"{_PREFIX}/{name}" for name in ("beat", "gone", "end"))
_NEWS, _CALL, _ALL_DONE = (f"{_END}/{name}" for name in ("news", "call", "all_done"))
_FAILED, _LOST = "failed", "lost"
_DONE = "done"


@dataclasses.dataclass(frozen=True)
class _News:
    """Why the job ends: the `process` that is gone, the `kind` of its end (`_FAILED` or `_LOST`), and a message (`what`)."""

    kind: str
    process: int
    what: str

    @classmethod
    def parse(cls, said: str | None) -> _News | None:
        """Returns the news that the text `said` contains; None if there is no text, or its signature is wrong."""
        text = None if said is None else opened(_NEWS, said)
        try:
            kind, process, what = (text or "").split(" ", 2)
            return cls(kind, int(process), one_line(what))
        except ValueError:
            return None

    def text(self) -> str:
        """Returns the news as the signed text that `parse` reads."""
        return sealed(_NEWS, f"{self.kind} {self.process} {self.what}")


@dataclasses.dataclass
class _Other:
    """A watched process: its last heartbeat, the `time.monotonic()` at which it was heard, and whether a warning followed."""

    beat: str
    heard: float
    warned: bool = False


class Peers:
    """Watches the job's other processes, and makes this process exit if one of them dies, fails or stops.

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
          names: {process id: name} of all processes, for messages.
          index: id of this process.
          heartbeat_seconds: a process that is silent for this long counts as lost; after half of it, a warning names it.
          last_beat: process id -> what that process did last, as text for a message; '' if unknown.
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
        # Events: this process ignores that others exit; the threads must stop; there is news; all processes have finished.
        self._leaving, self._stopped, self._has_news, self._all_done = (threading.Event() for _ in range(4))
        now = time.monotonic()
        # Process 0 watches all others; each of them watches process 0.
        watched = range(1, self.count) if index == 0 else (0,)
        self._others = {process: _Other("", now) for process in watched}
        self._number, self._beaten, self._looked = 0, 0.0, now
        # The last call, and when it came; since when the service refuses connections.
        self._call: str | None = None
        self._called: float | None = None
        self._refused: float | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Starts two threads. One sends heartbeats, and may block while process 0 is silent. The other finds silent processes."""
        self._thread = threading.Thread(target=self._work, name="heartbeat", daemon=True)
        self._thread.start()
        threading.Thread(target=self._clock, name="peer-watch", daemon=True).start()

    def lost(self) -> tuple[int, ...]:
        """Returns the ids of the watched processes that have been silent for longer than `heartbeat_seconds`."""
        now = time.monotonic()
        return tuple(process for process, other in list(self._others.items()) if now - other.heard > self._limit)

    def begin_to_leave(self) -> None:
        """From now on, this process doesn't exit if others do. It continues to send heartbeats until it exits by itself."""
        self._leaving.set()

    def say_goodbye(self) -> None:
        """Tells the others that this process has finished its work, and waits until all processes have finished.

        This process must wait because the other processes' devices may need data from its devices until then.
        """
        self.begin_to_leave()
        self._say_gone(_DONE)
        reported = time.monotonic()
        while self._others if self._index == 0 else not self._all_done.is_set():
            for process in self.lost():
                logging.warning("%s has not answered for %g s; nobody waits for it", self._names[process], self._limit)
                self._others.pop(process, None)
            if self._refused is not None or not self._others:  # the others have not seen that all are done
                break
            if time.monotonic() - reported > _REPORT_SECONDS:
                reported = time.monotonic()
                logging.warning("this process has finished; it waits for the others")
            time.sleep(_LAST_TURN_SECONDS)
        if self._index == 0:
            self._tried(lambda: self._client.key_value_set(_ALL_DONE, ""))
            time.sleep(2 * _LAST_TURN_SECONDS)
        # A thread that is inside a jaxlib call when Python ends would abort the process.
        self._stopped.set()
        self._thread.join(_LAST_SECONDS)
        service.let_go()

    def say_failed(self, why: str, how: str = "failed", *, seconds: float = _LAST_SECONDS) -> None:
        """Tells the others that this process exits before its work is finished. Process 0 then waits until they have exited.

        Args:
          why: the reason, as text.
          how: what happened to the process, e.g. 'was interrupted'.
          seconds: how long process 0 waits for the others to exit.
        """
        self.begin_to_leave()
        text = one_line(f"{self._names[self._index]} of {self.count} {how}: {why}")
        self._tell(_News(_FAILED, self._index, text))
        self._say_gone(text)
        self._let_others_go(seconds)

    def wait_for_news(self) -> None:
        """Waits, after a collective has failed, for news that another process died or failed. If news comes, this process exits.

        Returns if no news comes. Then the cause of the failure is in this process.
        """
        call = f"{self._index} {time.time()}"
        self._tried(lambda: self._client.key_value_set(_CALL, call, allow_overwrite=True))
        # A process that died at the moment of the call is noticed only by its silence.
        if self._has_news.wait(max(self._limit, _CALLED_SECONDS) + 4 * _TURN_SECONDS):
            time.sleep(_GRACE_SECONDS + 2 * _LAST_SECONDS)

    def _work(self) -> None:
        has_failed = False
        while not self._stopped.wait(_LAST_TURN_SECONDS if self._leaving.is_set() else _TURN_SECONDS):
            try:
                self._turn()
            except jax.errors.JaxRuntimeError as error:
                if "refused" in str(error):  # the service is gone, and never comes back
                    self._refused = self._refused or time.monotonic()
            except Exception:  # otherwise this process would send no more heartbeats
                if not has_failed:
                    logging.exception("the watch of the other processes failed; it goes on, and says no more of this")
                has_failed = True

    def _turn(self) -> None:
        """Sends a heartbeat if one is due or a call requests one. Makes this process exit if there is news."""
        now = time.monotonic()
        if self._called is not None or self._leaving.is_set() or now - self._beaten >= self._limit / _BEATS:
            self._beat()
        said = dict(self._client.key_value_dir_get(_END))
        if said.get(_CALL) != self._call:
            self._call = said.get(_CALL)
            self._beat()  # takes the heartbeats from before the call; processes that are alive send another one
            self._called = time.monotonic()
        if _ALL_DONE in said:
            self._all_done.set()
        if (news := _News.parse(said.get(_NEWS))) is not None:
            self._on_news(news)

    def _beat(self) -> None:
        """Sends a heartbeat, and notes the new heartbeats of the watched processes."""
        self._number += 1
        self._client.key_value_set(f"{_BEAT}/{self._index}", str(self._number), allow_overwrite=True)
        if self._index:
            beats = {0: service.look(self._client, f"{_BEAT}/0") or ""}
        else:
            beats = self._by_process(_BEAT)
            self._take_gone()
        self._refused, self._beaten = None, time.monotonic()
        for process, other in list(self._others.items()):
            beat = beats.get(process, "")
            if beat == other.beat:
                continue
            other.beat, other.heard = beat, self._beaten
            if other.warned:
                other.warned = False
                logging.warning("%s answers again", self._names[process])

    def _by_process(self, key: str) -> dict[int, str]:
        """Returns {process id: text that this process has written below `key` in the store}."""
        entries = ((name.rsplit("/", 1)[1], text) for name, text in self._client.key_value_dir_get(key))
        return {int(process): text for process, text in entries if process.isdecimal()}

    def _take_gone(self) -> None:
        """Stops watching the processes that have announced that they exit.

        If one of these has not finished its work, makes this process and the others exit.
        """
        for process, said in self._by_process(_GONE).items():
            why = opened(f"{_GONE}/{process}", said)
            if why is None or self._others.pop(process, None) is None or why == _DONE or self._leaving.is_set():
                continue
            # Without news, that process has exited because this process was suspended, and seemed lost.
            told = _News.parse(service.look(self._client, _NEWS))
            self._end(told or _News(_LOST, process, f"{self._names[process]} of {self.count} {one_line(why)}"))

    def _clock(self) -> None:
        while not self._stopped.wait(_TURN_SECONDS):
            now = time.monotonic()
            if now - self._looked > self._limit / _BEATS + 2 * _TURN_SECONDS:  # this process was the silent one
                for other in list(self._others.values()):
                    other.heard = now
            self._looked = now
            self._look(now)

    def _look(self, now: float) -> None:
        """Warns of silent processes, and ends the job if a process is lost."""
        if self._leaving.is_set():
            return
        called = self._called
        for process, other in list(self._others.items()):
            silent = now - other.heard
            since = "" if not self._last_beat(process) else f" (its last beat: {self._last_beat(process)})"
            what = f"has not answered for {silent:.0f} s: it died, is stopped or overloaded, or its host is gone{since}"
            is_gone = self._refused is not None and now - self._refused > 2 * _TURN_SECONDS
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
        """Makes this process exit because of the news that another process is gone."""
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
            try:
                terminal.write_last(
                    f"process {self._index} exits because {why}. Start the job again, with the same number of processes or "
                    "fewer; it resumes from the newest complete checkpoint."
                )
                if news.process != 0 or news.kind == _FAILED:  # else nobody answers
                    self._say_gone(f"exited because {why}")
                self._let_others_go(_LAST_SECONDS)
            finally:
                os._exit(STATUS_LOST_PROCESS)

    def _tell(self, news: _News) -> None:
        """Publishes the news, unless the store already has news."""

        def publish() -> None:
            if _News.parse(service.look(self._client, _NEWS)) is None:
                self._client.key_value_set(_NEWS, news.text(), allow_overwrite=True)

        self._tried(publish)

    def _say_gone(self, why: str) -> None:
        key = f"{_GONE}/{self._index}"
        text = sealed(key, why)
        self._tried(lambda: self._client.key_value_set(key, text, allow_overwrite=True))

    def _tried(self, call: Callable[[], object]) -> None:
        """Calls the service; ignores errors, and waits only a few seconds, because the service may be suspended or gone."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            service.briefly(call, _LAST_SECONDS)

    def _let_others_go(self, seconds: float) -> None:
        """Makes process 0 wait until the others have exited, because the service ends with process 0."""
        ends = time.monotonic() + seconds
        while self._index == 0 and self._others and time.monotonic() < ends:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._beat()
            for process in self.lost():
                self._others.pop(process, None)
            time.sleep(_LAST_TURN_SECONDS)
