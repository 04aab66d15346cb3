"""Chromium without a window, driven through pipes by the DevTools protocol."""

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

PROGRAM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
_PATIENCE_S = 60
_START = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """A browser process; use it in a `with` block."""

    def __init__(self, profile):
        down, up = os.pipe(), os.pipe()
        # The browser reads from descriptor 3 and writes to 4; these here must be others.
        theirs = [fcntl.fcntl(each, fcntl.F_DUPFD, 10) for each in (down[0], up[1])]
        options = [
            *("--headless=new", "--remote-debugging-pipe", f"--user-data-dir={profile}"),
            *("--no-first-run", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"),
            # Chromium's sandbox refuses to run as root.
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
        ]
        command = [sys.executable, "-S", "-c", _START, *map(str, theirs), PROGRAM, *options]
        self._process = subprocess.Popen(command, pass_fds=theirs, stderr=subprocess.DEVNULL)
        for each in (down[0], up[1], *theirs):
            os.close(each)
        self._requests = open(down[1], "wb")  # noqa: SIM115
        self._replies = open(up[0], "rb", buffering=0)  # noqa: SIM115
        self._count, self._unread, self.events = 0, b"", []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        self._requests.close()
        self._replies.close()

    def ask(self, method, session=None, **params):
        """Sends a request and returns its result; events that come meanwhile are kept."""
        self._count += 1
        request = {"id": self._count, "method": method, "params": params}
        if session:
            request["sessionId"] = session
        self._requests.write(json.dumps(request).encode() + b"\0")
        self._requests.flush()
        while (reply := self._next()).get("id") != self._count:
            self.events.append(reply)
        assert "error" not in reply, reply
        return reply["result"]

    def _next(self):
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._replies], [], [], _PATIENCE_S)
            assert ready, "the browser does not answer"
            piece = self._replies.read(1 << 16)
            assert piece, "the browser has ended"
            self._unread += piece
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def page(self, file=None, width=1200, **emulated):
        """A tab with a page in it."""
        return Page(self, file, width, **emulated)


class Page:
    """A tab; what its user sees and does."""

    def __init__(self, browser, file, width, script=True, dark=False):
        self._browser = browser
        target = browser.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._target, self._session = target, attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._ask(f"{domain}.enable")
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._ask("Emulation.setDeviceMetricsOverride", **metrics)
        self._ask("Emulation.setScriptExecutionDisabled", value=not script)
        self.prefer(dark)
        self._ask("Page.navigate", url=file.as_uri())
        # `load` comes after the page's own script has run, and before Plotly has.
        self.wait("document.readyState === 'complete' && location.protocol === 'file:'")

    def close(self):
        self._browser.ask("Target.closeTarget", targetId=self._target)

    def _ask(self, method, **params):
        return self._browser.ask(method, self._session, **params)

    @property
    def errors(self):
        """Exceptions and messages of the page, such as violations of its policy."""
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            if event["method"] == "Runtime.exceptionThrown":
                found.append(event["params"]["exceptionDetails"]["text"])
            if event["method"] == "Log.entryAdded":
                found.append(event["params"]["entry"]["text"])
        return found

    def see(self, expression):
        """The value of an expression in JavaScript."""
        options = {"returnByValue": True, "awaitPromise": True}
        found = self._ask("Runtime.evaluate", expression=expression, **options)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression):
        """Waits until an expression is true."""
        end = time.monotonic() + _PATIENCE_S
        while not self.see(expression):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.02)

    def wait_for_charts(self):
        self.wait("[...document.querySelectorAll('.chart')].every((c) => c.querySelector('svg'))")

    def prefer(self, dark):
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])

    def hover(self, element):
        """Moves the mouse to the middle of an element, an expression in JavaScript."""
        self.see(f"({element}).scrollIntoView({{ block: 'center' }})")
        box = f"(({element}).getBoundingClientRect())"
        x, y = self.see(f"[{box}.x + {box}.width / 2, {box}.y + {box}.height / 2]")
        self._mouse("mouseMoved", x, y)
        return x, y

    def click(self, element):
        x, y = self.hover(element)
        for kind in ("mousePressed", "mouseReleased"):
            self._mouse(kind, x, y, button="left", clickCount=1)

    def _mouse(self, kind, x, y, **options):
        self._ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, **options)

    def press(self, key):
        """Presses Enter or Tab."""
        code = {"Enter": 13, "Tab": 9}[key]
        named = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        text = {"text": "\r"} if key == "Enter" else {}
        self._ask("Input.dispatchKeyEvent", type="keyDown", **named, **text)
        self._ask("Input.dispatchKeyEvent", type="keyUp", **named)

    def printed(self):
        """The page as a PDF."""
        return base64.b64decode(self._ask("Page.printToPDF")["data"])

    def picture(self, full=True):
        """The page as a PNG."""
        found = self._ask("Page.captureScreenshot", captureBeyondViewport=full)
        return base64.b64decode(found["data"])
