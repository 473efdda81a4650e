"""A live page that really runs: uvicorn on a free port, workers in processes of their own."""

import threading
from collections.abc import Iterator

import pytest
from live_server import HOSTILE, TOKEN, Served

from partita.serve.app import make_app
from partita.serve.server import listen, server_of
from tests.report.browser import browser

__all__ = ["browser"]  # a fixture


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
