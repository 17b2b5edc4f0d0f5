"""Retries storage calls after transient failures: a 503, a reset connection, an I/O error of a network disk."""

from __future__ import annotations

import concurrent.futures
import errno
import math
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from absl import logging

_Result = TypeVar("_Result")

# Attempts that outlast an outage of a minute: the waits before them are 1, 2, 4, 8, 16, 30 and 30 s.
OUTAGE_ATTEMPTS = 8
# Maximum wait in seconds, so that a call resumes soon after an outage.
_LONGEST_WAIT = 30.0
# Time within which a service must give its first answer to a process.
FIRST_ANSWER_SECONDS = 15.0
# Marks the error of a call whose attempts are exhausted.
_TRIED_AGAIN = "_spmd_trainer_tried_again"
# Missing paths, wrong kinds of paths and missing permissions don't change within seconds.
_LASTING = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError)
_LASTING_NUMBERS = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EINVAL,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOSPC,
    errno.ENOTEMPTY,
    errno.ENOTSUP,
    errno.EROFS,
    errno.EXDEV,
}
# Transient HTTP statuses: request timeout, too early, too many requests; and 5xx, except "not implemented" and "version not
# supported".
_PASSING_STATUS = {408, 425, 429}
_LASTING_STATUS = {501, 505}
# gcsfs raises a plain OSError for a 403, with the service's text.
_NOT_ALLOWED_TEXT = re.compile(
    r"forbidden|permission|unauthori[sz]ed|credential|access ?denied|expired ?token|invalid ?access ?key|"
    r"signature ?does ?not ?match|bucket does not exist|NoSuchBucket|HTTP response code: 40[0134]",
    re.IGNORECASE,
)
# TensorStore raises ValueError or RuntimeError for every status; the status begins the text.
_PASSING_TEXT = re.compile(
    r"\b(UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED)\b|HTTP response code: (408|429|5\d\d)|"
    r"CURL error|connection (was )?(reset|aborted|closed)|server disconnected|timed out",
    re.IGNORECASE,
)
# Transient errors of HTTP libraries that need not be OSErrors, by class name, because the libraries are optional.
_PASSING_CLASSES = {
    "ClientConnectionError",
    "ClientPayloadError",
    "ConnectError",
    "ConnectTimeout",
    "ConnectTimeoutError",
    "ConnectionClosedError",
    "EndpointConnectionError",
    "FSTimeoutError",
    "HTTPClientError",
    "IncompleteRead",
    "IncompleteReadError",
    "ReadError",
    "ReadTimeout",
    "ReadTimeoutError",
    "RemoteDisconnected",
    "RemoteProtocolError",
    "ResponseStreamingError",
    "ServerDisconnectedError",
    "TransportError",
}
# Credential errors are permanent too.
CREDENTIALS_CLASSES = {
    "DefaultCredentialsError",
    "NoCredentialsError",
    "PartialCredentialsError",
    "RefreshError",
    "TokenRetrievalError",
    "UnauthorizedSSOTokenError",
}


class StoreError(OSError):
    """Wraps an error of an object store library that is not an OSError. The library's error is the `__cause__`."""


def retry(
    fn: Callable[[], _Result], *, what: str, attempts: int = 5, first_wait: float = 1.0, until: float = math.inf
) -> _Result:
    """Calls `fn` until it succeeds, and returns its result. Waits after transient errors, each time twice as long, up to 30 s.

    Args:
      fn: the function to call; must be safe to repeat after an interruption.
      what: description of the call, e.g. 'reading gs://b/run/checkpoints/12/manifest.json'; begins the log lines.
      attempts: maximum number of calls. `OUTAGE_ATTEMPTS` outlasts an outage of a minute.
      first_wait: mean seconds before the second call. All waits are random, within 25% of their mean.
      until: value of `time.monotonic()` after which `fn` is not called again. The first call is always made.

    Raises:
      Exception: the error of the last attempt, with a note that says how often `fn` was called. An error that is not transient
        (see `is_transient`), or that a nested `retry` has given up on, is raised at once.
    """
    started = time.monotonic()
    for attempt in range(1, attempts + 1):
        try:
            return fn()
        except Exception as error:
            # Object store paths retry by themselves; retrying again would multiply the waits.
            if not is_transient(error) or any(getattr(link, _TRIED_AGAIN, False) for link in chain(error)):
                raise
            wait = min(_LONGEST_WAIT, first_wait * 2 ** (attempt - 1)) * random.uniform(0.75, 1.25)
            if attempt == attempts or time.monotonic() + wait > until:
                error.add_note(f"{what} failed {attempt} times within {time.monotonic() - started:.0f} s")
                setattr(error, _TRIED_AGAIN, True)
                raise
            logging.warning(
                "%s failed (%s); attempt %d of %d in %.1f s", what, summary(error), attempt + 1, attempts, wait
            )
            time.sleep(wait)
    raise ValueError(f"attempts must be 1 or more, not {attempts}")


class FirstAnswer:
    """Limits the wait for a service's first answer to this process.

    Client libraries keep trying for minutes, which is too long for a user who waits for a run to start.

    Attributes:
      has_come: True once the service has answered, even with an error. Later outages are handled by `retry` alone.
    """

    def __init__(self, service: str):
        """`service`: the service's name in error messages, e.g. 'gs://'."""
        self.has_come = False
        self._service = service
        # A service that did not answer is not asked again at once, e.g. for the names near one that can't be read.
        self._silent_until = -math.inf

    def wait_for(self, fn: Callable[[], _Result], *, what: str, attempts: int) -> _Result:
        """Calls `fn` as `retry` does, in a thread that is abandoned if the service doesn't answer.

        Raises:
          StoreError: the service did not answer within `FIRST_ANSWER_SECONDS`.
          Exception: any error that `retry` raises.
        """
        began = time.monotonic()
        answer: concurrent.futures.Future[_Result] = concurrent.futures.Future()

        def ask() -> None:
            try:
                answer.set_result(retry(fn, what=what, attempts=attempts, until=began + FIRST_ANSWER_SECONDS))
            except BaseException as error:
                answer.set_exception(error)

        if began >= self._silent_until:
            threading.Thread(target=ask, name=what, daemon=True).start()
            concurrent.futures.wait([answer], FIRST_ANSWER_SECONDS)
        if not answer.done():
            if began >= self._silent_until:
                self._silent_until = time.monotonic() + FIRST_ANSWER_SECONDS
            error = StoreError(f"{self._service} has not answered within {FIRST_ANSWER_SECONDS:g} s")
            setattr(error, _TRIED_AGAIN, True)
            raise error
        failure = answer.exception()
        self.has_come = failure is None or not is_transient(failure) or http_status(failure) is not None
        return answer.result()


def is_transient(error: BaseException) -> bool:
    """Returns True if the same call may succeed later: an I/O error, HTTP 429 or 5xx, a cut connection, a timeout.

    A missing file, missing permission, bad credentials, a full disk and errors unrelated to I/O are not transient.
    """
    if isinstance(error, StoreError) and error.__cause__ is not None:
        return is_transient(error.__cause__)
    links = list(chain(error))
    if any(isinstance(link, _LASTING) or type(link).__name__ in CREDENTIALS_CLASSES for link in links):
        return False
    status = next((found for link in links if (found := http_status(link)) is not None), None)
    if status is not None:
        return status in _PASSING_STATUS or (status >= 500 and status not in _LASTING_STATUS)
    if any(isinstance(link, OSError) and link.errno in _LASTING_NUMBERS for link in links):
        return False
    if any(type(link).__name__ in _PASSING_CLASSES for link in links):
        return True
    text = str(error)
    if _NOT_ALLOWED_TEXT.search(text):
        return False
    if isinstance(error, OSError):
        return True
    return isinstance(error, ValueError | RuntimeError) and _PASSING_TEXT.search(text) is not None


def http_status(error: BaseException | None) -> int | None:
    """Returns the HTTP status of an error of gcsfs, aiohttp, botocore or huggingface_hub; None if it has none."""
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):
        metadata = response.get("ResponseMetadata")
        found = metadata.get("HTTPStatusCode") if isinstance(metadata, Mapping) else None
    else:
        found = getattr(error, "status", None) or getattr(error, "code", None) or getattr(response, "status_code", None)
    try:
        return int(found) if found is not None and 100 <= int(found) < 600 else None
    except (TypeError, ValueError):
        return None


def summary(error: BaseException) -> str:
    """Returns the type and first line of an error, e.g. 'HttpError: Service Unavailable, 503'."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yields an error and its `__cause__`s, but no errors that were merely being handled when it was raised."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__
