"""A page in headless Chromium, through the DevTools protocol on a pair of pipes."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pathlib
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium binary on PATH (Debian: apt-get install chromium)"
)
_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
]
# Chromium reads commands from descriptor 3 and writes answers to 4. Python gives a child other numbers.
_START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
_DEADLINE = 60.0


class Page:
    """An open page.

    Attributes:
      errors: what the page's scripts raised, and what the browser logged as errors.
      requests: the URLs that the page asked for, its own among them.
    """

    def __init__(self, browser: Browser, session: str):
        self._browser = browser
        self._session = session
        self.errors: list[str] = []
        self.requests: list[str] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command of the DevTools protocol to the page and returns its result."""
        return self._browser.call(method, self._session, **params)

    def evaluate(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Waits until a JavaScript expression is true."""
        ends = time.monotonic() + _DEADLINE
        while not self.evaluate(expression):
            assert time.monotonic() < ends, f"{expression} has not become true"
            time.sleep(0.02)

    def texts(self, selector: str) -> list[str]:
        """Returns the visible text of the elements that a CSS selector finds."""
        return self.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.innerText.trim())")

    def count(self, selector: str) -> int:
        """Returns how many elements a CSS selector finds."""
        return self.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length")

    def press(self, key: str) -> None:
        """Presses a key that needs no text, such as 'ArrowRight' or 'Tab'."""
        for kind in ("rawKeyDown", "keyUp"):
            codes = {"Tab": 9, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])

    def move_to(self, x: float, y: float) -> None:
        """Moves the mouse to a position of the viewport, in pixels."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: pathlib.Path) -> None:
        """Writes a picture of the whole page."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def notice(self, method: str, params: dict[str, Any]) -> None:
        """Keeps an event of the page."""
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])


class Browser:
    """A running Chromium."""

    def __init__(self, commands: int, answers: int):
        self._commands = commands
        self._answers = answers
        self._left = b""
        self._number = 0
        self._pages: dict[str, Page] = {}
        self._loaded: set[str] = set()

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Sends a command and returns its result."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": params}
        if session:
            command["sessionId"] = session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        number = self._number
        while True:
            message = self._read()
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message}"
                return message["result"]

    def open(self, file: pathlib.Path | str, *, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        """Opens a file, or the page at a URL, in a new page and waits until it is loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Page.navigate", url=file if isinstance(file, str) else file.as_uri())
        while session not in self._loaded:
            self._read()
        return page

    def _read(self) -> dict[str, Any]:
        """Returns the next message, after giving an event to its page."""
        ends = time.monotonic() + _DEADLINE
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, ends - time.monotonic()))
            assert ready, f"Chromium sent nothing for {_DEADLINE:.0f} s"
            received = os.read(self._answers, 1 << 20)
            assert received, "Chromium ended"
            self._left += received
        text, _, self._left = self._left.partition(b"\0")
        message = json.loads(text)
        session = message.get("sessionId", "")
        if "method" in message and session in self._pages:
            self._pages[session].notice(message["method"], message["params"])
            if message["method"] == "Page.loadEventFired":
                self._loaded.add(session)
        return message


@contextlib.contextmanager
def chromium(profile: pathlib.Path) -> Iterator[Browser]:
    """Starts Chromium with a new profile directory, and ends it."""
    assert CHROMIUM
    their_commands, commands = os.pipe()
    answers, their_answers = os.pipe()
    start = [sys.executable, "-c", _START, str(their_commands), str(their_answers)]
    with open(profile.with_suffix(".log"), "wb") as log:
        process = subprocess.Popen(
            [*start, CHROMIUM, *_FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(their_commands, their_answers),
            stdout=log,
            stderr=log,
        )
    os.close(their_commands)
    os.close(their_answers)
    try:
        yield Browser(commands, answers)
    finally:
        os.close(commands)
        os.close(answers)
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
