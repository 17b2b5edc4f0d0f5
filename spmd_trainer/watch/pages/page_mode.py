"""`--mode=page`: writes the page of one or more runs, or serves it while a run trains."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import time
from collections.abc import Callable, Sequence

from absl import logging
from etils import epath

from spmd_trainer import storage
from spmd_trainer.errors import UserError, terminal
from spmd_trainer.sharding.messages import short_hash
from spmd_trainer.storage import access, files
from spmd_trainer.storage.run_files import COMPARISON, PAGE
from spmd_trainer.training.mode_configs import PageConfig
from spmd_trainer.watch.pages.run_charts import Record
from spmd_trainer.watch.pages.run_page import PageData, page_text, write_page
from spmd_trainer.watch.pages.run_reader import RunReader

ADDRESS = "127.0.0.1"
# Host names that requests may have. Other names could belong to a web site that resolves to this address.
_LOCAL = frozenset({"127.0.0.1", "localhost"})
SECONDS_BETWEEN_READS = 1.0
# Reading a run in an object store takes requests for all of its files.
_SECONDS_BETWEEN_REMOTE_READS = 15.0


def show(request: PageConfig) -> None:
    """Writes a page and prints its path. With `request.follow`, serves the page until Ctrl-C instead, and prints its address.

    Raises:
      UserError: a directory doesn't contain a run, the page can't be written, or the port can't be used.
    """
    directories = _directories(request)
    if request.follow:
        with contextlib.suppress(KeyboardInterrupt):
            remote = any(storage.is_remote(directory) for directory in directories)
            seconds = _SECONDS_BETWEEN_REMOTE_READS if remote else SECONDS_BETWEEN_READS
            server = PageServer(PageData(directories).read, request.port, seconds_between_reads=seconds)
            terminal.write(f"{server.url}\nCtrl-C ends it.\n")
            server.serve()
        return
    file = _file(request, directories)
    try:
        write_page(directories, file)
    except OSError as error:
        raise UserError(
            f"{file} can't be written: {error.strerror or error}; --page_file=FILE writes another"
        ) from error
    terminal.write(f"{file}\n")


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
        files.check_target("--page_file", path, PAGE)
        return path
    return directories[0] / (PAGE if len(directories) == 1 else COMPARISON)


class PageServer:
    """An HTTP server on the loopback interface. `/` is the page of runs; `/data.json` is the page's data, with an ETag."""

    def __init__(
        self, read: Callable[[], Record], port: int = 0, *, seconds_between_reads: float = SECONDS_BETWEEN_READS
    ):
        """Binds the port. `serve` answers requests.

        Args:
          read: returns the newest data of the page; see `PageData.read`.
          port: the port; 0 takes any free port.
          seconds_between_reads: minimum seconds between two calls of `read`; requests in between get the same data.

        Raises:
          UserError: the port is in use, or may not be used.
        """
        self._read = read
        self._seconds_between_reads = seconds_between_reads
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._data: Record = {}
        self._body = b""
        self._tag = ""
        try:
            self._server = http.server.ThreadingHTTPServer((ADDRESS, port), self._handler())
        except OSError as error:
            raise UserError(
                f"--port={port} can't be used: {error.strerror or error}; --port=0 takes a free one"
            ) from error
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self._server.server_address[1]}/"

    def serve(self) -> None:
        """Answers requests until `close` is called from another thread, or Ctrl-C is pressed."""
        try:
            self._server.serve_forever(poll_interval=0.2)
        finally:
            self._server.server_close()

    def close(self) -> None:
        self._server.shutdown()

    def _newest(self) -> tuple[Record, bytes, str]:
        """Returns the newest data, its JSON and its ETag, which changes with the data."""
        with self._lock:
            if time.monotonic() - self._read_at >= self._seconds_between_reads:
                data = self._read()
                # If only the time of reading has changed, the data counts as unchanged.
                content = {name: value for name, value in data.items() if name != "written"}
                tag = f'"{short_hash(json.dumps(content), 32)}"'
                if tag != self._tag:
                    self._data, self._tag = data, tag
                    self._body = json.dumps({**data, "follow": True}, allow_nan=False).encode()
                self._read_at = time.monotonic()
            return self._data, self._body, self._tag

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        newest = self._newest

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
                if host not in _LOCAL:
                    self._send(403, b"This server answers to 127.0.0.1 and localhost only.\n", "text/plain")
                    return
                with contextlib.suppress(ConnectionError):  # the browser has left
                    self._answer()

            def _answer(self) -> None:
                path = self.path.partition("?")[0]
                if path not in ("/", "/data.json"):
                    self._send(404, b"There are / and /data.json.\n", "text/plain")
                    return
                try:
                    data, body, tag = newest()
                    if path == "/":
                        self._send(200, page_text(data, follow=True).encode(), "text/html")
                    elif self.headers.get("If-None-Match") == tag:
                        self._send(304, b"", "application/json", tag)
                    else:
                        self._send(200, body, "application/json", tag)
                except ConnectionError:
                    raise
                except Exception:
                    logging.exception("the page could not be made")
                    self._send(500, b"The page could not be made; the terminal says why.\n", "text/plain")

            def _send(self, status: int, body: bytes, kind: str, tag: str = "") -> None:
                self.send_response(status)
                self.send_header("Content-Type", f"{kind}; charset=utf-8")
                self.send_header("Cache-Control", "no-store")
                self.send_header("X-Content-Type-Options", "nosniff")
                if tag:
                    self.send_header("ETag", tag)
                if status != 304:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if status != 304:
                    self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Logs nothing, because the page sends a request every other second."""

        return Handler
