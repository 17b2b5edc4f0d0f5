"""How the processes of a job find each other, before any device is touched: all come, or each says why the job can't start.

Process 0 starts JAX's coordination service. Each process says there who it is, and process 0 answers all of them with one
verdict: go, refused (they don't form one job), or absent (one is missing or failed). Only then does JAX learn of the client.

If the launcher gives every process the same secret in SPMD_TRAINER_JOB_TOKEN, what a process says is signed with it, and what
is not signed is ignored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from typing import NoReturn

import jax
from absl import logging

from spmd_trainer.errors import UserError
from spmd_trainer.errors.installation import __version__
from spmd_trainer.multihost import service
from spmd_trainer.sharding.messages import named_text

_PREFIX = "spmd_trainer/join"
_HELLO, _TOLD, _VERDICT, _SERVED_BY = (f"{_PREFIX}/{name}" for name in ("hello", "told", "verdict", "served_by"))
_GO, _REFUSED, _ABSENT = "go", "refused", "absent"
_TOKEN = "SPMD_TRAINER_JOB_TOKEN"  # the name of a variable
# How often a waiting process says that it is still there, and after how long a silent one is lost.
_BEAT_SECONDS = 2.0
_SILENT_SECONDS = 10.0
# How long process 0 stays to tell those that come late why the job can't start.
_LINGER_SECONDS = 10.0
# How often a waiting process logs what it waits for.
REPORT_SECONDS = 30.0
_RETRY_SECONDS = 0.1
LONGEST_TEXT = 2000


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
      beat: counts the times that it has said so.
    """

    index: int
    count: int
    version: str = dataclasses.field(default_factory=lambda: __version__)
    name: str = dataclasses.field(default_factory=lambda: f"{socket.gethostname()}, pid {os.getpid()}")
    nonce: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))
    failed: str = ""
    beat: int = 0

    def __str__(self) -> str:
        return f"process {self.index} ({self.name})"

    @classmethod
    def parse(cls, text: str) -> Member | None:
        """Returns the member that a text describes; None if the text comes from something else."""
        said = opened(text)
        if said is None or not said.startswith("{"):
            return None
        try:
            member = cls(**json.loads(said))
        except (ValueError, TypeError, RecursionError):
            return None
        if (
            not isinstance(member.index, int)
            or not isinstance(member.count, int)
            or not 0 <= member.index < member.count
        ):
            return None
        return dataclasses.replace(
            member, version=one_line(member.version), name=one_line(member.name), failed=one_line(member.failed)
        )

    def say(self, client: service.Client) -> None:
        """Tells process 0."""
        client.key_value_set(
            f"{_HELLO}/{self.nonce}", sealed(json.dumps(dataclasses.asdict(self))), allow_overwrite=True
        )


def one_line(text: object) -> str:
    """Returns a text from another process as one line that a terminal shows as it is."""
    printable = "".join(letter if letter.isprintable() else " " for letter in str(text))
    return " ".join(printable.split())[:LONGEST_TEXT]


def meet(
    address: str,
    own: Member,
    *,
    bind_address: str | None = None,
    seconds: float,
    local_device_ids: Sequence[int] | None = None,
) -> dict[int, str]:
    """Waits until all processes of the job are here, and makes JAX use the channel that they met over.

    Args:
      address: 'host:port' of the coordinator, process 0.
      own: this process.
      bind_address: 'host:port' where process 0 listens; None for `address`.
      seconds: how long to wait.
      local_device_ids: the accelerators of this process; None for all.

    Returns:
      'process 1 (host, pid 12)' by process id.

    Raises:
      UserError: the processes don't form one job, or something else uses the port.
      AbsentError: a process did not come in time, or was lost.
    """
    if own.index:
        names = _join(address, own, seconds)
    else:
        try:
            client = service.serve(address, bind_address, own.count)
        except UserError:
            with contextlib.suppress(ConnectionError, jax.errors.JaxRuntimeError):
                if refusal := _refusal_of_another_0(address, own):
                    raise UserError(refusal) from None
            raise
        names = _Host(address, own, client).gather(seconds)
    service.adopt(service.connect(address, own.index), address, own.index, own.count, local_device_ids)
    return names


def say_failed(address: str, own: Member, bind_address: str | None = None) -> None:
    """Tells the other processes why this one will not join, so that they don't wait for it.

    Takes `_LINGER_SECONDS` at most, less if all others that must know it are there.

    Args:
      address: 'host:port' of the coordinator.
      own: this process; `failed` says why.
      bind_address: 'host:port' where process 0 listens; None for `address`.
    """
    if own.index == 0:
        with contextlib.suppress(UserError):
            _Host(address, own, service.serve(address, bind_address, own.count)).tell_all(_ABSENT, _failure(own))
        return
    ends = time.monotonic() + _LINGER_SECONDS
    while time.monotonic() < ends:
        if not service.answers(address):
            with contextlib.suppress(ConnectionError, jax.errors.JaxRuntimeError):
                client = service.connect(address, 0)
                own.say(client)
                service.wait_for(client, _VERDICT, max(0.1, ends - time.monotonic()))
            return
        time.sleep(_RETRY_SECONDS)


class _Host:
    """Process 0's side: waits until all processes of the job are here, or says why it can't start."""

    def __init__(self, address: str, own: Member, client: service.Client):
        self._address = address
        self._own = own
        self._client = client
        client.key_value_set(_SERVED_BY, own.nonce)
        self._members: dict[str, Member] = {}
        self._heard: dict[str, float] = {}

    def gather(self, seconds: float) -> dict[int, str]:
        """Returns the names of all processes once they are here, and tells them to go on.

        Raises:
          UserError: the processes don't form one job.
          AbsentError: not all came in time, or one was lost.
        """
        with contextlib.closing(_OwnAddress(self._address, self._own)) as own_address:
            self._wait(seconds, own_address)
        names = {member.index: str(member) for member in (self._own, *self._members.values())}
        nonces = [self._own.nonce, *self._members]
        self._publish(_GO, json.dumps({"names": names, "nonces": nonces}))
        return names

    def tell_all(self, verdict: str, text: str) -> None:
        """Tells all processes why the job can't start, also those that come within the next seconds."""
        self._publish(verdict, text)
        ends = time.monotonic() + _LINGER_SECONDS
        while time.monotonic() < ends:
            told = {key.rsplit("/", 1)[1] for key, _ in self._client.key_value_dir_get(_TOLD)}
            self._take()
            done = {member.index for nonce, member in self._members.items() if nonce in told or member.failed}
            if done.issuperset(range(1, self._own.count)) and told.issuperset(
                nonce for nonce, member in self._members.items() if not member.failed
            ):
                return
            time.sleep(_RETRY_SECONDS)

    def _publish(self, verdict: str, text: str) -> None:
        self._client.key_value_set(_VERDICT, sealed(f"{verdict} {text}"))

    def _wait(self, seconds: float, own_address: _OwnAddress) -> None:
        began = last_report = time.monotonic()
        while len(self._members) < self._own.count - 1:
            for nonce in self._take():
                if self._members[nonce].failed:
                    self._end(_ABSENT, _failure(self._members[nonce]))
                if problem := self._problem(self._members[nonce]):
                    self._end(_REFUSED, problem)
            now = time.monotonic()
            if own_address.refusal:  # the other processes come to that process 0
                raise UserError(own_address.refusal)
            lost = next((nonce for nonce, heard in self._heard.items() if now - heard > _SILENT_SECONDS), None)
            if lost is not None:
                self._end(
                    _ABSENT,
                    f"{self._members[lost]} was lost before all processes had joined; see its log, then start the job again",
                )
            if now - began > seconds:
                self._end(
                    _ABSENT,
                    f"{self._missing()} did not join at {self._address} within {seconds:.0f} s. See its log: it was not started, "
                    f"died, or can't reach that address{own_address.problem}. Then start the job again",
                )
            if now - last_report > REPORT_SECONDS:
                waited, last_report = now - began, now
                logging.warning(
                    "waiting for %s at %s for %.0f s%s", self._missing(), self._address, waited, own_address.problem
                )
            time.sleep(_RETRY_SECONDS)

    def _take(self) -> list[str]:
        """Takes what the processes say; returns those that are new or have failed since."""
        news = []
        for key, text in self._client.key_value_dir_get(_HELLO):
            member = Member.parse(text)
            nonce = key.rsplit("/", 1)[1]
            if member is None or member.nonce != nonce or nonce == self._own.nonce:
                continue
            before = self._members.get(nonce)
            if before is None or member.beat != before.beat or member.failed:
                self._heard[nonce] = time.monotonic()
            if before is None or member.failed != before.failed:
                news.append(nonce)
            self._members[nonce] = member
        return news

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
        others = (own, *(other for other in self._members.values() if other.nonce != member.nonce))
        same = next((other for other in others if other.index == member.index), None)
        if same is None:
            return ""
        return (
            f"two processes have --process_id={member.index}: {same.name} and {member.name}. Give each process an id of its own, "
            f"from 0 to {own.count - 1}"
        )

    def _end(self, verdict: str, text: str) -> NoReturn:
        self.tell_all(verdict, text)
        raise UserError(text) if verdict == _REFUSED else AbsentError(text)

    def _missing(self) -> str:
        came = {member.index for member in self._members.values()}
        missing = [index for index in range(1, self._own.count) if index not in came]
        return f"{named_text(missing, 'process', 'processes')} of {self._own.count}"


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
        while not self._stopped.wait(_RETRY_SECONDS):
            why = service.answers(self._address)
            if not why:
                try:
                    self.refusal = _refusal_of_another_0(self._address, self._own)
                    self.problem = ""
                    return
                except (ConnectionError, jax.errors.JaxRuntimeError) as error:
                    why = str(error).partition("\n")[0]
            self.problem = f" (process 0 itself can't: {why}; it must run on the host of the coordinator's address)"
            self._stopped.wait(1.0)


def _refusal_of_another_0(address: str, own: Member) -> str:
    """Returns what another process 0 answers at the coordinator's address; '' if that is this one, or has a job that runs.

    Raises:
      ConnectionError: no process 0 answers there.
    """
    client = service.connect(address, 0)
    if service.wait_for(client, _SERVED_BY, _BEAT_SECONDS) == own.nonce:
        return ""
    verdict, text = _wait_for_verdict(client, own, _LINGER_SECONDS)
    return text if verdict == _REFUSED else ""


def _join(address: str, own: Member, seconds: float) -> dict[int, str]:
    """Says to process 0 that this process is here, and waits for its `go`."""
    began = last_report = time.monotonic()
    foreign_since: float | None = None
    problem = ""
    while (waited := time.monotonic() - began) < seconds:
        problem = service.answers(address)
        if not problem:
            try:
                client = service.connect(address, 0)
                return _told(client, address, own, seconds - waited)
            except ConnectionError:
                foreign_since = foreign_since or time.monotonic()
        if foreign_since is not None and time.monotonic() - foreign_since > service.BUSY_SECONDS:
            raise UserError(_in_use(address, own))
        if time.monotonic() - last_report > REPORT_SECONDS:
            last_report = time.monotonic()
            logging.warning("waiting for process 0 at %s for %.0f s (%s)", address, waited, problem)
        time.sleep(_RETRY_SECONDS)
    raise AbsentError(
        f"process 0 did not answer at {address} within {seconds:.0f} s ({problem or 'something else answers there'}). It was not "
        "started, died, or can't be reached there; see its log, then start the job again"
    )


def _in_use(address: str, own: Member) -> str:
    return (
        f"{own}: {address} is already in use, by another program or by a job that has started. Perhaps another process "
        f"has --process_id={own.index} too, or an old job still runs. Give each process an id of its own, from 0 to "
        f"{own.count - 1}, and each job a port of its own"
    )


def _told(client: service.Client, address: str, own: Member, seconds: float) -> dict[int, str]:
    """Returns the names of all processes once process 0 says go.

    Raises:
      UserError: it says that they don't form one job, or it has a job without this process.
      AbsentError: it says that one is missing, or is lost itself.
    """
    try:
        # Process 0 gives up after `seconds` too, and says which processes are missing.
        verdict, text = _wait_for_verdict(client, own, seconds + 2 * _LINGER_SECONDS)
    except jax.errors.JaxRuntimeError as error:
        raise AbsentError(f"process 0 at {address} was lost before all processes had joined; see its log") from error
    if verdict == _GO:
        job = json.loads(text)
        if own.nonce not in job["nonces"]:
            raise UserError(_in_use(address, own))
        return {int(index): one_line(name) for index, name in job["names"].items()}
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        client.key_value_set(f"{_TOLD}/{own.nonce}", "")
    if verdict == _REFUSED:
        raise UserError(text)
    raise AbsentError(text or f"process 0 at {address} did not start the job within {seconds:.0f} s; see its log")


def _wait_for_verdict(client: service.Client, own: Member, seconds: float) -> tuple[str, str]:
    """Returns process 0's verdict and its text, and says until then that this process is here; two '' if none comes."""
    ends = time.monotonic() + seconds
    beat = 0
    while time.monotonic() < ends:
        dataclasses.replace(own, beat=beat).say(client)
        beat += 1
        said = service.wait_for(client, _VERDICT, _BEAT_SECONDS)
        text = None if said is None else opened(said)
        if text is not None:
            verdict, _, rest = text.partition(" ")
            return verdict, rest if verdict == _GO else one_line(rest)
        if said is not None:  # not process 0's
            time.sleep(_BEAT_SECONDS)
    return "", ""


def sealed(text: str) -> str:
    """Returns a text with its signature, if the job has a token."""
    token = os.environ.get(_TOKEN, "")
    return f"{_signature(token, text)} {text}" if token else f"- {text}"


def opened(said: str) -> str | None:
    """Returns the text of what another process sealed; None if its signature is wrong."""
    signature, _, text = said.partition(" ")
    token = os.environ.get(_TOKEN, "")
    right = _signature(token, text) if token else "-"
    return text if hmac.compare_digest(signature.encode(), right.encode()) else None


def _signature(token: str, text: str) -> str:
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()
