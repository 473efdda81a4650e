"""The server behind the page: what it lets in, what it asks the workers, what it streams.

Whoever knows the token, which is part of every address, may ask; nobody else is told anything. A
request that names another host (a page elsewhere whose name was pointed here) is refused, and so
is one that another page sent. A body is read only as far as a question is long. Nothing is loaded
from anywhere but here.
"""

import asyncio
import contextlib
import json
import secrets
import shlex
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass, field
from importlib import resources
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from partita.errors import InputError, PartitaError
from partita.files import decode_json
from partita.serve.asks import Ask, read_ask
from partita.serve.choices import choices
from partita.serve.workers import Message, Worker, Workers

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MOST_BODY = 64 * 1024  # bytes of a question
MOST_VIEWS = 64
MOST_VIEW_BYTES = 256 * 2**20
QUICK_WORKERS = 2
PATIENCE_S = {"quick": 30.0, "search": 1.0}
SEARCHES = ("plan", "schedule")

ASSETS = {"": ("index.html", "text/html"), "app.js": ("app.js", "text/javascript"),
          "app.css": ("app.css", "text/css")}  # fmt: skip
NOTHING_ELSE = "default-src 'none'; base-uri 'none'; form-action 'none'"
PAGE_POLICY = (
    f"{NOTHING_ELSE}; script-src 'self'; style-src 'self'; connect-src 'self'; frame-src 'self'; "
    "img-src data:; frame-ancestors 'none'"
)
VIEW_POLICY = (
    f"{NOTHING_ELSE}; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "frame-ancestors 'self'"
)
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass
class Views:
    """The pages and files of the last answers, by a name that nobody guesses."""

    kept: OrderedDict[str, dict[str, str]] = field(default_factory=OrderedDict)

    def keep(self, files: dict[str, str]) -> str:
        """Keep these; the oldest go where that is too much."""
        name = secrets.token_urlsafe(12)
        self.kept[name] = files
        while len(self.kept) > 1 and (
            len(self.kept) > MOST_VIEWS or self._size() > MOST_VIEW_BYTES
        ):
            self.kept.popitem(last=False)
        return name

    def _size(self) -> int:
        return sum(len(text) for files in self.kept.values() for text in files.values())


class Guard:
    """Lets in whoever has the token, speaks to this machine by its own name, and is brief."""

    def __init__(self, app: Starlette, token: str) -> None:
        self.app = app
        self.token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or say why not."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal = self._refusal(Request(scope))
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        await self.app(scope, receive, _with_headers(send))

    def _refusal(self, request: Request) -> Response | None:
        host = _host_of(f"//{request.headers.get('host', '')}")
        if host not in LOOPBACK:
            return _refused(403, "this page answers to 127.0.0.1 and localhost only")
        origin = request.headers.get("origin")
        if origin is not None and _host_of(origin) not in LOOPBACK:
            return _refused(403, "a page of another site may not ask")
        given = request.url.path.split("/")[1]
        if not secrets.compare_digest(given.encode(), self.token.encode()):
            return _refused(403, "open the address that partita serve printed: it has a token")
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 12 or int(length) > MOST_BODY:
            return _refused(413, f"a question has at most {MOST_BODY:,} bytes")
        return None


def _host_of(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None


def _with_headers(send: Send) -> Send:
    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            more = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
            message = {**message, "headers": [*message.get("headers", ()), *more]}
        await send(message)

    return sending


def _refused(code: int, sentence: str) -> Response:
    close = {"Connection": "close"} if code == 413 else {}  # the rest of the body is not read
    return PlainTextResponse(f"{sentence}\n", status_code=code, headers={**HEADERS, **close})


class LivePage:
    """What the handlers share: workers, views, searches that run."""

    def __init__(self, files_allowed: Collection[str], most_searches: int) -> None:
        self.files_allowed = tuple(files_allowed)
        self.quick = Workers(QUICK_WORKERS)
        self.searching = Workers(most_searches)
        self.views = Views()
        self.running: dict[str, Worker] = {}

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Workers begin and end with the server."""
        await self.quick.warm()
        try:
            yield
        finally:
            await asyncio.gather(self.quick.close(), self.searching.close())

    async def asset(self, request: Request) -> Response:
        """The page itself, its script and its style."""
        wanted = request.path_params.get("name", "")
        if wanted not in ASSETS:
            return _refused(404, "there is no such page")
        name, media = ASSETS[wanted]
        text = resources.files("partita.serve").joinpath("assets", name).read_text("utf-8")
        headers = {"Content-Security-Policy": PAGE_POLICY}
        return Response(text, media_type=f"{media}; charset=utf-8", headers=headers)

    async def options(self, request: Request) -> Response:
        """What can be chosen."""
        return JSONResponse(choices(self.files_allowed))

    async def ask(self, request: Request) -> Response:
        """A question that is answered at once: what if?"""
        kind, ask = await self._asked(request)
        if kind in SEARCHES:
            raise InputError(f"{kind} is a search", fix="search it instead", field="kind")
        worker = await self.quick.borrow(PATIENCE_S["quick"])
        try:
            async for message in _while_connected(request, worker.answer(ask)):
                if "done" in message or "refused" in message:
                    return JSONResponse(self._told(ask, message))
            return Response(status_code=499)
        finally:
            self.quick.give_back(worker)

    async def search(self, request: Request) -> Response:
        """A question that takes a while: best and bound as they come, then the answer."""
        kind, ask = await self._asked(request)
        if kind not in SEARCHES:
            raise InputError(f"{kind} is no search", fix="ask it instead", field="kind")
        worker = await self.searching.borrow(PATIENCE_S["search"])
        return StreamingResponse(self._streamed(ask, worker), media_type="text/event-stream")

    async def _streamed(self, ask: Ask, worker: Worker) -> AsyncIterator[str]:
        name = secrets.token_urlsafe(12)
        self.running[name] = worker
        try:
            yield _event("started", {"id": name, "command": command_line(ask)})
            async for message in worker.answer(ask):
                if "better" in message:
                    yield _event("better", message["better"])
                else:
                    yield _event("answer", self._told(ask, message))
        finally:  # also where the browser has gone
            del self.running[name]
            self.searching.give_back(worker)

    async def stop(self, request: Request) -> Response:
        """End a search with its best so far; whoever started it knows its name."""
        worker = self.running.get(str((await _body(request)).get("id")))
        if worker is not None:
            await worker.stop()
        return JSONResponse({"stopped": worker is not None})

    async def view(self, request: Request) -> Response:
        """The page of an answer, or a file to keep."""
        files = self.views.kept.get(request.path_params["view"], {})
        name = request.path_params.get("name", "page.html")
        if name not in files:
            return _refused(404, "this view is no longer kept; ask again")
        if name == "page.html":
            headers = {"Content-Security-Policy": VIEW_POLICY}
            return Response(files[name], media_type="text/html; charset=utf-8", headers=headers)
        headers = {"Content-Disposition": f'attachment; filename="{name}"'}
        return Response(files[name], media_type="application/json", headers=headers)

    async def _asked(self, request: Request) -> tuple[str, Ask]:
        body = await _body(request)
        kind, value = body.get("kind"), body.get("ask")
        if not isinstance(kind, str) or not isinstance(value, dict):
            raise InputError("the question has no kind or no ask", fix="give both", field="body")
        return kind, read_ask(kind, value, self.files_allowed)

    def _told(self, ask: Ask, message: Message) -> dict[str, Any]:
        """An answer as the browser gets it: large parts are kept here and named."""
        if "refused" in message:
            return {"refused": message["refused"], "command": command_line(ask)}
        answer = dict(message["done"])
        page, files = answer.pop("view", None), answer.pop("files", {})
        kept = {**files, **({} if page is None else {"page.html": page})}
        answer["view"] = self.views.keep(kept) if kept else None
        answer["files"] = sorted(files)
        return {**answer, "command": command_line(ask)}


def command_line(ask: Ask) -> str:
    """The command that asks the same, to paste into a shell."""
    return shlex.join(["partita", *ask.words()])


def _event(name: str, data: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(data, allow_nan=False)}\n\n"


async def _body(request: Request) -> dict[str, Any]:
    """The JSON object of a request, read no further than a question is long."""
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > MOST_BODY:
            raise _TooLongError
    return decode_json(data)


class _TooLongError(Exception):
    """A body without a stated length that does not end."""


async def _while_connected(
    request: Request, messages: AsyncIterator[Message]
) -> AsyncIterator[Message]:
    """The messages, as long as somebody waits for them."""
    gone = asyncio.create_task(_gone(request))
    try:
        while True:
            following = asyncio.ensure_future(anext(messages))
            await asyncio.wait({gone, following}, return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                following.cancel()
                return
            try:
                yield following.result()
            except StopAsyncIteration:
                return
    finally:
        gone.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _sentence(request: Request, error: Exception) -> Response:
    """Whatever a user has to change is one sentence."""
    if isinstance(error, _TooLongError):
        return _refused(413, f"a question has at most {MOST_BODY:,} bytes")
    code = 400 if isinstance(error, InputError) else 503
    return JSONResponse({"refused": " ".join(str(error).split("\n"))}, status_code=code)


def make_app(token: str, files_allowed: Collection[str] = (), most_searches: int = 4) -> Guard:
    """The application, as a server runs it."""
    live = LivePage(files_allowed, most_searches)
    handlers: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
        PartitaError: _sentence,
        _TooLongError: _sentence,
    }
    routes = [
        Route("/{token}/", live.asset),
        Route("/{token}/options", live.options),
        Route("/{token}/ask", live.ask, methods=["POST"]),
        Route("/{token}/search", live.search, methods=["POST"]),
        Route("/{token}/stop", live.stop, methods=["POST"]),
        Route("/{token}/views/{view}", live.view),
        Route("/{token}/views/{view}/{name}", live.view),
        Route("/{token}/{name}", live.asset),
    ]
    app = Starlette(routes=routes, lifespan=live.lifespan, exception_handlers=handlers)
    app.state.live = live
    return Guard(app, token)
