"""The Hub's API for data sets on loopback, as huggingface_hub's file system calls it: repositories, trees, ranges of files."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator

_REPOSITORY = re.compile(r"/api/datasets/([^/]+/[^/]+)(?:/revision/([^/]+))?")
_TREE = re.compile(r"/api/datasets/([^/]+/[^/]+)/tree/([^/]+)(?:/(.*))?")
_FILE = re.compile(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.*)")


class Hub:
    """The repositories of a server, and what was asked of it.

    Attributes:
      address: of the server.
      files: {(repository, revision): {path: content}}.
      private: repositories that need `token`.
      failures: answers with status 503 that are still to come, before any other.
      page: most entries of a page of a tree.
      requests: the paths of all requests so far.
      bytes_read: bytes of files sent so far.
    """

    token = "hf_of_a_reader"

    def __init__(self, address: str):
        self.address = address
        self.files: dict[tuple[str, str], dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.failures = 0
        self.page = 1000
        self.requests: list[str] = []
        self.bytes_read = 0


@contextlib.contextmanager
def serve() -> Iterator[Hub]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_port}")
    server.hub = hub
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Nothing: the tests' output is not the place."""

    def do_GET(self):
        hub, url = self.server.hub, urllib.parse.urlsplit(self.path)
        hub.requests.append(url.path)
        if hub.failures:
            hub.failures -= 1
            self._answer(503, b"down")
            return
        match = next(found for one in (_TREE, _REPOSITORY, _FILE) if (found := one.fullmatch(url.path)))
        repository, revision, *path = (urllib.parse.unquote(part or "") for part in match.groups())
        revision = revision or "main"
        known = {name for name, _ in hub.files}
        signed = self.headers.get("authorization") == f"Bearer {hub.token}"
        if repository not in known or (repository in hub.private and not signed):
            self._answer(401, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        elif (repository, revision) not in hub.files:
            self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif match.re is _REPOSITORY:
            self._answer(200, json.dumps({"id": repository, "sha": "0" * 40}).encode())
        elif match.re is _TREE:
            self._tree(hub.files[repository, revision], path[0], dict(urllib.parse.parse_qsl(url.query)))
        elif path[0] not in hub.files[repository, revision]:
            self._answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        else:
            self._file(hub.files[repository, revision][path[0]])

    def _tree(self, files, folder, query):
        prefix = f"{folder}/" if folder else ""
        inside = [name for name in files if name.startswith(prefix)]
        folders = {name[:end] for name in inside for end in _slashes(name) if end > len(prefix)}
        found = sorted([*inside, *folders])
        if query.get("recursive", "false").lower() != "true":
            found = [name for name in found if "/" not in name.removeprefix(prefix)]
        if prefix and not found:
            self._answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        start, page = int(query.get("cursor", 0)), self.server.hub.page
        entries = [_entry(name, files.get(name)) for name in found[start : start + page]]
        headers = {}
        if start + page < len(found):
            later = urllib.parse.urlencode({**query, "cursor": start + page})
            headers["Link"] = f'<{self.server.hub.address}{urllib.parse.urlsplit(self.path).path}?{later}>; rel="next"'
        self._answer(200, json.dumps(entries).encode(), headers)

    def _file(self, content):
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        part = content[int(asked[1]) : int(asked[2]) + 1] if asked else content
        self.server.hub.bytes_read += len(part)
        self._answer(206 if asked else 200, part)

    def _answer(self, status, body, headers=None):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _slashes(name):
    return [place for place, letter in enumerate(name) if letter == "/"]


def _entry(name, content):
    if content is None:
        return {"type": "directory", "path": name, "oid": "0" * 40}
    return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
