"""Chromium without a window or a network, driven over a pipe by its DevTools protocol.

Messages are JSON, each ended by a zero byte: Chromium reads them from descriptor 3, writes to 4.
"""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DESKTOP, PHONE = (1440, 900), (390, 844)
PATIENCE_S = 60.0  # for one answer
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
    "--disable-extensions", "--disable-background-networking", "--disable-component-update",
    "--remote-debugging-pipe",
)  # fmt: skip


def missing() -> str:
    return "" if shutil.which("chromium") else "chromium is not installed; make test-pages does it"


class Chromium:
    """A running browser. ``events``: all it said unasked, as (session, method, parameters)."""

    def __init__(self, profile: Path) -> None:
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()

        def place() -> None:
            high = [os.dup(theirs_in), os.dup(theirs_out)]
            for number, end in zip((3, 4), high, strict=True):
                os.dup2(end, number)

        self._process = subprocess.Popen(
            ["chromium", *FLAGS, f"--user-data-dir={profile}"], preexec_fn=place, pass_fds=(3, 4),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        os.set_blocking(self._in, False)
        self._rest, self._count = b"", 0
        self.events: list[tuple[str, str, dict[str, Any]]] = []

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=PATIENCE_S)
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._count += 1
        asked = {"id": self._count, "method": method, "params": parameters}
        asked |= {"sessionId": session} if session else {}
        os.write(self._out, json.dumps(asked).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def wait(self, session: str, method: str) -> None:
        """Wait for an event that has happened, or will."""
        while not any(event[:2] == (session, method) for event in self.events):
            self._next()

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE_S
        while b"\0" not in self._rest:
            assert self._process.poll() is None, "chromium ended"
            assert time.monotonic() < end, "chromium does not answer"
            with contextlib.suppress(BlockingIOError):
                self._rest += os.read(self._in, 2**20)
                continue
            time.sleep(0.005)
        line, _, self._rest = self._rest.partition(b"\0")
        said = json.loads(line)
        if "method" in said:
            self.events.append((said.get("sessionId", ""), said["method"], said["params"]))
        return said

    @contextlib.contextmanager
    def page(self, path: Path, size: tuple[int, int], scripts: bool = True) -> Iterator["Page"]:
        """Open a file in a tab of ``size`` without a network."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        opened = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            opened.call(f"{domain}.enable")
        opened.call(
            "Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0,
            uploadThroughput=0,
        )  # fmt: skip
        width, height = size
        opened.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
            mobile=size == PHONE,
        )  # fmt: skip
        opened.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        opened.call("Page.navigate", url=path.resolve().as_uri())
        self.wait(session, "Page.loadEventFired")
        yield opened
        self.call("Target.closeTarget", targetId=target)


class Page:
    """A tab."""

    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser, self._session = browser, session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def ask(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def click(self, query: str) -> None:
        """Click where an element is, by the mouse."""
        box = f"document.querySelector({json.dumps(query)})"
        self.ask(f"{box}.scrollIntoView({{block: 'center', inline: 'center'}})")
        place = "(({x, y, width, height}) => [x + width / 2, y + height / 2])"
        x, y = self.ask(f"{place}({box}.getBoundingClientRect())")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def hover(self, query: str) -> None:
        """Move the mouse over an element."""
        box = f"document.querySelector({json.dumps(query)})"
        self.ask(f"{box}.scrollIntoView({{block: 'center'}})")
        place = "(({x, y, width, height}) => [x + width / 2, y + height / 2])"
        x, y = self.ask(f"{place}({box}.getBoundingClientRect())")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path) -> None:
        """Write the whole page as a PNG file."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    @property
    def requests(self) -> list[str]:
        """The addresses that the page asked for, itself included."""
        return [of["request"]["url"] for of in self._said("Network.requestWillBeSent")]

    @property
    def errors(self) -> list[str]:
        """Return the console's errors and warnings."""
        thrown = [str(of["exceptionDetails"]) for of in self._said("Runtime.exceptionThrown")]
        logged = [of["entry"] for of in self._said("Log.entryAdded")]
        told = [str(of) for of in self._said("Runtime.consoleAPICalled")]
        return thrown + told + [of["text"] for of in logged if of["level"] in ("error", "warning")]

    def _said(self, method: str) -> list[dict[str, Any]]:
        self.ask("1")  # what was said before is here
        return [of for s, name, of in self._browser.events if (s, name) == (self._session, method)]
