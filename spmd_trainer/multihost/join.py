"""Connects the processes of a job before any device is initialized: all join the job, or each reports why the job can't start.

Process 0 starts JAX's coordination service. Each process announces itself there, and process 0 answers all of them with one
verdict: go, refused (they don't form one job), or absent (a process is missing or failed). JAX gets the client only after a go.

If the launcher gives every process the same secret in SPMD_TRAINER_JOB_TOKEN, all messages are signed with it, and messages
without a valid signature are ignored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import itertools
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable

import jax
from absl import logging

from spmd_trainer.errors import UserError, terminal
from spmd_trainer.errors.installation import __version__
from spmd_trainer.multihost import service
from spmd_trainer.sharding.messages import named_text
from spmd_trainer.storage import json_values

_PREFIX = "spmd_trainer/join"
_HELLO, _TOLD, _VERDICT = (f"{_PREFIX}/{name}" for name in ("hello", "told", "verdict"))
_GO, _REFUSED, _ABSENT = "go", "refused", "absent"
_TOKEN = "SPMD_TRAINER_JOB_TOKEN"  # the name of an environment variable
# How often a waiting process announces itself again, and after how long a silent process counts as lost.
_BEAT_SECONDS = 2.0
_SILENT_SECONDS = 10.0
# How long process 0 stays, to tell late processes why the job can't start.
_LINGER_SECONDS = 10.0
# How often a waiting process logs what it waits for.
REPORT_SECONDS = 30.0
_RETRY_SECONDS = 0.1
_LONGEST_TEXT = 2000


class AbsentError(Exception):
    """A process did not join the job in time, or failed or fell silent before all had joined. Starting the job again may help."""


@dataclasses.dataclass(frozen=True)
class Member:
    """The announcement of a process that joins a job.

    Attributes:
      index: process id.
      count: number of processes in the job, according to the settings of this process.
      version: version of the trainer.
      name: host and pid, for messages.
      nonce: random text that distinguishes two processes with the same process id.
      failed: the reason why this process will not join the job, on one line; '' if it will join.
      beat: number of earlier announcements of this process.
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
    def parse(cls, key: str, text: str) -> Member | None:
        """Returns the member that `text`, the value of `key` in the key-value store, announces; None if the text is invalid."""
        said = opened(key, text)
        if said is None:
            return None
        try:
            member = cls(**json_values.parse_object(said))
        except (ValueError, TypeError):
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
        key = f"{_HELLO}/{self.nonce}"
        client.key_value_set(key, sealed(key, json.dumps(dataclasses.asdict(self))), allow_overwrite=True)


def one_line(text: object) -> str:
    """Returns a text from another process as one line without control characters, cut to `_LONGEST_TEXT` characters."""
    return terminal.visible(" ".join(str(text).split()))[:_LONGEST_TEXT]


def meet(address: str, own: Member, *, bind_address: str | None = None, seconds: float) -> dict[int, str]:
    """Waits until all processes have joined the job, and makes JAX use the coordination service that connects them.

    Args:
      address: 'host:port' of the coordinator, process 0.
      own: this process.
      bind_address: 'host:port' where process 0 listens; None for `address`.
      seconds: how long to wait.

    Returns:
      {process id: name of the process, e.g. 'process 1 (host, pid 12)'}.

    Raises:
      UserError: the processes don't form one job, or something else uses the port.
      AbsentError: a process did not join in time, or stopped answering.
    """
    judge: threading.Thread | None = None
    refusal: UserError | None = None
    elsewhere = threading.Event()
    if own.index == 0:
        try:
            client = service.serve(address, bind_address, own.count)
            judge = threading.Thread(target=_judge, args=(client, address, own, seconds, elsewhere), name="join")
            judge.start()
        except UserError as error:
            refusal, seconds = error, _BEAT_SECONDS  # unless another process 0 answers there, and says more
    try:
        names = _join(address, own, seconds)
    except AbsentError:
        if refusal is not None:
            raise refusal from None
        raise
    finally:
        if judge is not None:
            if service.look(client, _VERDICT) is None:  # so the verdict on this process came from another process 0
                elsewhere.set()
            judge.join()
    try:
        client = service.connect(address, own.index)
    except ConnectionError as error:
        raise AbsentError(f"process 0 at {address} was lost when all processes had joined; see its log") from error
    service.adopt(client, address, own.index, own.count)
    return names


def say_failed(address: str, own: Member, bind_address: str | None = None) -> None:
    """Tells the other processes why this one will not join, so that they don't wait for it. Takes `_LINGER_SECONDS` at most.

    Args:
      address: 'host:port' of the coordinator.
      own: this process; `failed` says why.
      bind_address: 'host:port' where process 0 listens; None for `address`.
    """
    with contextlib.suppress(UserError, AbsentError):
        meet(address, own, bind_address=bind_address, seconds=_LINGER_SECONDS)


def _judge(client: service.Client, address: str, own: Member, seconds: float, elsewhere: threading.Event) -> None:
    """Runs on process 0: waits for all processes, and publishes the verdict (go, refused or absent).

    If the verdict is not go, returns only when all processes have read it, or after `_LINGER_SECONDS`. Publishes nothing once
    `elsewhere` is set, which means that a second process with the id 0 serves `address`, and gave this process its verdict.
    """
    members: dict[str, Member] = {}
    try:
        verdict, text = _decided(client, address, own, seconds, elsewhere, members)
    except Exception as error:  # otherwise all processes would wait for the verdict
        logging.exception("process 0 could not decide whether the job starts")
        verdict, text = _ABSENT, f"{own} failed before all had joined: {type(error).__name__}: {error}"
    if elsewhere.is_set():
        return
    client.key_value_set(_VERDICT, sealed(_VERDICT, f"{verdict} {text}"), allow_overwrite=True)
    ends = time.monotonic() + _LINGER_SECONDS
    while verdict != _GO and time.monotonic() < ends:
        told = {key.rsplit("/", 1)[1] for key, _ in client.key_value_dir_get(_TOLD)}
        _take(client, members)
        here = {member.index for nonce, member in members.items() if nonce in told}
        if told.issuperset(members) and here.issuperset(range(own.count)):
            return
        time.sleep(_RETRY_SECONDS)


def _decided(
    client: service.Client,
    address: str,
    own: Member,
    seconds: float,
    elsewhere: threading.Event,
    members: dict[str, Member],
) -> tuple[str, str]:
    """Waits for all processes, or until `elsewhere` is set. Fills `members`, {nonce: member}. Returns (verdict, its text)."""
    began = last_report = time.monotonic()
    came: dict[str, float] = {}
    heard: dict[str, float] = {}
    while not elsewhere.is_set():
        now = time.monotonic()
        news = _take(client, members)
        heard.update(dict.fromkeys(news, now))
        came = dict.fromkeys(news, now) | came
        for nonce in news:
            if failed := members[nonce].failed:
                return _ABSENT, (
                    f"{members[nonce]} of {own.count} failed before it joined: {failed}. Correct it, then start the job again"
                )
            # A restarted process has the id of one that is gone: two conflict only if both were heard after the later one came.
            there = [
                other
                for name, other in members.items()
                if min(heard[name], heard[nonce]) > max(came[name], came[nonce])
            ]
            if problem := _problem(members[nonce], own, there):
                return _REFUSED, problem
        missing = sorted(set(range(own.count)) - {member.index for member in members.values()})
        if not missing and len(members) == own.count:
            names = {member.index: str(member) for member in members.values()}
            return _GO, json.dumps({"names": names, "nonces": list(members)})
        lost = next((nonce for nonce, since in heard.items() if now - since > _SILENT_SECONDS), None)
        if lost is not None:
            return (
                _ABSENT,
                f"{members[lost]} was lost before all processes had joined; see its log, then start the job again",
            )
        who = f"{named_text(missing, 'process', 'processes')} of {own.count}"
        if now - began > seconds:
            return _ABSENT, (
                f"{who} did not join at {address} within {seconds:.0f} s. See its log: it was not started, died, or can't reach "
                "that address, which must be one of the host of process 0. Then start the job again"
            )
        if now - last_report > REPORT_SECONDS:
            last_report = now
            logging.warning("waiting for %s at %s for %.0f s", who, address, now - began)
        time.sleep(_RETRY_SECONDS)
    return _ABSENT, ""


def _take(client: service.Client, members: dict[str, Member]) -> list[str]:
    """Adds the processes' announcements to `members`. Returns the nonces of the processes with a new announcement."""
    news = []
    for key, text in client.key_value_dir_get(_HELLO):
        member = Member.parse(key, text)
        if member is not None and key == f"{_HELLO}/{member.nonce}" and members.get(member.nonce) != member:
            members[member.nonce] = member
            news.append(member.nonce)
    return news


def _problem(member: Member, own: Member, members: Iterable[Member]) -> str:
    """Returns text that says why a process can't be part of this job; '' if it can."""
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
    same = next((other for other in members if other.index == member.index and other.nonce != member.nonce), None)
    if same is None:
        return ""
    return (
        f"two processes have --process_id={member.index}: {same.name} and {member.name}. Give each process an id of its own, "
        f"from 0 to {own.count - 1}"
    )


def _join(address: str, own: Member, seconds: float) -> dict[int, str]:
    """Announces this process to process 0. Returns {process id: name} of all processes once process 0 says go.

    Raises:
      UserError: process 0 refuses the job, or something else uses the port.
      AbsentError: process 0 did not answer in time or was lost, or says that a process is missing.
    """
    began = last_report = time.monotonic()
    foreign_since: float | None = None
    while (waited := time.monotonic() - began) < seconds:
        problem = service.answers(address)
        if not problem:
            try:
                return _told(service.connect(address, 0), address, own, seconds - waited)
            except ConnectionError:
                foreign_since = foreign_since or time.monotonic()
                problem = "something else answers there"
        if foreign_since is not None and time.monotonic() - foreign_since > service.BUSY_SECONDS:
            raise UserError(
                f"{own}: {address} is already in use, by another program or by a job that has started. Perhaps another process "
                f"has --process_id={own.index} too, or an old job still runs. Give each process an id of its own, from 0 to "
                f"{own.count - 1}, and each job a port of its own"
            )
        if own.index and time.monotonic() - last_report > REPORT_SECONDS:
            last_report = time.monotonic()
            logging.warning("waiting for process 0 at %s for %.0f s (%s)", address, waited, problem)
        time.sleep(_RETRY_SECONDS)
    raise AbsentError(
        f"process 0 did not answer at {address} within {seconds:.0f} s ({problem}). It was not started, died, or can't be "
        "reached there; see its log, then start the job again"
    )


def _told(client: service.Client, address: str, own: Member, seconds: float) -> dict[int, str]:
    """Announces this process until process 0 answers. Returns {process id: name} of all processes if process 0 says go.

    Raises:
      UserError: process 0 says that the processes don't form one job.
      ConnectionError: process 0 runs a job without this process, perhaps an older job that is about to end.
      AbsentError: process 0 says that a process is missing, or process 0 itself is lost.
    """
    # Process 0 gives up after `seconds` too, and says which processes are missing.
    ends, text = time.monotonic() + seconds + 2 * _LINGER_SECONDS, None
    beats = itertools.count()
    try:
        while text is None and time.monotonic() < ends:
            beat = dataclasses.replace(own, beat=next(beats))
            if not service.briefly(lambda beat=beat: beat.say(client), _SILENT_SECONDS):  # type: ignore[misc]
                raise AbsentError(f"process 0 at {address} has not answered for {_SILENT_SECONDS:g} s; see its log")
            said = service.wait_for(client, _VERDICT, _BEAT_SECONDS)
            text = None if said is None else opened(_VERDICT, said)
            if said is not None and text is None:  # not process 0's
                time.sleep(_BEAT_SECONDS)
        client.key_value_set(f"{_TOLD}/{own.nonce}", "", allow_overwrite=True)
    except jax.errors.JaxRuntimeError as error:
        raise AbsentError(f"process 0 at {address} was lost before all processes had joined; see its log") from error
    verdict, _, rest = (text or "").partition(" ")
    if verdict == _GO:
        job = json.loads(rest)
        if own.nonce not in job["nonces"]:
            raise ConnectionError(f"a job without this process runs at {address}")
        return {int(index): one_line(name) for index, name in job["names"].items()}
    if verdict == _REFUSED:
        raise UserError(one_line(rest))
    raise AbsentError(one_line(rest) or f"process 0 at {address} did not start the job in time; see its log")


def sealed(key: str, text: str) -> str:
    """Returns a text with its signature, as it is stored at a key; without a job token, '-' stands for the signature."""
    token = os.environ.get(_TOKEN, "")
    return f"{_signature(token, key, text)} {text}" if token else f"- {text}"


def opened(key: str, said: str) -> str | None:
    """Returns the text that `sealed` signed. `said`: the value of `key`. Returns None if the signature is wrong."""
    signature, _, text = said.partition(" ")
    token = os.environ.get(_TOKEN, "")
    right = _signature(token, key, text) if token else "-"
    return text if hmac.compare_digest(signature.encode(), right.encode()) else None


def _signature(token: str, key: str, text: str) -> str:
    return hmac.new(token.encode(), f"{key}\n{text}".encode(), hashlib.sha256).hexdigest()
