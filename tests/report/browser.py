"""Pages in a real browser: headless Chromium, where there is one, driven over its DevTools pipe."""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here (Debian: apt install chromium)"
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
PATIENCE_S = 60
OWN = ("file:", "data:", "blob:", "about:", "chrome:")


class Browser:
    """One Chromium; every page is a tab of its own."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self.folder = tempfile.mkdtemp(prefix="partita-chromium-")
        read, self._out = os.pipe()
        self._in, write = os.pipe()
        # Chromium reads commands from 3 and writes answers to 4.
        line = f'exec "$@" 3<&{read} 4>&{write}'
        self.process = subprocess.Popen(
            ["bash", "-c", line, "bash", CHROMIUM, *FLAGS, f"--user-data-dir={self.folder}"],
            pass_fds=(read, write), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(read)
        os.close(write)
        self._rest = b""
        self._numbers = itertools.count(1)
        self.tabs: dict[str, Tab] = {}

    def ask(self, method: str, session: str = "", **options: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": options}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], PATIENCE_S + 5)
            assert ready, f"Chromium has said nothing for {PATIENCE_S} s"
            more = os.read(self._in, 1 << 20)
            assert more, "Chromium has ended"
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)

    def _note(self, event: dict[str, Any]) -> None:
        tab = self.tabs.get(event.get("sessionId", ""))
        if tab is not None:
            tab.note(event["method"], event.get("params", {}))

    def wait_for(self, tab: "Tab", method: str) -> None:
        while method not in tab.seen:
            self._note(self._next())

    def open(
        self, page: str | Path, *, width: int = 1160, height: int = 900, dark: bool = False,
        fragment: str = "",
    ) -> "Tab":  # fmt: skip
        """A page (its text, a file, or an address) in a new tab.

        What has an address is opened with a memory of its own, as a second browser has.
        """
        context = {}
        if isinstance(page, str) and page.startswith("http://"):
            address = page
            context = self.ask("Target.createBrowserContext")
        else:
            path = page
            if isinstance(page, str):
                path = Path(self.folder) / f"page{next(self._numbers)}.html"
                path.write_text(page)
            address = Path(path).as_uri()
        target = self.ask("Target.createTarget", url="about:blank", **context)["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = self.tabs[session] = Tab(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.ask(f"{domain}.enable")
        tab.size(width, height)
        tab.media(prefers_color_scheme="dark" if dark else "light")
        tab.ask("Page.navigate", url=address + fragment)
        self.wait_for(tab, "Page.loadEventFired")
        return tab

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        os.close(self._out)
        os.close(self._in)
        shutil.rmtree(self.folder, ignore_errors=True)


class Tab:
    """One page: what it said, what it asked the network for, and hands to use it with."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self.browser, self.session, self.target = browser, session, target
        self.seen: set[str] = set()
        self.console: list[str] = []
        self.requests: list[str] = []

    def ask(self, method: str, **options: Any) -> dict[str, Any]:
        return self.browser.ask(method, self.session, **options)

    def note(self, method: str, params: dict[str, Any]) -> None:
        self.seen.add(method)
        if method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.console.append(json.dumps(params))
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith(OWN):
                self.requests.append(url)

    def size(self, width: int, height: int) -> None:
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
            mobile=False,
        )  # fmt: skip

    def media(self, **features: str) -> None:
        given = [{"name": n.replace("_", "-"), "value": value} for n, value in features.items()]
        self.ask("Emulation.setEmulatedMedia", features=given)

    def run(self, code: str) -> Any:
        """The value of an expression; a promise is waited for."""
        answer = self.ask(
            "Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, code: str) -> Any:
        """Wait in the page until an expression is true; its value."""
        return self.run(
            "new Promise((yes, no) => { const look = () => { const value = (" + code + ");"
            " if (value) yes(value); else setTimeout(look, 20); }; look();"
            f" setTimeout(() => no({code!r} + ' does not become true'), {PATIENCE_S}000); }})"
        )

    def frames(self) -> None:
        """Let everything be drawn; a tab behind another one draws nothing."""
        self.ask("Page.bringToFront")
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def mouse(self, kind: str, x: float, y: float, **options: Any) -> None:
        self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, **options)

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, **text)

    def picture(self, path: Path) -> None:
        data = self.ask("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def printed(self) -> bytes:
        options = {"printBackground": True, "preferCSSPageSize": True}
        return base64.b64decode(self.ask("Page.printToPDF", **options)["data"])

    def close(self) -> None:
        self.browser.ask("Target.closeTarget", targetId=self.target)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests of a worker."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here (Debian: apt install chromium)")
    shared = Browser()
    yield shared
    shared.close()


def quiet(tab: Tab) -> bool:
    """Has the page said nothing and asked for nothing? (What it says is told if not.)"""
    assert tab.console == []
    assert tab.requests == []
    return True
