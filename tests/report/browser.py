"""A page in a real browser: headless Chromium, where there is one."""

import shutil
import subprocess

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")


def opened(text: str, folder) -> tuple[str, str, str]:
    """The document after its scripts, what the browser says, and what it asked the network for."""
    path, log = folder / "page.html", folder / "net.json"
    path.write_text(text)
    assert CHROMIUM is not None
    process = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}",
            f"--log-net-log={log}", "--dump-dom", path.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return process.stdout, process.stderr, log.read_text() if log.exists() else ""
