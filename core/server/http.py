"""HTTP below the routes: listening, request ids, size limit, counting, disconnects. Pure ASGI."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import secrets
import socket
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, TypeVar

import uvicorn
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.errors import AddressInUse, ConfigError, RequestRejected
from core.logs import get_logger
from core.server.generation import Generation
from core.server.responses import error_body, json_bytes
from metrics.families import ROUTES
from metrics.prometheus import ServerMetrics

log = get_logger("xspec.server")

MAX_BODY_BYTES = 8 * 2**20
# A client's own request id is kept if it is harmless in logs and headers.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}\Z")
_PLAIN_ROUTES = frozenset(route for route, _ in ROUTES)
_CONVERTER = re.compile(r":[a-z]+\}")
CLIENT_GONE = 499  # seen by logs and metrics only: nobody is left to read it

T = TypeVar("T")


class ClientGone(Exception):
    """The client has closed its connection; what it asked for has been cancelled."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` while the client is there. The request's body must have been read."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in (working, watching):
            task.cancel()
        # Cleaning up (aborting in the engine) must be over before the response counts as finished.
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events of one generation, which is closed whatever happens to the connection."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, events: AsyncIterator[bytes]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._generation, contextlib.suppress(ClientGone):
            await until_disconnect(receive, self._send_events(send))

    async def _send_events(self, send: Send) -> None:
        started = False
        async for chunk in self._events:
            # Not before the first event: until then an error is an answer with a status of its own.
            if not started:
                start = {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
                await send(start)
                started = True
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Edge:
    """The outermost layer: request id, body limit, last resort for errors, one count per response."""

    def __init__(self, app: ASGIApp, *, metrics: ServerMetrics, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        status: int | None = None

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, self._limited(scope, receive), send_marked)
        except Exception:
            log.exception("http.failed", request_id=request_id)
            if status is not None:
                raise  # too late for an answer: the server cuts the connection
            body = error_body("internal error; see the server's log", status=500)
            await Response(json_bytes(body), 500, media_type="application/json")(scope, receive, send_marked)
        finally:
            self._metrics.http_request(route_template(scope), scope["method"], status or CLIENT_GONE)

    def _limited(self, scope: Scope, receive: Receive) -> Receive:
        """Return a receive that refuses bodies over the limit, announced or not."""
        announced = Headers(scope=scope).get("content-length", "")
        left = self._max_body_bytes
        too_large = announced.isdigit() and int(announced) > left

        async def receive_limited() -> Message:
            nonlocal left
            if not too_large:
                message = await receive()
                left -= len(message.get("body", b""))
            if too_large or left < 0:
                limit = self._max_body_bytes
                raise RequestRejected(
                    f"the body is larger than {limit} bytes", status=413, code="body_too_large"
                )
            return message

        return receive_limited


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _REQUEST_ID.match(given) else secrets.token_hex(12)


def route_template(scope: Scope) -> str:
    """Return the route that answered, or would have; never a path that the client made up."""
    path = getattr(scope.get("route"), "path", None)
    if isinstance(path, str):
        return _CONVERTER.sub("}", path)
    return scope["path"] if scope["path"] in _PLAIN_ROUTES else "other"


def bind_socket(host: str, port: int) -> socket.socket:
    """Listen on host:port (0: the system chooses). Call it before anything slow: a taken port shows at once.

    Clients that connect before `serve_http` runs wait in the backlog.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host={host}: cannot be resolved ({error.strerror}); give an address") from error
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        # Two sockets may be bound to one port as long as neither listens.
        sock.listen(2048)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            message = f"--port={port}: {host}:{port} is in use; stop the other server or give another port"
            raise AddressInUse(message) from error
        raise ConfigError(f"--host={host} --port={port}: cannot listen there ({error.strerror})") from error
    sock.setblocking(False)
    return sock


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the launcher owns signals and decides the exit code."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_http(
    app: ASGIApp, sock: socket.socket, stop: asyncio.Event, *, graceful_seconds: float = 5.0
) -> None:
    """Serve until `stop` is set; open responses then have `graceful_seconds` to end. Closes the socket."""
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=65,  # longer than the idle pools of usual clients
        timeout_graceful_shutdown=max(1, round(graceful_seconds)),
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[sock]), name="http")
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving
    finally:
        stopping.cancel()
