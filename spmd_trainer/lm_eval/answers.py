"""Finished requests, in a file that grows, so that a job that was killed runs no request again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from etils import epath

from spmd_trainer.sharding.messages import short_hash
from spmd_trainer.storage.append import GrowingFile, open_append, read_joined

ANSWERS_FILE = "answers.jsonl"


def request_key(*parts: Any) -> str:
    """Returns the key of a request: a checksum of JSON values that its answer depends on, the model included."""
    return short_hash(json.dumps(parts, sort_keys=True), 32)


class Answers:
    """The answers of one model state: lines {"key": ..., "answer": ...}. Only one process may create and use this object."""

    def __init__(self, directory: epath.Path):
        """Reads what is there; a line that is incomplete because the process was killed is ignored.

        Args:
          directory: where the file is; made when the first answer is added.
        """
        path = directory / ANSWERS_FILE
        text = read_joined(path)
        self._known: dict[str, Any] = {}
        for line in text.splitlines():
            try:
                record = json.loads(line)
                self._known[record["key"]] = record["answer"]
            except (json.JSONDecodeError, KeyError, TypeError):
                continue
        self._file: GrowingFile = open_append(path)
        self._ends_line = not text or text.endswith("\n")

    def known(self, keys: Iterable[str]) -> dict[str, Any]:
        """Returns the answers to those of the requests that are finished, by key."""
        return {key: self._known[key] for key in keys if key in self._known}

    def add(self, answers: Mapping[str, Any]) -> None:
        """Adds answers, JSON values by key, to the end of the file."""
        lines = "".join(json.dumps({"key": key, "answer": answer}) + "\n" for key, answer in answers.items())
        self._file.write((lines if self._ends_line else "\n" + lines).encode())
        self._ends_line = True
        self._known.update(answers)

    def flush(self) -> None:
        """Makes all answers visible in an object store."""
        self._file.flush()
