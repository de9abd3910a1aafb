"""A TCP proxy that misbehaves on demand: cut, refuse, blackhole, delay. For any test that needs a bad network."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit, urlunsplit

_CHUNK = 65536


class Proxy:
    """Forwards bytes between clients and one server.

    `cut()`        closes every connection hard; new ones are welcome
    `refuse()`     closes every connection and accepts no more, until `accept()`
    `blackhole()`  swallows every byte in both directions, keeping connections open, until `restore()`;
                   with `only="up"` (to the server) or `only="down"` (to the client), just those
    `delay_s`      holds every chunk back for so long
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._target = (parts.hostname, parts.port or {"amqp": 5672, "postgresql": 5432, "pg": 5432}[parts.scheme])
        self._parts = parts
        self._server: asyncio.Server | None = None
        self._port = 0
        self._pipes: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._open = {"up": asyncio.Event(), "down": asyncio.Event()}
        self.restore()
        self._is_refusing = False
        self.delay_s = 0.0
        self.connection_count = 0

    @property
    def url(self) -> str:
        """The given URL, with this proxy's address in it."""
        assert self._server is not None
        user = self._parts.netloc.rpartition("@")[0]
        return urlunsplit(
            self._parts._replace(netloc=f"{user}@127.0.0.1:{self._port}" if user else f"127.0.0.1:{self._port}")
        )

    def cut(self) -> None:
        for writer in tuple(self._writers):
            writer.transport.abort()

    def refuse(self) -> None:
        self._is_refusing = True
        self.cut()

    def accept(self) -> None:
        self._is_refusing = False

    def blackhole(self, only: str | None = None) -> None:
        for direction, is_open in self._open.items():
            if only in {None, direction}:
                is_open.clear()

    def restore(self) -> None:
        for is_open in self._open.values():
            is_open.set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for pipe in tuple(self._pipes):
            pipe.cancel()
        if self._pipes:
            await asyncio.wait(self._pipes)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connection_count += 1
        self._writers.add(writer)
        try:
            if self._is_refusing:
                writer.transport.abort()
                return
            await self._open["up"].wait()
            upstream_reader, upstream_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        finally:
            self._writers.discard(writer)
        self._writers |= {writer, upstream_writer}
        for source, sink, direction in ((reader, upstream_writer, "up"), (upstream_reader, writer, "down")):
            pipe = asyncio.create_task(self._pipe(source, sink, self._open[direction]))
            self._pipes.add(pipe)
            pipe.add_done_callback(self._pipes.discard)

    async def _pipe(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, is_open: asyncio.Event) -> None:
        try:
            with suppress(OSError):
                while chunk := await source.read(_CHUNK):
                    if self.delay_s:
                        await asyncio.sleep(self.delay_s)
                    await is_open.wait()
                    sink.write(chunk)
                    await sink.drain()
        finally:
            self._writers.discard(sink)
            sink.transport.abort()
