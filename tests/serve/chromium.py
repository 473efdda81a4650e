"""A browser that tests can use as a person does: headless Chromium, spoken to over two pipes."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
PATIENCE_MS = 60_000
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe",
)  # fmt: skip


class Tab:
    """One page: what it says, what it asks the network for, and what is typed into it."""

    def __init__(self, browser: "Browser", session: str) -> None:
        self.browser, self.session = browser, session
        self.loaded = False
        self.errors: list[str] = []
        self.addresses: list[str] = []

    def call(self, method: str, **params: Any) -> Any:
        return self.browser.call(method, session=self.session, **params)

    def run(self, code: str) -> Any:
        """What an expression of JavaScript gives; promises are awaited."""
        made = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in made, made["exceptionDetails"]
        return made["result"].get("value")

    def until(self, code: str) -> Any:
        """Wait in the page until an expression is true; its value."""
        return self.run(
            "new Promise((yes, no) => { const look = () => { const value = (" + code + ");"
            " if (value) yes(value); else setTimeout(look, 20); }; look();"
            f" setTimeout(() => no({code!r} + ' does not become true'), {PATIENCE_MS}); }})"
        )

    def key(self, name: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name,
                      windowsVirtualKeyCode=code)  # fmt: skip

    def media(self, **features: str) -> None:
        given = [
            {"name": name.replace("_", "-"), "value": value} for name, value in features.items()
        ]
        self.call("Emulation.setEmulatedMedia", features=given)

    def width(self, pixels: int, height: int = 900) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=pixels, height=height,
                  deviceScaleFactor=1, mobile=False)  # fmt: skip

    def picture(self, path: Path) -> None:
        made = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(made["data"]))


class Browser:
    """One browser process."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        read_end, self._to = os.pipe()
        self._from, write_end = os.pipe()
        os.set_inheritable(read_end, True)
        os.set_inheritable(write_end, True)
        script = f'exec 3<&{read_end} 4>&{write_end}; exec "$@"'
        self.process = subprocess.Popen(
            ["bash", "-c", script, "chromium", CHROMIUM, *FLAGS, f"--user-data-dir={folder}"],
            pass_fds=(read_end, write_end), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(read_end)
        os.close(write_end)
        self._reader = os.fdopen(self._from, "rb")
        self._text = b""
        self._number = 0
        self.tabs: dict[str, Tab] = {}

    def open(self, address: str) -> Tab:
        """A tab of its own, with a memory of its own, as a second browser has."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        tab = self.tabs[attached["sessionId"]] = Tab(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Network", "Log"):
            tab.call(f"{domain}.enable")
        tab.loaded = False
        tab.call("Page.navigate", url=address)
        while not tab.loaded:
            self._note(self._next())
        return tab

    def call(self, method: str, session: str | None = None, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == self._number:
                assert "error" not in told, told["error"]
                return told["result"]
            self._note(told)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._text:
            more = os.read(self._from, 1 << 16)
            assert more, "the browser has ended"
            self._text += more
        line, _, self._text = self._text.partition(b"\0")
        return json.loads(line)

    def _note(self, told: dict[str, Any]) -> None:
        tab = self.tabs.get(told.get("sessionId", ""))
        if tab is None:
            return
        method, params = told["method"], told["params"]
        if method == "Page.loadEventFired":
            tab.loaded = True
        elif method == "Runtime.exceptionThrown":
            tab.errors.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            tab.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            tab.errors.append(str(params["args"]))
        elif method == "Network.requestWillBeSent":
            tab.addresses.append(params["request"]["url"])

    def close(self) -> None:
        with contextlib.suppress(AssertionError, OSError):
            self.call("Browser.close")
        self.process.wait(timeout=20)
        os.close(self._to)
        self._reader.close()


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    made = Browser(folder)
    try:
        yield made
    finally:
        made.close()
