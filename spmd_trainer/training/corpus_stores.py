"""Tokenizes a run's text corpora once, with all processes together, into a shared cache (`--data_cache_dir`)."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

from absl import logging

from spmd_trainer import multihost
from spmd_trainer.errors import UserError
from spmd_trainer.inputs.indexed import CheckpointedInput
from spmd_trainer.sharding.messages import count_text
from spmd_trainer.storage import is_remote
from spmd_trainer.storage.paths import directory
from spmd_trainer.training.run_config import RunConfig

# Each worker is a Python process that holds the tokenizer in memory.
_MOST_WORKERS = 32
# The thread that tokenizes for the input that was built last. All processes build their inputs in the same order, so they also
# wait for each other in the same order.
_newest: threading.Thread | None = None


@contextlib.contextmanager
def tokenised_ahead(built: Any, config: RunConfig) -> Iterator[None]:
    """Context manager that tokenizes an input's text corpora into `config.data_cache_dir`, in a background thread.

    Called by every process. Does nothing if `data_cache_dir` is not set.

    Args:
      built: the built input, before its first batch. Inputs without the method `tokenise_ahead` of
        `CorpusInput` are left alone.
      config: the run's settings.

    Raises:
      UserError: the cache directory can't be used.
    """
    global _newest
    if not config.data_cache_dir or not (isinstance(built, CheckpointedInput) and hasattr(built, "tokenise_ahead")):
        yield
        return
    from spmd_trainer.inputs.corpus.prepared_source import Helpers, new_job_name  # imports all that reads a corpus

    folder = directory("--data_cache_dir", config.data_cache_dir)
    if config.data_cache_limit is not None and is_remote(folder):
        raise UserError(
            f"--data_cache_limit is for a folder on a local disk, and --data_cache_dir={folder} is in an object store; leave it "
            "out, and give the bucket a rule that deletes old objects"
        )
    count, index = multihost.joined()
    # All processes use the store names that process 0 computes: copies of a file on several hosts may have different times.
    names: dict[str, str] = {}
    if index == 0:
        try:
            names = built.store_names()
        except OSError as error:  # reading the files will say what is wrong
            logging.warning(
                "%s: the versions of its files can't be read, so they are read as text: %s", built.name, error
            )
    job, names = multihost.broadcast((new_job_name(), names), name=f"the token stores of {built.name}")
    if names:
        hosts = multihost.gather(f"the hosts of {built.name}", socket.gethostname())
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        workers = min(_MOST_WORKERS, max(1, processors // hosts.count(socket.gethostname())))
        helpers = Helpers(index, count, workers, job, config.data_cache_limit)
        logging.info(
            "%s: %s in token stores in %s, or tokenised into them with %s while this run reads the text",
            *(
                built.name,
                count_text(len(names), "source"),
                folder,
                count_text(helpers.workers, "process", "processes"),
            ),
        )
        stores = {name: os.fspath(folder / store) for name, store in names.items()}
        _newest = built.tokenise_ahead(stores, helpers, _newest)
    try:
        yield
    finally:
        built.stop_tokenising()
