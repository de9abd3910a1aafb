"""`/livez`, `/readyz` and `/metrics` on a port of their own: the smallest HTTP server that can be trusted with it.

It answers GET and HEAD, one request per connection, from values that are at hand: no check does I/O, so a probe is
never slower than the event loop. (A supervisor asks its replicas first; `refresh` has a limit for that.) Size, time and
number of connections are bounded, because a port attracts scanners. When there are too many, the one that has kept us
waiting for its request the longest gives way: a probe asks at once, so it is answered however many others are silent.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Self

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from coatcheck.errors import InvalidSettings
from coatcheck.log import get_logger
from coatcheck.worker.metrics import Metrics
from coatcheck.worker.settings import Settings

__all__ = ["Checks", "HealthServer"]

log = get_logger(__name__)

Checks = Callable[[], Mapping[str, bool]]
"""Named statements about the process; all true means healthy."""
Refresh = Callable[[], Awaitable[None]]
"""Brings what the checks and the registry look at up to date."""

REQUEST_TIMEOUT_S = 5.0
HEAD_TIMEOUT_S = 2.0
"""How long the request itself may take to arrive."""
MAX_HEAD_BYTES = 8 * 1024
MAX_CONNECTIONS = 64


@dataclass(frozen=True, slots=True)
class Response:
    status: HTTPStatus
    content_type: str = "text/plain; charset=utf-8"
    body: bytes = b""


class HealthServer:
    """Serves probes from `start` to `stop`. `live` and `ready` are asked at every probe and must not block.

    `notes` are told by `/readyz` too, and do not count. `refresh` is awaited before each of them and has to come back
    well within REQUEST_TIMEOUT_S.
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
        notes: Checks | None = None,
    ) -> None:
        self._port = port
        self._host = host
        self._live = live
        self._ready = ready
        self._registry = registry
        self._refresh = refresh
        self._notes = notes
        self._server: asyncio.Server | None = None
        # Both in order of arrival; those in `_silent` have not said yet what they want.
        self._open: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
        self._silent: dict[asyncio.StreamWriter, None] = {}

    @classmethod
    def from_settings(
        cls, settings: Settings, *, live: Checks, ready: Checks, metrics: Metrics, notes: Checks | None = None
    ) -> Self | None:
        """The server a process asked for by `health_port`, or None if it asked for none."""
        if settings.health_port is None:
            return None
        return cls(
            settings.health_port,
            settings.health_host,
            live=live,
            ready=ready,
            registry=metrics.registry,
            notes=notes,
        )

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
        assert task is not None
        if len(self._open) >= MAX_CONNECTIONS:
            self._drop_one()
        self._open[writer] = task
        self._silent[writer] = None
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                async with asyncio.timeout(HEAD_TIMEOUT_S):
                    head = await _read_head(reader)
                self._silent.pop(writer, None)
                response, is_head = await self._respond(head)
                writer.write(_render(response, is_head=is_head))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError):
            writer.transport.abort()  # a client that went away or does not read: nothing to tell it
        finally:
            self._open.pop(writer, None)
            self._silent.pop(writer, None)

    def _drop_one(self) -> None:
        """Make room: the oldest that is silent goes, else the oldest of all, which does not read its answer."""
        oldest = next(iter(self._silent or self._open))
        self._silent.pop(oldest, None)
        del self._open[oldest]
        oldest.transport.abort()

    async def _respond(self, head: bytes | Response) -> tuple[Response, bool]:
        """Decide the answer to one request; anything that is not HTTP is a bad request."""
        if isinstance(head, Response):
            return head, False
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
                return _report(self._ready(), self._notes() if self._notes is not None else {})
            case b"/metrics":
                return Response(HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(self._registry))
            case _:
                return Response(HTTPStatus.NOT_FOUND, body=b"there are /livez, /readyz and /metrics\n")


async def _read_head(reader: asyncio.StreamReader) -> bytes | Response:
    """Read a request up to its empty line, or say what is wrong with it."""
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        return Response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, body=b"the request is too large\n")
    except asyncio.IncompleteReadError:
        return Response(HTTPStatus.BAD_REQUEST, body=b"not an HTTP request\n")


def _report(checks: Mapping[str, bool], notes: Mapping[str, bool] | None = None) -> Response:
    is_well = all(checks.values())
    document: dict[str, object] = {"status": "ok" if is_well else "failing", "checks": dict(checks)}
    if notes:
        document["notes"] = dict(notes)
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
