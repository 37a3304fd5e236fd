"""A headless Chromium, asked over a pipe in the DevTools protocol (https://chromedevtools.github.io/devtools-protocol).

The protocol is JSON between null bytes on two file descriptors, which needs no package.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (path := shutil.which(name))), None
)
"""The browser of this machine; None without one."""
_PATIENCE_S = 60.0


class Page:
    """An open page.

    Attributes:
        complaints: Errors and warnings of its scripts, and what its policy refused.
        requests: Addresses it asked for, its own file apart.
    """

    def __init__(self, read: int, write: int) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._read, self._write = read, write
        self._ids = itertools.count(1)
        self._session: str | None = None
        self._buffer = b""
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol, and its result."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(deadline - time.monotonic(), 0))
            part = os.read(self._read, 1 << 20) if ready else b""
            if not part:
                raise RuntimeError("the browser does not answer")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        self._note(answer.get("method", ""), answer.get("params", {}))
        return answer

    def _note(self, event: str, found: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            details = found["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif event == "Runtime.consoleAPICalled" and found["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(part.get("value")) for part in found["args"]))
        elif event == "Log.entryAdded" and found["entry"]["level"] in ("error", "warning"):
            self.complaints.append(found["entry"]["text"])
        elif event == "Network.requestWillBeSent" and found["request"]["url"] != found["documentURL"]:
            self.requests.append(found["request"]["url"])
        elif event == "Page.loadEventFired":
            self._loaded = True

    def size(self, width: int, height: int) -> None:
        """Set the size of the window in CSS pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, scheme: str) -> None:
        """Prefer ``light`` or ``dark``."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, path: Path) -> None:
        """Open a file and wait until it is loaded and painted."""
        self._loaded = False
        self.call("Page.navigate", url=path.absolute().as_uri())
        while not self._loaded:
            self._next()
        self.settle()

    def settle(self) -> None:
        """Wait for two frames, so that what was asked for is drawn."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(null))))")

    def run(self, script: str) -> Any:
        """The value of an expression; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description", script))
        return answer["result"].get("value")

    def click(self, x: float, y: float) -> None:
        """A click of the mouse at a place of the window."""
        mouse = {"x": x, "y": y, "button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.call("Input.dispatchMouseEvent", type="mousePressed", **mouse)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", **mouse)
        self.settle()

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Drag the mouse from one place of the window to another."""
        (x, y), (to_x, to_y) = start, end
        mouse = {"button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, **mouse)
        for part in (0.5, 1.0):
            at = {"x": x + part * (to_x - x), "y": y + part * (to_y - y)}
            self.call("Input.dispatchMouseEvent", type="mouseMoved", **at, button="left", buttons=1)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", x=to_x, y=to_y, **mouse)
        self.settle()

    def wheel(self, x: float, y: float, pixels: float) -> None:
        """Turn the wheel at a place of the window; what it scrolls may move for some frames."""
        self.call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=pixels)
        self.settle()

    def click_on(self, selector: str) -> None:
        """A click in the middle of the first element that a CSS selector finds, brought into view."""
        place = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{place}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        self.settle()
        box = self.run(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({place}.getBoundingClientRect())"
        )
        self.click(*box)

    def key(self, key: str) -> None:
        """Press a key: one that writes a character, or ``Enter`` or ``Tab``."""
        text = {"Enter": "\r", "Tab": ""}.get(key, key)
        code = {"Enter": 13, "Tab": 9}.get(key, 0)
        kind = "keyDown" if text else "rawKeyDown"
        self.call("Input.dispatchKeyEvent", type=kind, key=key, text=text, windowsVirtualKeyCode=code)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)
        self.settle()

    def write(self, text: str) -> None:
        """Write a text where the focus is."""
        self.call("Input.insertText", text=text)
        self.settle()


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[Page]:
    """A browser with one page, closed at the end.

    Args:
        folder: An empty folder for its profile.
    """
    if CHROMIUM is None:
        raise RuntimeError("no Chromium on this machine")
    (their_read, write), (read, their_write) = os.pipe(), os.pipe()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
    options += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={folder}"]
    # The browser reads from descriptor 3 and writes to 4, whatever numbers the pipes have here.
    begin = (
        "from os import *; from sys import argv; dup2(int(argv[1]), 3); dup2(int(argv[2]), 4); execv(argv[3], argv[3:])"
    )
    start = [sys.executable, "-c", begin, str(their_read), str(their_write), CHROMIUM, *options, "about:blank"]
    process = subprocess.Popen(
        start, pass_fds=(their_read, their_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(their_read)
    os.close(their_write)
    try:
        yield Page(read, write)
    finally:
        os.close(write)  # a browser whose pipe ends, ends
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(read)
