"""A browser without a window, driven through a pipe in the words of the DevTools protocol: no package is needed.

https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
SECONDS = 120
"""How long one answer may take on a machine that does much else."""
_KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}


class Chromium:
    """One page. ``said`` collects what the page complains of, ``asked`` every address that it asks for."""

    def __init__(self, folder: Path) -> None:
        assert PROGRAM
        inward, self._out = os.pipe()
        self._in, outward = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (inward, outward)]  # not 3 or 4 themselves
        options = [
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
            *("--no-first-run", "--disable-background-networking", "--disable-extensions", "--mute-audio"),
            *("--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"),
        ]
        start = f"import os, sys; os.dup2({ends[0]}, 3); os.dup2({ends[1]}, 4); os.execv(sys.argv[1], sys.argv[1:])"
        self._process = subprocess.Popen(
            [sys.executable, "-c", start, PROGRAM, *options],
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for end in (inward, outward, *ends):
            os.close(end)
        self._read = b""
        self._number = 0
        self._session: dict[str, str] = {}
        self._loaded = False
        self.said: list[str] = []
        self.asked: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        for end in (self._out, self._in):
            os.close(end)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **self._session}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + SECONDS
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self._in, 1 << 20)
            assert part, "the browser has ended"
            self._read += part
        line, _, self._read = self._read.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        params = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Network.requestWillBeSent":
                self.asked.append(params["request"]["url"])
            case "Log.entryAdded":
                self.said.append(params["entry"]["text"])
            case "Runtime.exceptionThrown":
                self.said.append(json.dumps(params["exceptionDetails"]))
        return message

    def open(self, file: Path, address: str = "") -> None:
        """Load a file anew, with what follows ``#`` in its address."""
        self.call("Page.navigate", url="about:blank")
        self.said.clear()
        self.asked.clear()
        self._loaded = False
        self.call("Page.navigate", url=file.resolve().as_uri() + address)
        while not self._loaded:
            self._next()
        self.settle()

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        self.ask("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")

    def ask(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def size(self, width: int, height: int = 900) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def media(self, kind: str = "", **features: str) -> None:
        """``media("print")``, ``media(prefers_color_scheme="dark")``; without arguments the usual."""
        named = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", media=kind, features=named)

    def press(self, key: str, *, shift: bool = False) -> None:
        text = {"Enter": "\r", " ": " "}.get(key) or (key if len(key) == 1 else "")
        about = {"key": key, "windowsVirtualKeyCode": _KEYS.get(key, ord(key[0].upper())), "modifiers": 8 * shift}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **about)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of the first element."""
        x, y = self.ask(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            "e.scrollIntoView({block: 'center', behavior: 'instant'}); "
            "const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, file: Path, *, whole: bool = True) -> None:
        """A screenshot of the whole page, or of what is in view."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(data["data"]))

    def pages(self) -> bytes:
        """The page as it is printed, a PDF."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])
