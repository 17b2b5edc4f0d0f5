"""`--mode=page`: writes the page of one or more runs, or serves it while a run goes on."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from etils import epath

from spmd_trainer import storage
from spmd_trainer.errors import UserError
from spmd_trainer.storage import access
from spmd_trainer.storage.files import write_atomically
from spmd_trainer.storage.run_files import COMPARISON, PAGE
from spmd_trainer.training.run_config import PageConfig
from spmd_trainer.watch.pages.follow import SECONDS_BETWEEN_READS, PageServer
from spmd_trainer.watch.pages.run_data import PageData
from spmd_trainer.watch.pages.run_page import page_text
from spmd_trainer.watch.pages.run_reader import RunReader

# Reading a run in an object store takes requests for all of its files.
_SECONDS_BETWEEN_REMOTE_READS = 15.0


def show(request: PageConfig) -> None:
    """Writes a page and prints its path, or serves it until Ctrl-C and prints its address.

    Raises:
      UserError: a directory holds no run, the page can't be written, or the port can't be used.
    """
    directories = _directories(request)
    data = PageData(directories)
    if request.follow:
        with contextlib.suppress(KeyboardInterrupt):
            remote = any(storage.is_remote(directory) for directory in directories)
            seconds = _SECONDS_BETWEEN_REMOTE_READS if remote else SECONDS_BETWEEN_READS
            server = PageServer(data.read, request.port, seconds_between_reads=seconds)
            sys.stdout.write(f"{server.url}\nCtrl-C ends it.\n")
            sys.stdout.flush()
            server.serve()
        return
    file = _file(request, directories)
    try:
        write_atomically(file, page_text(data.read()).split("\n"))
    except OSError as error:
        raise UserError(
            f"{file} can't be written: {error.strerror or error}; --page_file=FILE writes another"
        ) from error
    sys.stdout.write(f"{file}\n")


def _directories(request: PageConfig) -> list[epath.Path]:
    if not request.directories:
        raise UserError("--mode=page needs --job_log_dir=DIR, the directory of a run; more directories may follow it")
    directories = [storage.directory("--job_log_dir", text) for text in request.directories]
    for number, path in enumerate(directories):
        access.check_readable("--job_log_dir", path)
        if path in directories[:number]:
            raise UserError(f"{path} was given twice; give each run once")
        if not RunReader(path).is_run():
            what = "holds no run of this trainer" if path.exists() else "does not exist"
            raise UserError(f"--job_log_dir={path} {what}; give the directory that a run was trained in")
    return directories


def _file(request: PageConfig, directories: Sequence[epath.Path]) -> epath.Path:
    if request.page_file:
        path = storage.directory("--page_file", request.page_file)
        if path.is_dir():
            raise UserError(f"--page_file={path} is a directory; give the file to write, e.g. {path / PAGE}")
        return path
    return directories[0] / (PAGE if len(directories) == 1 else COMPARISON)
