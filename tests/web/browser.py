"""Headless Chromium over its debugging pipe, without a further package: open a page, run JavaScript in it, look at it.

Messages of the DevTools protocol (chromedevtools.github.io/devtools-protocol) are JSON, each ended by a NUL.
"""

import base64
import json
import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CONNECT = """
import os, sys
from fcntl import F_DUPFD, fcntl
pipes = [fcntl(int(number), F_DUPFD, 10) for number in sys.argv[1:3]]  # beyond 3 and 4, which they replace
for number, pipe in enumerate(pipes, 3):
    os.dup2(pipe, number)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Program that becomes the browser, which reads commands from descriptor 3 and answers on 4."""
NAMES = "chromium", "chromium-browser", "google-chrome", "chrome"


class Tab:
    """A page in a browser.

    Attributes:
        requests: addresses of all requests since the tab opened.
        messages: of the console, and errors that nobody caught.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to_browser, self._from_browser = to_browser, from_browser
        self._buffer = b""
        self._number = 0
        self._events: deque[dict[str, Any]] = deque()
        self._session: str | None = None
        self.requests: list[str] = []
        self.messages: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        # requests of workers are reported in sessions of their own
        self.send("Target.setAutoAttach", autoAttach=True, waitForDebuggerOnStart=False, flatten=True)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol; return its result."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to_browser, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self._record(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._from_browser, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        text, self._buffer = self._buffer.split(b"\0", 1)
        return dict(json.loads(text))

    def _record(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            case "Runtime.consoleAPICalled":
                self.messages.append(str(parameters["args"]))
            case "Runtime.exceptionThrown":
                self.messages.append(str(parameters["exceptionDetails"]))
            case "Log.entryAdded":
                self.messages.append(str(parameters["entry"]["text"]))

    def open(self, address: str) -> None:
        """Go to an address."""
        self.send("Page.navigate", url=address)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; of a promise, once it has one."""
        result = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Return the value of an expression once it is true."""
        poll = (
            f"new Promise(r => {{ const f = () => {{ const v = ({expression}); v ? r(v) : setTimeout(f, 5) }}; f() }})"
        )
        return self.evaluate(poll)

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press a key."""
        common = {"key": key, "windowsVirtualKeyCode": code}
        self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    def resize(self, width: int, height: int, *, is_phone: bool = False, is_dark: bool = False) -> None:
        """Set the size of the window, in pixels of CSS."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, target: Path) -> None:
        """Write what the window shows as PNG."""
        target.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def chromium(profile: Path) -> Iterator[Tab]:
    """Yield a tab of a browser with a profile of its own; the test is skipped where no browser is installed."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("no Chromium is installed: make browser")
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    pipe = ["--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
    commands, to_browser = os.pipe()
    from_browser, answers = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", CONNECT, str(commands), str(answers), program, *arguments, *pipe],
        pass_fds=(commands, answers),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(commands)
    os.close(answers)
    try:
        yield Tab(to_browser, from_browser)
    finally:
        os.close(to_browser)
        process.terminate()
        process.wait()
        os.close(from_browser)
