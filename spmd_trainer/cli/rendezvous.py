"""Brings a job's processes together before JAX connects them, and refuses processes that don't form one job.

JAX's coordination service aborts in C++ if two processes have the same id, waits for minutes if they disagree about their
number, and shares its port with the service of another job. So process 0 first listens on the coordinator's port itself. Every
other process connects to it and sends one line that says who it is. Process 0 answers `go` once all of them are there, or sends
all of them the reason why the job can't start. Then it stops listening, and JAX's service takes over the port. The connections
stay open: `peer_watch` uses them to notice lost processes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from typing import NoReturn

from absl import logging

from spmd_trainer.cli import rendezvous_wire as wire
from spmd_trainer.cli.rendezvous_wire import AbsentError, Member, Peers
from spmd_trainer.errors import UserError


@contextlib.contextmanager
def listen(address: str, own: Member) -> Iterator[socket.socket]:
    """Listens where JAX's service will listen afterwards. Yields the listening socket.

    Args:
      address: 'host:port' of the coordinator.
      own: process 0.

    Raises:
      UserError: it can't listen there.
    """
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") or f":{wire.host_and_port(address)[1]}"
    host, port = wire.host_and_port(bind)
    both = host in ("", "::") and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    ends = time.monotonic() + wire.BUSY_SECONDS
    while True:
        try:
            listener = socket.create_server((host, port), family=family, backlog=own.count + 8, dualstack_ipv6=both)
            break
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise UserError(f"{own} can't listen at {bind}, the coordinator's port: {error.strerror}") from error
            # If another process 0 waits for its job there, this tells both that there are two.
            _say_hello_as_0(address, own)
            if time.monotonic() > ends:
                raise UserError(
                    f"{own} can't listen at port {port} of this host: another program or job uses it, or another process has "
                    "--process_id=0 too. Give --coordinator_address a free port and each process an id of its own"
                ) from error
        time.sleep(wire.RETRY_SECONDS)
    with listener:
        listener.setblocking(False)
        yield listener


def _say_hello_as_0(address: str, own: Member) -> tuple[bool, str]:
    """Connects to the coordinator's address as the other processes do.

    Returns:
      True if this process or another one of the trainer answered; otherwise False, and why not.

    Raises:
      UserError: another process 0 answered.
    """
    connection, problem = wire.greet(address, own, wire.HELLO_SECONDS)
    if connection is None:
        return False, problem or "something else answers"
    with connection:
        connection.settimeout(wire.HELLO_SECONDS)
        try:
            verdict, _, text = wire.read_line(connection).partition(" ")
        except TimeoutError:
            return True, ""
    if verdict == wire.REFUSED:
        raise UserError(text)
    return True, ""


class Host:
    """Process 0's side: accepts connections until all processes of the job are here, or says why it can't start."""

    def __init__(self, address: str, own: Member, listener: socket.socket, heartbeat_seconds: int):
        """Stores the settings; `gather` waits.

        Args:
          address: 'host:port' of the coordinator.
          own: process 0.
          listener: from `listen`.
          heartbeat_seconds: see `meet`.
        """
        self._address = address
        self._own = own
        self._listener = listener
        self._heartbeat_seconds = heartbeat_seconds
        self._selector = selectors.DefaultSelector()
        # Connections that have not yet said who they are: what they have sent so far, and when they came.
        self._strangers: dict[socket.socket, tuple[bytes, float]] = {}
        self._members: dict[socket.socket, Member] = {}
        # What to answer once the job can't start, and the ids of the processes that know it.
        self._verdict = ""
        self._told: set[int] = set()

    def gather(self, seconds: float) -> Peers:
        """Returns the connections to all processes once they are here, and tells them to go on.

        Raises:
          UserError: the processes don't form one job.
          AbsentError: not all came in time, or one was lost.
        """
        own = self._own
        with self._selector, contextlib.closing(_OwnAddress(self._address, own)) as own_address:
            self._selector.register(self._listener, selectors.EVENT_READ)
            try:
                self._wait(seconds, own_address)
            finally:
                for connection in self._strangers:
                    connection.close()
        for connection in self._members:
            connection.setblocking(True)
            wire.send(connection, f"{wire.GO} {own}")
        connections = {member.index: connection for connection, member in self._members.items()}
        return Peers(connections, {member.index: str(member) for member in (own, *self._members.values())})

    def turn_away(self) -> None:
        """Tells the processes that come within the next seconds that process 0 has failed."""
        with self._selector:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._answer_all(f"{wire.ABSENT} {_failure(self._own)}")

    def _wait(self, seconds: float, own_address: _OwnAddress) -> None:
        began = last_report = time.monotonic()
        while len(self._members) < self._own.count - 1:
            self._take_turn()
            if own_address.refusal:
                raise UserError(own_address.refusal)  # the other processes come to that process 0
            now = time.monotonic()
            if now - began > seconds:
                self._end(
                    f"{self._missing()} did not join at {self._address} within {seconds:.0f} s. See its log: it was not started, "
                    f"died, or can't reach that address{own_address.problem}. Then start the job again"
                )
            if now - last_report > wire.REPORT_SECONDS:
                waited, last_report = now - began, now
                logging.warning(
                    "waiting for %s at %s for %.0f s%s", self._missing(), self._address, waited, own_address.problem
                )

    def _take_turn(self) -> None:
        """Handles what has come, or waits a moment for it."""
        for key, _ in self._selector.select(wire.RETRY_SECONDS):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.fileobj, socket.socket):
                self._receive(key.fileobj)
        # A stranger, such as a port scan, may not stay for ever.
        now = time.monotonic()
        for connection in [c for c, (_, since) in self._strangers.items() if now - since > wire.HELLO_SECONDS]:
            self._drop(connection)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            wire.keep_alive(connection, self._heartbeat_seconds)
            self._strangers[connection] = (b"", time.monotonic())
            self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(wire.MAX_LINE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        member = self._members.get(connection)
        if member is not None:
            if not data:
                self._drop(connection)
                self._end(f"{member} was lost before all processes had joined; see its log, then start the job again")
            return
        text, since = self._strangers[connection]
        line, newline, _ = (text + data).partition(b"\n")
        if newline:
            self._meet(connection, Member.parse(line))
        elif data and len(line) < wire.MAX_LINE_BYTES:
            self._strangers[connection] = (line, since)
        else:
            self._drop(connection)

    def _meet(self, connection: socket.socket, member: Member | None) -> None:
        """Welcomes a process that has said who it is, or ends the job if it can't be part of it."""
        if member is not None:
            wire.send(connection, wire.WELCOME)
        if member is None or member.nonce == self._own.nonce:
            self._drop(connection)
        elif self._verdict:
            self._answer(connection, member)
        elif member.failed:
            self._told.add(member.index)
            self._drop(connection)
            self._answer_all(f"{wire.ABSENT} {_failure(member)}")
            raise AbsentError(_failure(member))
        else:
            problem = self._problem(member)
            del self._strangers[connection]
            self._members[connection] = member
            if problem:
                self._answer_all(f"{wire.REFUSED} {problem}")
                raise UserError(problem)

    def _problem(self, member: Member) -> str:
        """Returns why a process can't be part of this job; '' if it can."""
        own = self._own
        if member.version != own.version:
            return (
                f"{member} has version {member.version} of spmd-trainer, and {own} has {own.version}. Install the same version "
                "for all processes"
            )
        if member.count != own.count:
            return (
                f"{member} was started with --num_processes={member.count}, and {own} with --num_processes={own.count}. Start "
                "all processes with the same number"
            )
        same = next((other for other in (own, *self._members.values()) if other.index == member.index), None)
        if same is None:
            return ""
        return (
            f"two processes have --process_id={member.index}: {same.name} and {member.name}. Give each process an id of its own, "
            f"from 0 to {own.count - 1}"
        )

    def _answer_all(self, verdict: str) -> None:
        """Tells all processes why the job can't start, also those that come within the next seconds."""
        self._verdict = verdict
        for connection, member in list(self._members.items()):
            self._answer(connection, member)
        ends = time.monotonic() + wire.LINGER_SECONDS
        while not self._told.issuperset(range(1, self._own.count)) and time.monotonic() < ends:
            self._take_turn()

    def _answer(self, connection: socket.socket, member: Member) -> None:
        wire.send(connection, self._verdict)
        self._told.add(member.index)
        self._drop(connection)

    def _end(self, text: str) -> NoReturn:
        for connection in self._members:
            wire.send(connection, f"{wire.ABSENT} {text}")
        raise AbsentError(text)

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._strangers.pop(connection, None)
        self._members.pop(connection, None)
        connection.close()

    def _missing(self) -> str:
        came = {member.index for member in self._members.values()}
        missing = [str(index) for index in range(1, self._own.count) if index not in came]
        return f"process{'es' if len(missing) > 1 else ''} {', '.join(missing)} of {self._own.count}"


def _failure(member: Member) -> str:
    """Returns what a process that will not join says to the others."""
    return f"{member} of {member.count} failed before it joined: {member.failed}. Correct it, then start the job again"


class _OwnAddress:
    """Finds out in the background whether process 0 is what answers at the coordinator's address.

    Attributes:
      refusal: what another process 0 answers there; '' if there is none.
      problem: ' (and ...)' while process 0 can't reach itself there, for messages; otherwise ''.
    """

    def __init__(self, address: str, own: Member):
        self.refusal = self.problem = ""
        self._address = address
        self._own = own
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="own-address", daemon=True).start()

    def close(self) -> None:
        """Stops trying."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                reached, why = _say_hello_as_0(self._address, self._own)
            except UserError as error:
                self.refusal = str(error)
                return
            if reached:
                self.problem = ""
                return
            self.problem = f" (process 0 itself can't: {why}; it must run on the host of the coordinator's address)"
            self._stopped.wait(1.0)


def meet(address: str, own: Member, *, seconds: float, heartbeat_seconds: int) -> Peers:
    """Waits until all processes of the job are here. Called by every process, before `jax.distributed.initialize`.

    Args:
      address: 'host:port' of the coordinator, where process 0 listens.
      own: this process.
      seconds: how long to wait.
      heartbeat_seconds: silent connections are probed, so that a vanished host is noticed after about this time.

    Raises:
      UserError: the processes don't form one job, or something else uses the port.
      AbsentError: a process did not come in time, or was lost.
    """
    if own.index:
        return _join(address, own, seconds, heartbeat_seconds)
    with listen(address, own) as listener:
        return Host(address, own, listener, heartbeat_seconds).gather(seconds)


def say_failed(address: str, own: Member) -> None:
    """Tells the other processes why this one will not join, so that they don't wait for it.

    Takes `rendezvous_wire.LINGER_SECONDS` at most, less if all others that must know it are there.

    Args:
      address: 'host:port' of the coordinator.
      own: this process; `failed` says why.
    """
    if own.index == 0:
        with contextlib.suppress(UserError), listen(address, own) as listener:
            Host(address, own, listener, heartbeat_seconds=0).turn_away()
        return
    ends = time.monotonic() + wire.LINGER_SECONDS
    while (left := ends - time.monotonic()) > 0:
        connection, _ = wire.greet(address, own, left)
        if connection is not None:
            connection.close()
            return
        time.sleep(wire.RETRY_SECONDS)


def _join(address: str, own: Member, seconds: float, heartbeat_seconds: int) -> Peers:
    """Connects to process 0 and waits for its `go`."""
    began = time.monotonic()
    last_report, foreign_since, problem = began, None, ""
    while (waited := time.monotonic() - began) < seconds:
        connection, problem = wire.greet(address, own, min(wire.HELLO_SECONDS, seconds - waited))
        if connection is not None:
            wire.keep_alive(connection, heartbeat_seconds)
            return _wait_for_go(connection, address, own, seconds - waited)
        now = time.monotonic()
        # An answer that isn't process 0's stays what it is; a missing answer may come once process 0 has started.
        foreign_since = None if problem else foreign_since or now
        if foreign_since is not None and now - foreign_since > wire.BUSY_SECONDS:
            raise UserError(
                f"{own}: {address} is already in use, by another program or by a job that has started. Perhaps another process "
                f"has --process_id={own.index} too, or an old job still runs. Give each process an id of its own, from 0 to "
                f"{own.count - 1}, and each job a port of its own"
            )
        if now - last_report > wire.REPORT_SECONDS:
            logging.warning("waiting for process 0 at %s for %.0f s (%s)", address, now - began, problem)
            last_report = now
        time.sleep(wire.RETRY_SECONDS)
    raise AbsentError(
        f"process 0 did not answer at {address} within {seconds:.0f} s ({problem or 'something else answers there'}). It was not "
        "started, died, or can't be reached there; see its log, then start the job again"
    )


def _wait_for_go(connection: socket.socket, address: str, own: Member, seconds: float) -> Peers:
    # Process 0 gives up after `seconds` too, and says which processes are missing.
    connection.settimeout(seconds + 2 * wire.HELLO_SECONDS)
    try:
        verdict, _, text = wire.read_line(connection).partition(" ")
    except TimeoutError:
        verdict, text = wire.ABSENT, f"process 0 at {address} did not start the job within {seconds:.0f} s; see its log"
    if verdict == wire.GO:
        connection.settimeout(None)
        return Peers({0: connection}, {0: text, own.index: str(own)})
    connection.close()
    if verdict == wire.REFUSED:
        raise UserError(text)
    raise AbsentError(text or f"process 0 at {address} was lost before all processes had joined; see its log")
