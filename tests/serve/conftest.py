"""A live page that really runs: uvicorn on a free port, workers in processes of their own."""

import http.client
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from partita.serve.app import LivePage, make_app
from partita.serve.server import listen, server_of

TOKEN = "a-token-for-tests"
HOSTILE = "<img src=x onerror=alert(1)>&'\"\u202e\U0001f600.json"


@dataclass
class Served:
    """The address of a page, and a client for it."""

    port: int
    live: LivePage

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/{TOKEN}/"

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, str]:
        """Status, headers and text of an answer; `path` is after the token."""
        return self.raw(method, f"/{TOKEN}/{path}", body, headers)

    def raw(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, headers or {})
            response = connection.getresponse()
            return response.status, response.headers, response.read().decode()
        finally:
            connection.close()

    def ask(self, kind: str, **ask: Any) -> Any:
        return json.loads(self.request("POST", "ask", {"kind": kind, "ask": ask})[2])


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    app = make_app(TOKEN, [HOSTILE])
    opened = listen("127.0.0.1", 0)
    server = server_of(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
    thread.start()
    try:
        yield Served(opened.getsockname()[1], app.app.state.live)
    finally:
        server.should_exit = True
        thread.join(30)
        opened.close()
    assert not thread.is_alive()
