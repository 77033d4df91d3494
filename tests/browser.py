"""A page in headless Chromium, with the clicks, keys and sizes of a person, over DevTools' protocol on two pipes."""

from __future__ import annotations

import base64
import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from select import select
from typing import Any

CHROMIUM = shutil.which("chromium")
# Without these, it looks for updates, and for sandboxes that a container has not.
FLAGS = shlex.split(
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --force-device-scale-factor=1"
)
TIMEOUT_S = 60.0
POLL_S = 0.05
SETTLE_S = 0.1
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}


class Page:
    """The page that a browser shows."""

    def __init__(self, browser: subprocess.Popen[bytes], write: int, read: int) -> None:
        self._browser = browser
        self._write = write
        self._read = read
        self._unread = b""
        self._numbers = count(1)
        self.said: list[str] = []
        """What came to the console, with what was not caught or was refused."""
        self.asked: list[str] = []
        """The addresses that were asked for."""
        self._session = ""
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")

    def open(self, address: str) -> None:
        """Goes to an address."""
        self._send("Page.navigate", url=address)
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Returns what an expression of JavaScript is, as plain data; waits for a promise."""
        got = self._send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in got, got["exceptionDetails"]
        return got["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Returns an expression's value once it is true."""
        give_up_at = time.monotonic() + TIMEOUT_S
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < give_up_at, f"never true: {expression}\n{self.text()}\n{self.said}"
            time.sleep(POLL_S)
        return value

    def text(self, selector: str = "body") -> str:
        """Returns what is to be read in the first element that a selector finds."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def click(self, selector: str) -> None:
        """Clicks into the middle of an element, once that is where it was a moment ago."""
        place, before = self._place(selector), None
        while place != before:
            time.sleep(SETTLE_S)
            place, before = self._place(selector), place
        for kind in ("mousePressed", "mouseReleased"):
            self._send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def _place(self, selector: str) -> dict[str, float]:
        place: dict[str, float] = self.evaluate(
            f"(() => {{ const at = document.querySelector({json.dumps(selector)});"
            "at.scrollIntoView({block: 'center'}); const box = at.getBoundingClientRect();"
            "return {x: box.x + box.width / 2, y: box.y + box.height / 2}; })()"
        )
        return place

    def press(self, key: str) -> None:
        """Presses and releases a key."""
        text = {"Enter": "\r", " ": " "}.get(key)
        for kind in ("keyDown" if text else "rawKeyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            code = "Space" if key == " " else key
            self._send("Input.dispatchKeyEvent", type=kind, key=key, code=code, windowsVirtualKeyCode=KEYS[key], **more)

    def type(self, text: str) -> None:
        """Types a text where the focus is."""
        self._send("Input.insertText", text=text)

    def tab_to(self, selector: str, most: int = 40) -> None:
        """Presses Tab until an element has the focus."""
        for _ in range(most):
            self.press("Tab")
            if self.evaluate(f"document.activeElement.matches({json.dumps(selector)})"):
                return
        raise AssertionError(f"{most} tabs do not lead to {selector}")

    def drop(self, file: Path, selector: str = "body") -> None:
        """Drops a file onto an element, as from a folder's window."""
        self._send("DOM.enable")
        place = self.evaluate(
            f"(() => {{ const box = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            "return {x: box.x + box.width / 2, y: box.y + box.height / 2}; })()"
        )
        data = {"items": [], "files": [str(file)], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self._send("Input.dispatchDragEvent", type=kind, data=data, **place)

    def look(self, width: int, scheme: str = "light", height: int = 900, *, reduced_motion: bool = False) -> None:
        """Gives the window a width in pixels and a colour scheme."""
        self._send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        motion = {"name": "prefers-reduced-motion", "value": "reduce" if reduced_motion else "no-preference"}
        self._send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}, motion])

    def picture(self, *, beyond: bool = True) -> bytes:
        """Returns a PNG of the window, or of all of the page."""
        return base64.b64decode(
            self._send("Page.captureScreenshot", captureBeyondViewport=beyond, **self._clip(beyond))["data"]
        )

    def _clip(self, beyond: bool) -> dict[str, Any]:
        if not beyond:
            return {}
        size = self._send("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def accessibility(self) -> list[dict[str, Any]]:
        """Returns what a screen reader gets: role and name of each part."""
        nodes = self._send("Accessibility.getFullAXTree")["nodes"]
        return [
            {"role": node["role"]["value"], "name": node.get("name", {}).get("value", "")}
            for node in nodes
            if not node["ignored"]
        ]

    def _send(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            got = self._receive()
            if got.get("id") == number:
                assert "error" not in got, (method, got["error"])
                return got["result"]
            self._note(got)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select([self._read], [], [], TIMEOUT_S)
            assert ready, "the browser does not answer"
            data = os.read(self._read, 2**16)
            assert data, f"the browser has ended: {self._browser.poll()}"
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        method, data = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.said.append(str(data["exceptionDetails"].get("exception", data)))
        elif method == "Runtime.consoleAPICalled":
            self.said.append(str([one.get("value") for one in data["args"]]))
        elif method == "Log.entryAdded":
            self.said.append(data["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.asked.append(data["request"]["url"])


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """Starts a browser, and ends it."""
    to_browser, write = os.pipe()
    read, from_browser = os.pipe()
    # It reads commands from its descriptor 3 and writes to 4.
    command = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
    arguments = [str(CHROMIUM), *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}"]
    browser = subprocess.Popen(
        ["bash", "-c", command, "bash", *arguments],
        pass_fds=(to_browser, from_browser),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Page(browser, write, read)
    finally:
        browser.terminate()
        browser.wait(TIMEOUT_S)
        os.close(write)
        os.close(read)
