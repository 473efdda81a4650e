"""A client of a live page that really runs, as a browser is one."""

import http.client
import json
from dataclasses import dataclass
from typing import Any

from partita.serve.app import LivePage

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
