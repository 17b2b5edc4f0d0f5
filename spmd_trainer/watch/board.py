"""Exchanges beats (heartbeats): each process writes its own, process 0 reads all of them and publishes a digest.

Beats go through the key-value store of JAX's coordination service, which process 0 serves. With N processes, a round takes N
writes, one read of all beats by process 0, and N reads of the digest, whose size doesn't grow with N. The store's calls have no
deadline, and block while process 0 is stopped. So a separate thread makes them, and readers of the digest never wait.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
import time
from collections.abc import Callable, Collection, Mapping

from absl import logging

from spmd_trainer.multihost import service
from spmd_trainer.watch import stuck
from spmd_trainer.watch.slow import SlowProcesses
from spmd_trainer.watch.stuck import Beat, Seen, not_yet

_PREFIX = "spmd_trainer/health"
# Number of each run within the job: a notebook may train several times. All processes count in the same way.
_runs = itertools.count()
# How many seconds `close` waits for the thread, which may be blocked.
_CLOSE_SECONDS = 2.0
# The digest has the stacks of at most this many of the processes that are behind.
_WITH_STACKS = 3


@dataclasses.dataclass(frozen=True)
class Digest:
    """Summary of all processes' beats.

    Attributes:
      still: number of seconds for which no process has made progress.
      behind: the processes that are behind; see `stuck.Verdict`.
      text: a clause that says which processes are behind, and what all processes are doing.
      stacks: {process: its Python stacks}, for up to three of the processes that are behind.
      first: the last beat of process 0. Other processes use this beat when they no longer hear from process 0.
    """

    still: float
    behind: tuple[int, ...]
    text: str
    stacks: Mapping[int, str]
    first: Beat

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Digest:
        values = json.loads(text)
        stacks = {int(process): stack for process, stack in values["stacks"].items()}
        return cls(values["still"], tuple(values["behind"]), values["text"], stacks, Beat(**values["first"]))


class Table:
    """For each process: its last heartbeat (`Beat`), when this beat arrived, and when the process last made progress."""

    def __init__(self, count: int, now: float):
        """Starts without beats.

        Args:
          count: number of processes.
          now: the time in seconds, on the same clock as the times given to the other methods.
        """
        self._beats = {process: not_yet(process) for process in range(count)}
        self._moved = dict.fromkeys(range(count), now)
        self._heard = dict.fromkeys(range(count), now)
        self._turned = now

    def note(self, beat: Beat, now: float) -> None:
        """Stores a heartbeat that arrived at the time `now`. Storing the same heartbeat again has no effect."""
        before = self._beats.get(beat.process)
        if before is None:
            return
        if beat.number != before.number:
            self._heard[beat.process] = now
        if beat.progress != before.progress:
            self._moved[beat.process] = now
        self._beats[beat.process] = beat

    def turn(self, now: float, longest: float) -> None:
        """Begins a round of the exchange of heartbeats at the time `now`.

        If the previous round began more than `longest` seconds ago, this process itself was suspended, or C code held the GIL. It
        could receive no heartbeats in that time, so the time isn't counted as silence of the other processes.
        """
        gap, self._turned = now - self._turned, now
        if gap > longest:
            self._moved = {process: moved + gap for process, moved in self._moved.items()}
            self._heard = {process: heard + gap for process, heard in self._heard.items()}

    def windows(self) -> dict[int, Mapping[str, object] | None]:
        return {process: beat.window for process, beat in self._beats.items()}

    def seen(self, now: float) -> list[Seen]:
        """Returns what is known about each process (see `stuck.Seen`), in the order of the process indices."""
        return [
            Seen(beat, now - self._moved[process], now - self._heard[process]) for process, beat in self._beats.items()
        ]

    def digest(self, now: float, silent_after: float, processes: Collection[int] | None = None) -> Digest:
        """Returns the digest at the time `now`.

        Args:
          silent_after: seconds without a new beat after which a process counts as silent.
          processes: the processes that the digest covers; None for all.
        """
        seen = [one for one in self.seen(now) if processes is None or one.beat.process in processes]
        verdict = stuck.find(seen, silent_after)
        stacks = {process: self._beats[process].stacks for process in verdict.behind[:_WITH_STACKS]}
        return Digest(
            stuck.standing_still(seen),
            verdict.behind,
            verdict.text,
            {process: text for process, text in stacks.items() if text},
            dataclasses.replace(self._beats[0], stacks="", window=None),
        )

    def last_beat(self, process: int, now: float) -> str:
        """Returns a process's last beat as text, e.g. 'training step 12, input, 4 s ago'; '' before its first beat."""
        beat = self._beats.get(process)
        if beat is None or not beat.number:
            return ""
        return f"{beat.where}, {now - self._heard[process]:.0f} s ago"


class Board:
    """Exchanges the beats of this process with the other processes, in a separate thread."""

    def __init__(
        self,
        client: service.Client | None,
        index: int,
        count: int,
        beat: Callable[[], Beat],
        *,
        period: float,
        silent_after: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Stores the arguments; `start` begins the exchange.

        Args:
          client: JAX's client for the coordination service. Not used if there is only one process.
          index: index of this process.
          count: number of processes.
          beat: returns the next beat of this process. Called in the board's thread, and by `conclusion`.
          period: seconds between two beats.
          silent_after: seconds without a new beat after which a process counts as silent.
          clock: returns the time in seconds, as `time.monotonic`.
        """
        self._client, self._index = client if count > 1 else None, index
        self._beat, self._clock = beat, clock
        self._period, self._silent_after = period, silent_after
        self._keys = f"{_PREFIX}/{next(_runs)}"
        # Process 0 stores all beats in it. The other processes store their own and process 0's, in case process 0 falls silent.
        self._table = Table(count, clock())
        self._latest: tuple[Digest, float] | None = None
        self._began = clock()
        self._has_failed = False
        self._slow = SlowProcesses()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="beats", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def latest(self) -> Digest | None:
        """Returns the newest digest from process 0; None before the first one. Never waits."""
        return None if self._latest is None else self._latest[0]

    def conclusion(self) -> Digest | None:
        """Returns the newest digest, with `still` updated to now; None before the first digest. Never waits.

        If process 0 has published nothing for `silent_after` seconds, the digest covers only this process and process 0.
        """
        now, latest = self._clock(), self._latest
        if self._index:
            self._table.turn(now, self._silent_after + self._period)
            self._table.note(self._beat(), now)
            if latest is not None:
                self._table.note(latest[0].first, latest[1])
        heard = self._began if latest is None else latest[1]
        if self._index and now - heard > self._silent_after:
            return self._table.digest(now, self._silent_after, (0, self._index))
        if latest is None:
            return None
        return dataclasses.replace(latest[0], still=latest[0].still + now - latest[1])

    def last_beat(self, process: int) -> str:
        """Returns `Table.last_beat` for a process. Processes other than 0 know only process 0 and themselves. Never waits."""
        return self._table.last_beat(process, self._clock())

    def close(self) -> None:
        self._closed.set()
        self._thread.join(_CLOSE_SECONDS)

    def turn(self) -> None:
        """Sends one beat and gets the newest digest."""
        now, beat, client = self._clock(), self._beat(), self._client
        if client is not None and self._index:
            client.key_value_set(f"{self._keys}/beat/{self._index}", beat.to_json(), allow_overwrite=True)
            self._take(service.look(client, f"{self._keys}/digest"))
            return
        self._table.turn(now, self._silent_after + self._period)
        self._table.note(beat, now)
        if client is not None:
            for _, text in client.key_value_dir_get(f"{self._keys}/beat/"):
                self._table.note(Beat.from_json(text), now)
        for line in self._slow.update(self._table.windows()):
            logging.warning("%s", line)
        digest = self._table.digest(now, self._silent_after)
        self._latest = digest, now
        if client is not None:
            client.key_value_set(f"{self._keys}/digest", digest.to_json(), allow_overwrite=True)

    def _take(self, text: str | None) -> None:
        """Parses a digest from process 0. If it differs from the stored one, stores it with the time of its arrival."""
        digest = None if text is None else Digest.from_json(text)
        if digest is not None and (self._latest is None or digest != self._latest[0]):
            self._latest = digest, self._clock()

    def _work(self) -> None:
        while not self._closed.is_set():
            try:
                self.turn()
            except Exception as error:  # a lost process breaks the store; whoever watches for that ends this one
                if not self._has_failed and not self._closed.is_set():
                    self._has_failed = True
                    logging.warning("the beats of this run can't be exchanged: %s", error)
            self._closed.wait(self._period)
