"""A headless Chromium, driven over its own protocol: pages, keys, pictures of the screen."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
START_S = 60.0
_KEYS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
_KEYS |= {"Enter": 13, "Escape": 27, "Tab": 9, "Home": 36, "End": 35}


def find_browser() -> str | None:
    """The program, or None if none is installed."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One page of a running browser."""

    def __init__(self, url: str) -> None:
        self._socket = connect(url, max_size=None, open_timeout=START_S)
        self._ids = count(1)
        self._events: list[dict[str, Any]] = []
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = self._read(START_S)
            if message.get("id") == number:
                assert "error" not in message, message
                return dict(message["result"])

    def _read(self, timeout_s: float) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._socket.recv(timeout_s))
        if "method" in message:
            self._events.append(message)
        return message

    def open(
        self, url: str, *, width: int = 1280, height: int = 900, scheme: str = "light"
    ) -> None:
        """Load a page in a window of this size and a system of this colour scheme."""
        self._events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.run("window.isOld = true")  # the load of an earlier page may be told late
        self.call("Page.navigate", url=url)
        self.wait_for("!window.isOld && document.readyState === 'complete'", START_S)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        answer = self.call(
            "Runtime.evaluate",
            expression=script,
            returnByValue=True,
            awaitPromise=True,
            userGesture=True,
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, script: str, timeout_s: float = 30.0) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + timeout_s
        while not self.run(script):
            assert time.monotonic() < deadline, f"never true: {script}"
            time.sleep(0.02)

    def press(self, key: str) -> None:
        """Press and let go of a key, by the name that pages know it by."""
        code = _KEYS.get(key, ord(key.upper()[0]))
        fields: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": code}
        text = "\r" if key == "Enter" else key if len(key) == 1 else None
        down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
        self.call("Input.dispatchKeyEvent", **down, **fields)
        self.call("Input.dispatchKeyEvent", type="keyUp", **fields)

    def type(self, text: str) -> None:
        """Put text where the focus is."""
        self.call("Input.insertText", text=text)

    def requests(self) -> list[str]:
        """Every address that was asked for since the page was opened, `data:` ones left out."""
        self.run("0")  # what happened until now has been told
        asked = [e for e in self._events if e["method"] == "Network.requestWillBeSent"]
        urls = [str(each["params"]["request"]["url"]) for each in asked]
        return [url for url in urls if not url.startswith("data:")]

    def complaints(self) -> list[str]:
        """Errors that the browser or a script has told."""
        self.run("0")
        found = []
        for event in self._events:
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(event["params"]["exceptionDetails"]))
            elif (
                event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error"
            ):
                found.append(str(event["params"]["entry"]))
        return found

    def screenshot(self, path: Path) -> None:
        """A PNG of what is in the window."""
        answer = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(answer["data"]))

    def close(self) -> None:
        self._socket.close()


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A browser of its own with one page, gone when the block ends."""
    program = find_browser()
    assert program is not None
    options = (
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--no-first-run", "--disable-extensions", "--disable-background-networking"),
        *("--disable-component-update", "--disable-sync", "--mute-audio", "--hide-scrollbars"),
        "--remote-debugging-port=0",
    )
    with (profile.parent / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            [program, *options, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        page = Page(_page_url(profile, process))
        try:
            yield page
        finally:
            page.close()
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _page_url(profile: Path, process: subprocess.Popen[bytes]) -> str:
    """Where the first page listens: the browser writes its port into its profile."""
    import urllib.request

    port_file, deadline = profile / "DevToolsActivePort", time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        if port_file.exists() and (lines := port_file.read_text().split()):
            with urllib.request.urlopen(f"http://127.0.0.1:{lines[0]}/json/list") as answer:
                pages = [each for each in json.load(answer) if each["type"] == "page"]
            if pages:
                return str(pages[0]["webSocketDebuggerUrl"])
        time.sleep(0.05)
    log = (profile.parent / "chromium.log").read_text(errors="replace")
    raise RuntimeError(f"the browser did not start:\n{log[-2000:]}")
