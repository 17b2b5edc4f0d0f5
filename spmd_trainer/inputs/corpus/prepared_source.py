"""Tokenizes a corpus in the background of a run, once for all its processes, which then read tokens instead of text.

A run begins by reading text, because the first window of a global shuffle needs documents from all files. Meanwhile each
process of the job tokenizes its share of the corpus, in worker processes, into a token store that all processes can read. Once
the store is finished, each process reads further documents as tokens. The batches are the same either way, so training never
waits, and the processes may switch at different times. If tokenizing fails in one process, because a record is bad or the disk
is full, all processes of the job keep reading text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
from absl import logging
from etils import epath

from spmd_trainer.errors import UserError
from spmd_trainer.inputs.corpus import store_cache
from spmd_trainer.inputs.corpus.documents import Documents, Record
from spmd_trainer.inputs.corpus.file_source import FileSource
from spmd_trainer.inputs.corpus.part_worker import remove_unfinished
from spmd_trainer.inputs.corpus.prepare import Preparation, Preparing, Progress, deciding
from spmd_trainer.inputs.corpus.token_store import DESCRIPTION_FILE, TokenStore
from spmd_trainer.sharding.messages import short_hash
from spmd_trainer.storage import files, is_remote, json_values, reading
from spmd_trainer.storage.access import free_space
from spmd_trainer.storage.lock import LockedError, locked
from spmd_trainer.storage.paths import directory

# Seconds between two checks for parts that other processes have finished.
_LOOK_SECONDS = 2.0
# File with the name of the job that makes the store.
_MAKING_FILE = "making.json"
# File with the name of the job that could not make the store.
_FAILED_FILE = "failed.json"
# Seconds between two attempts of a job to take over from another job that makes the store.
_RETRY_SECONDS = 60.0
# A store is begun only if the disk has this multiple of the text's size free. With two bytes per token, a store has half the
# text's size or less, or twice its size if each byte is a token; and checkpoints need space too.
_ROOM = 4


@dataclasses.dataclass(frozen=True)
class Helpers:
    """The processes that tokenize a corpus during a run.

    Attributes:
      index: index of this process in the job, from 0.
      count: number of processes in the job.
      workers: number of worker processes that this process starts.
      job: unique name of the job.
      limit: maximum total size of all token stores in one local folder, in bytes; None: unlimited. See `store_cache`.
    """

    index: int
    count: int
    workers: int
    job: str
    limit: int | None = None


class PreparedSource(FileSource):
    """A source that is read as text until its token store is finished, and as tokens from then on.

    Attributes:
      text: the source that reads text.
    """

    def __init__(self, source: FileSource, preparation: Preparation, helpers: Helpers):
        """Reads the source as text at first. `tokenise` and `use_finished` switch to reading tokens.

        Args:
          source: the opened corpus.
          preparation: the tokenizer and the folder of the store.
          helpers: the processes that tokenize.
        """
        super().__init__(source.found)
        self.kind, self.groups, self.shards = source.kind, source.groups, source.shards
        self.random_access, self.max_record_bytes = source.random_access, source.max_record_bytes
        self.text, self._preparation, self._helpers = source, preparation, helpers
        self._store: TokenStore | None = None
        # Locked file that keeps other processes from removing a local store.
        self._held: BinaryIO | None = None
        self._ends = threading.Event()

    def stop(self) -> None:
        """Stops the tokenization, and releases the lock on the store. Finished parts of the store are kept."""
        self._ends.set()
        if self._held is not None:
            self._held.close()

    @property
    def is_ready(self) -> bool:
        """True if documents are now read as tokens."""
        return self._store is not None

    def read(self, numbers: np.ndarray) -> list[Record]:
        return (self._store or self.text).read(numbers)

    def read_chunk(self, chunk: int, start: int) -> Iterator[Record]:
        if self._store is None:
            for record in self.text.read_chunk(chunk, start):
                yield record
                start += 1
                if self._store is not None:
                    break
            else:
                return
        yield from self._store.read_chunk(chunk, start)

    def use_finished(self) -> bool:
        """Switches to reading tokens if the store is finished. Returns True if documents are read as tokens now.

        Raises:
          UserError: the store's folder can't be used, or the store is damaged or doesn't have the documents of this source.
        """
        folder = self._preparation.output
        if self._held is None and not is_remote(folder):  # before a store is looked for, so that it stays
            try:
                self._held = store_cache.hold(folder)
            except OSError as error:
                raise UserError(f"{folder} can't be used: {reading.problem(folder, error)}") from error
        if self._store is None and reading.exists(os.path.join(folder, DESCRIPTION_FILE)):
            store = TokenStore(folder, names_left_out=True)
            sizes = store.shards.counts
            if store.num_chunks != self.num_chunks or not np.array_equal(
                sizes if self.shards is None else self.shards.counts, sizes
            ):
                raise UserError(f"{folder} has other documents than {self.size_text}")
            self._store = store
            logging.info("%s is read as tokens from now on: %s", self.size_text, store.size_text)
        return self._store is not None

    def try_finished(self) -> None:
        """Calls `use_finished`, and logs an error instead of raising it.

        `tokenise` then makes the store again, or logs why it can't.
        """
        try:
            self.use_finished()
        except Exception as error:  # also what an object store's library raises
            logging.warning("%s can't be read as tokens yet: %s", self.size_text, error)

    def tokenise(self) -> None:
        """Tokenizes the corpus together with the other processes, and reads it as tokens from then on.

        If this fails, logs the error and keeps reading text.
        """
        folder = directory("--data_cache_dir", self._preparation.output)
        try:
            self._make(folder)
        except _Ended:
            pass
        except Exception as error:  # the run goes on without it
            logging.warning("%s can't be tokenised ahead, so it is read as text: %s", self.size_text, error)
            with contextlib.suppress(OSError):
                files.write_atomically(folder / _FAILED_FILE, [json.dumps({"job": self._helpers.job})])

    def _make(self, folder: epath.Path) -> None:
        """Makes the store together with the other processes, and returns once this process reads from it."""
        while not self._ends.is_set():
            if self._helpers.index:
                while not self._says(folder / _MAKING_FILE):
                    if self._looks(folder):
                        return
                self._make_share(folder)
                return
            try:
                with locked(folder, name="--data_cache_dir"):
                    self._begin(folder)
                    self._make_share(folder)
                return
            except LockedError as error:
                logging.info("another job tokenises %s: %s", self.size_text, error)
            ends = time.monotonic() + _RETRY_SECONDS  # the other job may end before the store is finished
            while time.monotonic() < ends:
                if self._looks(folder):
                    return
        raise _Ended

    def _begin(self, folder: epath.Path) -> None:
        """Prepares the folder, and tells the other processes to begin. Runs in process 0, which has locked the folder.

        Raises:
          UserError: the disk has too little free space.
        """
        remove_unfinished(folder)
        try:
            if self.use_finished():
                return
        except UserError as error:
            logging.warning("%s; its parts are made again", error)
            for path in (folder / DESCRIPTION_FILE, *folder.glob("tokens-*.json")):
                path.unlink(missing_ok=True)
        self._make_room(self.num_bytes)
        free = free_space(folder)
        if free is not None and free < _ROOM * self.num_bytes:
            raise UserError(f"{folder} has {free:,} bytes free, less than {_ROOM} times the text")
        files.write_atomically(folder / _MAKING_FILE, [json.dumps({"job": self._helpers.job})])

    def _make_share(self, folder: epath.Path) -> None:
        """Makes this process's share of the parts, and waits for the other processes. Process 0 then writes `corpus.json`."""
        if self.use_finished():
            return
        preparing = Preparing(self._preparation)
        progress = Progress(preparing)
        own = [number for number in preparing.missing if number % self._helpers.count == self._helpers.index]
        for _ in preparing.make(own, self._helpers.workers, self._ends, nice=True):
            if self._helpers.index == 0:
                preparing.look()
                progress.log()
        if self._helpers.index == 0:
            while preparing.missing:
                self._pause(folder)
                preparing.look()
                progress.log()
            preparing.finish()
            self._make_room(0)
        while not self.use_finished():
            self._pause(folder)

    def _make_room(self, needed: int) -> None:
        """Removes unused stores until `needed` bytes are free below the size limit. Keeps this source's store (in use)."""
        if self._helpers.limit is not None:
            store_cache.make_room(os.path.dirname(self._preparation.output), self._helpers.limit, needed)

    def _says(self, path: epath.Path) -> bool:
        """Returns True if the file exists and a process of this job has written it."""
        try:
            found = json_values.parse_object(json_values.content_of(path))
        except (OSError, ValueError):
            return False
        return found.get("job") == self._helpers.job

    def _looks(self, folder: epath.Path) -> bool:
        """Switches to the store and returns True if the store is finished; otherwise waits a little and returns False.

        A damaged store counts as unfinished, because process 0 makes it again.
        """
        with contextlib.suppress(UserError):
            if self.use_finished():
                return True
        self._pause(folder)
        return False

    def _pause(self, folder: epath.Path) -> None:
        if self._ends.wait(_LOOK_SECONDS):
            raise _Ended
        if self._says(folder / _FAILED_FILE):
            raise UserError("another process of this job can't tokenise it; its log says why")


class _Ended(Exception):
    """Raised to stop the tokenization after `PreparedSource.stop` was called."""


def tokenise(
    sources: Sequence[PreparedSource], after: threading.Thread | None = None, *, look_first: bool = False
) -> threading.Thread:
    """Tokenizes sources in a daemon thread, one after the other because each uses all workers. Returns the thread.

    Args:
      sources: the sources.
      after: a thread that tokenizes other sources; the new thread waits for it.
      look_first: True looks for finished stores before this function returns; False looks for them in the thread.
    """

    def look() -> None:
        for source in sources:
            source.try_finished()

    def work() -> None:
        if not look_first:
            look()
        if after is not None:
            after.join()
        for source in sources:
            if not source.is_ready:
                source.tokenise()

    if look_first:
        look()
    thread = threading.Thread(target=work, name="tokenise", daemon=True)
    thread.start()
    return thread


def store_name(documents: Documents, source: FileSource, tokenizer: Any, bad_records: str) -> str:
    """Returns the name of a corpus's token store in the cache.

    The name is a hash of the files' paths and versions, the tokenizer, and the settings on which the tokens depend.
    """
    decides = [
        deciding(documents, source, tokenizer, bad_records),
        [path if is_remote(path) else os.path.abspath(path) for path in source.paths],
        reading.for_each(source.paths, reading.version),
    ]
    return f"corpus-{short_hash(json.dumps(decides, sort_keys=True, default=str), 24)}"


def new_job_name() -> str:
    """Returns a unique name for a job."""
    return f"{time.time_ns()}-{os.getpid()}-{os.urandom(4).hex()}"
