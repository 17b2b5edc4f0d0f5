"""Detects when a process of the job dies, fails or is stopped, and makes the others exit with a message that names it.

JAX's own heartbeats notice a lost process only after a timeout, and then abort with a C++ stack trace. Here every process holds
the TCP connection to process 0 over which it joined (`rendezvous`). The kernel closes it when the process dies, however it dies,
and process 0 tells the others. A process that is stopped, or whose host vanished, closes nothing, so each process also sends a
line now and then, and silence counts as loss. JAX's heartbeats, with a longer timeout, remain the fallback.
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import sys
import threading
import time
from collections.abc import Iterator

from absl import logging

from spmd_trainer.cli.rendezvous_wire import Peers, read_line
from spmd_trainer.watch.link import JobLink, job

# Exit status of a process that exits because another one is gone. The work is unfinished; starting the job again resumes it.
STATUS_LOST_PROCESS = 3
# Processes often fail together, with the same error: each gets this much time to print its own.
_GRACE_SECONDS = 3.0
# How long process 0 waits for the others of a run that hangs: they have more to write.
_HANG_SECONDS = 100.0
# How long process 0 otherwise waits for the others to be gone: JAX's service ends with it, and aborts those that still run.
_LAST_SECONDS = 3.0
_GOODBYE, _FAILED, _LOST, _ALIVE, _SERVING = "goodbye", "failed", "lost", "alive", "serving"


class PeerWatch:
    """Watches the other processes of the job from this one.

    Attributes:
      count: number of processes in the job.
    """

    def __init__(self, peers: Peers, count: int, index: int, heartbeat_seconds: int):
        """Stores the settings; `start` begins to watch.

        Args:
          peers: connections to the other processes.
          count: number of processes.
          index: id of this process.
          heartbeat_seconds: a process that is silent for this long counts as lost; after half of it, a warning names it.
        """
        self.count = count
        self._index = index
        self._heartbeat_seconds = heartbeat_seconds
        self._names = peers.names
        self._peers = peers.connections
        self._leaving = threading.Event()
        self._news = threading.Event()
        self._serving = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peer-watch", daemon=True)

    def start(self) -> None:
        """Starts the watching thread."""
        self._thread.start()

    def say_serving(self) -> None:
        """Tells the others that JAX's service runs on process 0."""
        self._tell(_SERVING, self._index, "")

    def wait_until_serving(self, seconds: float) -> bool:
        """Returns True once JAX's service runs on process 0; False if it does not within `seconds`."""
        return self._serving.wait(seconds)

    def say_goodbye(self) -> None:
        """Tells the others that this process has finished its work."""
        self._leaving.set()
        self._tell(_GOODBYE, self._index, "")

    def attach(self, job: JobLink) -> None:
        """Lets a run that hangs leave over these connections."""
        job.before_leaving = self._leaving.set
        job.say_why = functools.partial(self.say_failed, seconds=_HANG_SECONDS)
        job.status_of_others = STATUS_LOST_PROCESS

    def say_failed(self, why: str, how: str = "failed", *, seconds: float = _GRACE_SECONDS + _LAST_SECONDS) -> None:
        """Tells the others that this process exits before its work is finished. Process 0 lets them exit first.

        Args:
          why: the reason.
          how: what the process did, e.g. 'was interrupted'.
          seconds: how long process 0 waits for them.
        """
        self._leaving.set()
        self._tell(_FAILED, self._index, f"{self._names[self._index]} of {self.count} {how}: {why}")
        if self._index == 0:
            self._thread.join(seconds)  # ends when all others are gone

    def wait_for_news(self, seconds: float) -> None:
        """Waits up to `seconds` for news of a lost process, on which the watching thread ends this process."""
        if self._news.wait(seconds):
            time.sleep(_GRACE_SECONDS + 1)

    def _watch(self) -> None:
        beat = max(0.5, self._heartbeat_seconds / 8)
        silence = _Silence(self._names, beat, self._heartbeat_seconds)
        with selectors.DefaultSelector() as selector:
            for index, connection in self._peers.items():
                selector.register(connection, selectors.EVENT_READ, index)
                silence.heard(index)
            while selector.get_map():
                for key, _ in selector.select(beat / 2):
                    line = read_line(self._peers[key.data])
                    silence.heard(key.data)
                    if self._is_last(line, key.data):
                        selector.unregister(key.fileobj)
                        silence.forget(key.data)
                if silence.heartbeat_due():
                    self._tell(_ALIVE, self._index, "")
                    for index, what in silence.lost():
                        self._on_gone(index, _LOST, what)
                        selector.unregister(self._peers[index])  # this process is leaving, and waits for it no more

    def _is_last(self, line: str, index: int) -> bool:
        """Handles what a process says; returns True if it says nothing more."""
        kind, _, rest = line.partition(" ")
        if kind == _SERVING:
            self._serving.set()
        elif kind not in (_ALIVE, _GOODBYE):
            subject, _, what = rest.partition(" ")
            self._on_gone(int(subject) if subject.isdigit() else index, kind or _LOST, what)
        return kind in ("", _GOODBYE)

    def _on_gone(self, index: int, kind: str, what: str) -> None:
        """Ends this process because another one is gone; `what` says how, '' if it said nothing itself."""
        if self._leaving.is_set():
            return
        self._news.set()
        name = self._names.get(index, f"process {index}")
        what = what or f"{name} of {self.count} was lost: it died, was killed, or its host is gone{_last_beat(index)}"
        if self._index == 0:
            self._tell(kind, index, what, but=index)
        if kind == _FAILED:
            time.sleep(_GRACE_SECONDS)
            if self._leaving.is_set():  # it has met the same error meanwhile, and exits with its own status
                return
        sys.stderr.write(
            f"spmd-trainer: process {self._index} exits because {what}. Start the job again, with the same number of "
            "processes or fewer; it resumes from the newest complete checkpoint.\n"
        )
        sys.stderr.flush()
        if self._index == 0:
            self._wait_until_gone(but=index)
        os._exit(STATUS_LOST_PROCESS)

    def _wait_until_gone(self, but: int) -> None:
        ends = time.monotonic() + _LAST_SECONDS
        for peer, connection in self._peers.items():
            if peer == but:
                continue
            with contextlib.suppress(OSError):
                connection.settimeout(max(0.01, ends - time.monotonic()))
                while connection.recv(4096):
                    pass

    def _tell(self, kind: str, index: int, text: str, but: int | None = None) -> None:
        line = f"{kind} {index} {' '.join(text.split())[:2000]}\n".encode()
        for peer, connection in self._peers.items():
            if peer != but:
                with contextlib.suppress(OSError):  # gone too, which the watching thread notices by itself
                    connection.sendall(line)


def _last_beat(index: int) -> str:
    """Returns a clause that says where a process was last, if a run has told."""
    last = job.last_beat(index)
    return f" (its last beat: {last})" if last else ""


class _Silence:
    """Knows when each process was last heard from, warns of silent ones, and says which have been silent for too long."""

    def __init__(self, names: dict[int, str], beat_seconds: float, heartbeat_seconds: int):
        self._names = names
        self._beat_seconds = beat_seconds
        self._heartbeat_seconds = heartbeat_seconds
        self._last: dict[int, float] = {}
        self._warned: set[int] = set()
        self._spoke = time.monotonic()

    def heard(self, index: int) -> None:
        """Records that a process has just been heard from."""
        self._last[index] = time.monotonic()
        if index in self._warned:
            self._warned.remove(index)
            logging.warning("%s answers again", self._names.get(index, f"process {index}"))

    def forget(self, index: int) -> None:
        """Stops watching a process."""
        self._last.pop(index, None)

    def heartbeat_due(self) -> bool:
        """Returns True once per beat."""
        now = time.monotonic()
        if now - self._spoke < self._beat_seconds:
            return False
        if now - self._spoke > 3 * self._beat_seconds:  # this process was the silent one
            self._last = dict.fromkeys(self._last, now)
        self._spoke = now
        return True

    def lost(self) -> Iterator[tuple[int, str]]:
        """Yields each process that has been silent for the heartbeat's time, and a clause about it. Warns after half of that."""
        for index, last in list(self._last.items()):
            silent = time.monotonic() - last
            name = self._names.get(index, f"process {index}")
            what = f"has not answered for {silent:.0f} s: it is stopped or overloaded, or its host is gone{_last_beat(index)}"
            if silent > self._heartbeat_seconds:
                self.forget(index)
                yield index, f"{name} {what}"
            elif silent > self._heartbeat_seconds / 2 and index not in self._warned:
                self._warned.add(index)
                logging.warning("%s %s. After %d s this process exits", name, what, self._heartbeat_seconds)
