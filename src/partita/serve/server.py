"""Opening the port and running the application until Ctrl-C."""

import contextlib
import errno
import ipaddress
import secrets
import socket
from collections.abc import Callable, Collection

import uvicorn

from partita.errors import InputError
from partita.serve.app import Guard, make_app

TOKEN_BYTES = 18


def listen(host: str, port: int) -> socket.socket:
    """The port, taken and listening; 0 is any that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        opened.bind((host, port))
        opened.listen()  # whoever comes before the server is ready waits
    except OSError as error:
        opened.close()
        taken = error.errno == errno.EADDRINUSE
        raise InputError(
            f"port {port} is taken" if taken else f"port {port} cannot be had ({error.strerror})",
            fix="choose another with --port, or leave it out for a free one",
            field="--port",
        ) from None
    return opened


def check_loopback(host: str) -> str:
    """The address of this machine to itself; all others are refused."""
    if host == "localhost":
        return "127.0.0.1"
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return host
    raise InputError(
        f"{host[:60]!r} can be reached from other machines",
        fix="use 127.0.0.1; from elsewhere: ssh -L PORT:127.0.0.1:PORT this-machine",
        field="--host",
    )


def server_of(app: Guard) -> uvicorn.Server:
    """The server of an application: quiet, and it does not wait long for streams to end."""
    return uvicorn.Server(uvicorn.Config(
        app, log_level="error", access_log=False, server_header=False, ws="none", http="h11",
        timeout_graceful_shutdown=1,
    ))  # fmt: skip


def run(
    host: str, port: int, files_allowed: Collection[str], most_searches: int,
    started: Callable[[str], None],
) -> None:  # fmt: skip
    """Serve until Ctrl-C; `started` is told the address as soon as it answers."""
    host = check_loopback(host)
    opened = listen(host, port)
    token = secrets.token_urlsafe(TOKEN_BYTES)
    app = make_app(token, files_allowed, most_searches)
    name = f"[{host}]" if ":" in host else host
    started(f"http://{name}:{opened.getsockname()[1]}/{token}/")
    with opened, contextlib.suppress(KeyboardInterrupt):
        server_of(app).run(sockets=[opened])
