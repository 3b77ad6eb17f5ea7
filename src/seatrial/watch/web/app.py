"""The web application, read-only. Every response has headers that forbid foreign scripts and framing."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping
from importlib import resources
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from seatrial.watch.web import compare, heat, tail
from seatrial.watch.web.access import COOKIE, Access, answers_to
from seatrial.watch.web.pages import PAGES
from seatrial.watch.web.polled_run import PolledRun
from seatrial.watch.web.runs import Runs
from seatrial.watch.web.watched import Body, Watched, body_of

_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
_TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
    "json": "application/json",
}
_PUBLIC = ("login.html", "login.js", "app.css", "icon.svg", "theme.js")
_MOST_STREAMS = 500
_LONGEST_LOGIN = 4096  # bytes
_COMPRESSED = (".js", ".css", ".html", ".svg")


class Guard:
    """Rejects writes, unauthenticated requests and foreign Host names; adds the security headers."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # there are no web sockets
            await send({"type": "websocket.close", "code": 1008})
            return

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        refused = self._refused(scope)
        await (refused or self._app)(scope, receive, sent)

    def _refused(self, scope: Scope) -> Response | None:
        headers, path = Headers(scope=scope), scope["path"]
        if not answers_to(headers.get("host")):
            return PlainTextResponse("unknown host name: use the server's IP address, or localhost", 421)
        login = path == "/login" and scope["method"] == "POST"
        if scope["method"] not in ("GET", "HEAD") and not login:
            return PlainTextResponse("this server is read-only", 405, {"allow": "GET, HEAD"})
        public = login or path == "/" or path.removeprefix("/static/") in _PUBLIC
        if public or self._access.allows(Request(scope).cookies.get(COOKIE)):
            return None
        bearer = headers.get("authorization", "").removeprefix("Bearer ").strip()
        if path == "/metrics" and bearer:  # Prometheus sends no cookies
            try:
                if self._access.is_right(bearer, _address(Request(scope))):
                    return None
            except PermissionError as error:
                return PlainTextResponse(str(error), 429, {"retry-after": "60"})
        return PlainTextResponse("token required: open / to enter it", 401)


class Static:
    """Static files, read once."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[str, Body]] = {}
        root = resources.files("seatrial.watch.web") / "static"
        for folder in ("", "uplot"):
            for item in (root / folder if folder else root).iterdir():
                if item.is_file():
                    raw = item.read_bytes()
                    tag = f'"{hashlib.blake2b(raw, digest_size=12).hexdigest()}"'
                    packed = gzip.compress(raw, mtime=0) if item.name.endswith(_COMPRESSED) else b""
                    kind = _TYPES.get(item.name.rpartition(".")[2], "text/plain")
                    name = f"{folder}/{item.name}" if folder else item.name
                    self.files[name] = (f"{kind}; charset=utf-8", Body(raw, packed, tag))


def application(make_runs: Callable[[], Runs], access: Access, server_runs: list[Runs]) -> ASGIApp:
    """The ASGI application. On start-up it creates the runs in its event loop and adds them to `server_runs`."""
    static = Static()

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.runs = make_runs()
        app.state.runs.begin()
        server_runs.append(app.state.runs)
        yield
        app.state.runs.end()

    def runs_of(request: Request) -> Runs:
        runs: Runs = request.app.state.runs
        return runs

    async def watched(request: Request, name: str | None = None) -> Watched:
        name = request.path_params["run"] if name is None else name
        found = await run_in_threadpool(runs_of(request).get, name)
        if found is None:
            raise HTTPException(404, "no run with this name")
        return found

    async def index(request: Request) -> Response:
        allowed = access.allows(request.cookies.get(COOKIE))
        return _file(request, "index.html" if allowed else "login.html")

    async def asset(request: Request) -> Response:
        return _file(request, request.path_params["name"])

    def _file(request: Request, name: str) -> Response:
        found = static.files.get(name)
        if found is None:
            raise HTTPException(404, "no such file")
        kind, body = found
        return _answer(request, body, kind, {"cache-control": "no-cache"})

    async def log_in(request: Request) -> Response:
        if request.headers.get("content-type", "").partition(";")[0] != "text/plain":
            raise HTTPException(415, "send the token as text/plain")
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise HTTPException(403, "cross-site login refused")
        data = b""
        async for part in request.stream():
            data += part
            if len(data) > _LONGEST_LOGIN:
                raise HTTPException(413, "too long for a token")
        try:
            session = access.log_in(data.decode("utf-8", errors="replace").strip(), _address(request))
        except PermissionError as error:
            return PlainTextResponse(str(error), 429, {"retry-after": "60"})
        if session is None:
            return PlainTextResponse("wrong token", 403)
        response = PlainTextResponse("")
        response.set_cookie(COOKIE, session, httponly=True, samesite="strict", path="/")
        return response

    async def listed(request: Request) -> Response:
        return _answer(request, body_of(await run_in_threadpool(runs_of(request).listed)))

    async def stream(request: Request) -> Response:
        found = await watched(request)
        if found.feed.readers >= _MOST_STREAMS:
            raise HTTPException(503, "too many browsers are watching this run")
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(found.feed.stream(), media_type="text/event-stream", headers=headers)

    async def made(
        request: Request, key: tuple[str, ...], make: Callable[[PolledRun], Mapping[str, Any]]
    ) -> Response:
        found = await watched(request)
        return _answer(request, await run_in_threadpool(found.body, key, make))

    async def page(request: Request) -> Response:
        name = request.path_params["page"]
        if name not in PAGES:
            raise HTTPException(404, "no such page")
        return await made(request, ("page", name), PAGES[name])

    async def heat_map(request: Request) -> Response:
        metric = request.query_params.get("metric", heat.OWN_WORK)[:200]
        return await made(request, ("heat", metric), lambda polled: heat.heat(polled, metric))

    async def over_time(request: Request) -> Response:
        metric, node = request.query_params.get("metric", "")[:200], _number(request, "node") or 0

        def make(polled: PolledRun) -> Mapping[str, Any]:
            return heat.over_time(polled.view.folder, node, metric, polled.now)

        return await made(request, ("series", metric, str(node)), make)

    async def logs(request: Request) -> Response:
        generation = _number(request, "generation")
        return await made(
            request, ("logs", str(generation)), lambda polled: tail.logs(polled.view.folder, generation)
        )

    async def log(request: Request) -> Response:
        found = await watched(request)
        generation, wanted = _number(request, "generation") or 0, request.query_params.get("id", "")
        after, before = _number(request, "after"), _number(request, "before")

        def read() -> Body:
            there = tail.find(found.folder, generation, wanted)
            if there is None:
                raise HTTPException(404, "no such log")
            return body_of(tail.part(there, after=after, before=before))

        return _answer(request, await run_in_threadpool(read))

    async def compared(request: Request) -> Response:
        names = list(dict.fromkeys(request.query_params.getlist("run")))[: compare.MOST]

        chosen = {name: await watched(request, name) for name in names}
        columns = await asyncio.gather(
            *(run_in_threadpool(each.use, compare.column) for each in chosen.values())
        )
        known = {name: found for name, found in zip(chosen, columns, strict=True) if found is not None}
        return _answer(request, body_of(await run_in_threadpool(compare.comparison, known)))

    async def metrics(request: Request) -> Response:
        return Response(await run_in_threadpool(runs_of(request).metrics), media_type=CONTENT_TYPE_LATEST)

    async def failed(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            return PlainTextResponse(error.detail, error.status_code, error.headers)
        return PlainTextResponse(str(error), 503)

    app = Starlette(
        routes=[
            Route("/", index),
            Route("/login", log_in, methods=["POST"]),
            Route("/static/{name:path}", asset),
            Route("/metrics", metrics),
            Route("/api/runs", listed),
            Route("/api/compare", compared),
            Route("/api/run/{run}/stream", stream),
            Route("/api/run/{run}/page/{page}", page),
            Route("/api/run/{run}/heat", heat_map),
            Route("/api/run/{run}/series", over_time),
            Route("/api/run/{run}/logs", logs),
            Route("/api/run/{run}/log", log),
        ],
        exception_handlers={HTTPException: failed, TimeoutError: failed},
        lifespan=lifespan,
    )
    return Guard(app, access)


def _answer(
    request: Request, body: Body, kind: str = "application/json", headers: Mapping[str, str] | None = None
) -> Response:
    more = {"etag": body.tag, "vary": "accept-encoding", "cache-control": "no-cache", **(headers or {})}
    if request.headers.get("if-none-match") == body.tag:
        return Response(status_code=304, headers=more)
    if body.packed and "gzip" in request.headers.get("accept-encoding", ""):
        return Response(body.packed, media_type=kind, headers={**more, "content-encoding": "gzip"})
    return Response(body.raw, media_type=kind, headers=more)


def _address(request: Request) -> str:
    return request.client.host if request.client is not None else ""


def _number(request: Request, key: str) -> int | None:
    text = request.query_params.get(key, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 18 else None
