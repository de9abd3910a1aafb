"""`/livez`, `/readyz` and `/metrics` on a port of their own: the smallest HTTP server that can be trusted with it.

It answers GET and HEAD, one request per connection, from values that are at hand: no check does I/O, so a probe is
never slower than the event loop. (A supervisor asks its replicas first; `refresh` has a limit for that.) Size, time and
number of connections are bounded, because a port attracts scanners.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Self

import msgspec
import structlog
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from coatcheck.errors import InvalidSettings
from coatcheck.worker.metrics import Metrics
from coatcheck.worker.settings import Settings

__all__ = ["Checks", "HealthServer"]

log: structlog.stdlib.BoundLogger = structlog.get_logger()

Checks = Callable[[], Mapping[str, bool]]
"""Named statements about the process; all true means healthy."""
Refresh = Callable[[], Awaitable[None]]
"""Brings what the checks and the registry look at up to date."""

REQUEST_TIMEOUT_S = 5.0
MAX_HEAD_BYTES = 8 * 1024
MAX_CONNECTIONS = 32


@dataclass(frozen=True, slots=True)
class Response:
    status: HTTPStatus
    content_type: str = "text/plain; charset=utf-8"
    body: bytes = b""


class HealthServer:
    """Serves probes from `start` to `stop`. `live` and `ready` are asked at every probe and must not block.

    `refresh` is awaited before each of them and has to come back well within REQUEST_TIMEOUT_S.
    """

    def __init__(
        self,
        port: int,
        host: str = "127.0.0.1",
        *,
        live: Checks,
        ready: Checks,
        registry: CollectorRegistry,
        refresh: Refresh | None = None,
    ) -> None:
        self._port = port
        self._host = host
        self._live = live
        self._ready = ready
        self._registry = registry
        self._refresh = refresh
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}

    @classmethod
    def from_settings(cls, settings: Settings, *, live: Checks, ready: Checks, metrics: Metrics) -> Self | None:
        """The server a process asked for by `health_port`, or None if it asked for none."""
        if settings.health_port is None:
            return None
        return cls(settings.health_port, settings.health_host, live=live, ready=ready, registry=metrics.registry)

    @property
    def port(self) -> int:
        """The port in use; differs from the one asked for when that was 0."""
        if self._server is None or not self._server.sockets:
            return self._port
        return int(self._server.sockets[0].getsockname()[1])

    async def start(self) -> None:
        """Listen. Raises InvalidSettings, with what to do, when the address cannot be had."""
        try:
            self._server = await asyncio.start_server(
                self._serve, self._host, self._port, limit=MAX_HEAD_BYTES, backlog=MAX_CONNECTIONS
            )
        except OSError as error:
            raise InvalidSettings(_why_not(error, host=self._host, port=self._port)) from error
        log.info("health_server_started", host=self._host, port=self.port)

    async def stop(self) -> None:
        """Stop listening and drop the connections there are. Safe to repeat."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        serving = dict(self._open)
        for writer in serving:
            writer.transport.abort()
        if serving:
            await asyncio.wait(serving.values())
        await server.wait_closed()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(self._open) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._open[writer] = task
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                response, is_head = await self._respond(reader)
                writer.write(_render(response, is_head=is_head))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError):
            writer.transport.abort()  # a client that went away or does not read: nothing to tell it
        finally:
            del self._open[writer]

    async def _respond(self, reader: asyncio.StreamReader) -> tuple[Response, bool]:
        """Read one request and decide the answer; anything that is not HTTP is a bad request."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return Response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, body=b"the request is too large\n"), False
        except asyncio.IncompleteReadError:
            return Response(HTTPStatus.BAD_REQUEST, body=b"not an HTTP request\n"), False
        match head.split(b"\r\n", 1)[0].split(b" "):
            case [b"GET" | b"HEAD" as method, target, version] if version.startswith(b"HTTP/1."):
                if self._refresh is not None:
                    await self._refresh()
                return self._answer(target.partition(b"?")[0]), method == b"HEAD"
            case [_, _, version] if version.startswith(b"HTTP/1."):
                return Response(HTTPStatus.METHOD_NOT_ALLOWED, body=b"only GET and HEAD\n"), False
            case _:
                return Response(HTTPStatus.BAD_REQUEST, body=b"not an HTTP request\n"), False

    def _answer(self, path: bytes) -> Response:
        match path:
            case b"/livez":
                return _report(self._live())
            case b"/readyz":
                return _report(self._ready())
            case b"/metrics":
                return Response(HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(self._registry))
            case _:
                return Response(HTTPStatus.NOT_FOUND, body=b"there are /livez, /readyz and /metrics\n")


def _report(checks: Mapping[str, bool]) -> Response:
    is_well = all(checks.values())
    document = {"status": "ok" if is_well else "failing", "checks": dict(checks)}
    status = HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE
    return Response(status, "application/json", msgspec.json.encode(document) + b"\n")


def _render(response: Response, *, is_head: bool) -> bytes:
    head = (
        f"HTTP/1.1 {response.status.value} {response.status.phrase}\r\n"
        f"Content-Type: {response.content_type}\r\n"
        f"Content-Length: {len(response.body)}\r\n"
        f"{'Allow: GET, HEAD' + chr(13) + chr(10) if response.status == HTTPStatus.METHOD_NOT_ALLOWED else ''}"
        "Cache-Control: no-store\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + (b"" if is_head else response.body)


def _why_not(error: OSError, *, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"health_port={port}: the port is taken on {host}; set COATCHECK_HEALTH_PORT to another one, "
            "or to 0 for any free port"
        )
    if error.errno == errno.EACCES:
        return f"health_port={port}: not allowed for this user; ports below 1024 need privileges"
    return f"health_host={host}, health_port={port}: cannot listen there ({error.strerror or error})"
