"""What a job's processes say to each other while they meet: lines over TCP. `rendezvous` says what for."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import socket

from spmd_trainer.errors.installation import __version__

# How long a port may stay busy, or answered by something else: the job that ran there before may still be ending.
BUSY_SECONDS = 5.0
# How long a connection may take to say who it is, and process 0 to greet it.
HELLO_SECONDS = 10.0
# How long a process that knows why the job can't start stays to tell it to those that come late.
LINGER_SECONDS = 10.0
# How often a waiting process logs what it waits for.
REPORT_SECONDS = 30.0
RETRY_SECONDS = 0.2
MAX_LINE_BYTES = 16384
# A process's first word and process 0's answer; then process 0's verdict.
WELCOME = "spmd-trainer"
GO, REFUSED, ABSENT = "go", "refused", "absent"


class AbsentError(Exception):
    """A process did not join in time, or was lost before all had joined. Starting the job again may help."""


@dataclasses.dataclass(frozen=True)
class Member:
    """What a process says about itself.

    Attributes:
      index: its process id.
      count: number of processes in the job, as this process was told.
      version: version of the trainer.
      name: host and pid, for messages.
      nonce: random; tells two processes apart.
      failed: why this process will not join, on one line; '' if it will.
    """

    index: int
    count: int
    version: str = dataclasses.field(default_factory=lambda: __version__)
    name: str = dataclasses.field(default_factory=lambda: f"{socket.gethostname()}, pid {os.getpid()}")
    nonce: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))
    failed: str = ""

    def __str__(self) -> str:
        return f"process {self.index} ({self.name})"

    def line(self) -> bytes:
        """Returns the line that a process sends when it connects."""
        return f"{WELCOME} {json.dumps(dataclasses.asdict(self))}\n".encode()

    @classmethod
    def parse(cls, line: bytes) -> Member | None:
        """Returns the member that a line describes; None if the line comes from something else."""
        greeting, _, text = line.decode(errors="replace").partition(" ")
        if greeting != WELCOME:
            return None
        try:
            member = cls(**json.loads(text))
        except (ValueError, TypeError):
            return None
        return member if isinstance(member.index, int) and isinstance(member.count, int) else None


@dataclasses.dataclass(frozen=True)
class Peers:
    """The processes that this process is connected to: process 0 to all others, every other one to process 0.

    Attributes:
      connections: the connections by process id.
      names: 'process 1 (host, pid 12)' by process id.
    """

    connections: dict[int, socket.socket] = dataclasses.field(default_factory=dict)
    names: dict[int, str] = dataclasses.field(default_factory=dict)


def read_line(connection: socket.socket) -> str:
    """Returns one line without its newline, or '' if the connection is closed. Reads no byte after the newline.

    Raises:
      TimeoutError: the connection has a timeout, and no byte came in time.
    """
    line = b""
    try:
        while not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
            byte = connection.recv(1)
            if not byte:
                return ""
            line += byte
    except TimeoutError:
        raise
    except OSError:
        return ""
    return line[:-1].decode(errors="replace")


def keep_alive(connection: socket.socket, heartbeat_seconds: int) -> None:
    """Makes the kernel close a connection whose other host has vanished."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Not every operating system has these options.
    for option, value in (("TCP_KEEPIDLE", heartbeat_seconds // 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 5)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), max(1, value))


def host_and_port(address: str) -> tuple[str, int]:
    """Splits 'host:port'; an IPv6 address may stand in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def greet(address: str, own: Member, seconds: float) -> tuple[socket.socket | None, str]:
    """Returns a connection that process 0 has welcomed; otherwise None and why not, '' if something else has answered."""
    try:
        connection = socket.create_connection(host_and_port(address), timeout=seconds)
    except OSError as error:
        return None, error.strerror or str(error)
    with contextlib.ExitStack() as stack:
        stack.enter_context(connection)
        try:
            connection.sendall(own.line())
            if read_line(connection) == WELCOME:
                stack.pop_all()
                return connection, ""
        except OSError:
            pass  # closed, or silent: not process 0
    return None, ""


def send(connection: socket.socket, text: str) -> None:
    """Sends a line; a process that has gone is noticed when its connection is read."""
    with contextlib.suppress(OSError):
        connection.sendall(f"{text}\n".encode())
