"""How a supervisor asks its replicas how they are: a socket pair for each, one byte as question, a report as answer.

The replica answers from its event loop, so an answer says that the loop is alive. It sends a last report by itself when
it ends in good order. Nothing here can harm a replica: if the other end is gone, so is the supervisor, and the lifeline
sees to that.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import msgspec

from coatcheck.cli.meters import Meter

QUESTION = b"?"
HEAD_BYTES = 4


@dataclass(frozen=True, slots=True)
class Report:
    """How a replica is: what its own `/readyz` and `/metrics` would tell. That it tells is what `/livez` asks."""

    ready: dict[str, bool]
    meters: list[Meter]


class ReplicaEnd:
    """The end of a link that answers."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)

    @asynccontextmanager
    async def answering(self, look: Callable[[], Report]) -> AsyncIterator[None]:
        """Answer questions meanwhile, and report once more at the end."""
        reader, writer = await asyncio.open_unix_connection(sock=self._socket)
        serving = asyncio.ensure_future(_serve(reader, writer, look))
        try:
            yield
            with suppress(OSError):
                writer.write(_pack(look()))
                await writer.drain()
        finally:
            serving.cancel()
            await asyncio.wait([serving])
            writer.close()


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, look: Callable[[], Report]) -> None:
    with suppress(OSError):
        while await reader.read(1):
            writer.write(_pack(look()))
            await writer.drain()


class SupervisorEnd:
    """The end of a link that asks. `listen` runs for as long as the replica does."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        self._ours = ours
        self.latest: Report | None = None
        """The newest report; older than the last question if the replica did not answer it."""
        self.is_over = False
        """The replica has closed its end, most likely by ending."""
        self._writer: asyncio.StreamWriter | None = None
        self._answer: asyncio.Future[None] | None = None

    async def listen(self) -> None:
        """Take in reports until the replica has gone. Nobody may wait for an answer after that."""
        reader, writer = await asyncio.open_unix_connection(sock=self._ours)
        self._writer = writer
        try:
            while True:
                head = await reader.readexactly(HEAD_BYTES)
                body = await reader.readexactly(int.from_bytes(head))
                self.latest = msgspec.msgpack.decode(body, type=Report)
                self._settle()
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self._writer, self.is_over = None, True
            self._settle()
            writer.close()

    async def ask(self, timeout_s: float) -> bool:
        """Ask for a new report; tell whether one came in time."""
        if self._writer is None:
            return False
        if self._answer is None:  # a question that is still open is not repeated
            self._answer = asyncio.get_running_loop().create_future()
            with suppress(OSError):
                self._writer.write(QUESTION)
        done, _ = await asyncio.wait([self._answer], timeout=timeout_s)
        return bool(done) and self._writer is not None

    def _settle(self) -> None:
        if self._answer is not None:
            self._answer.set_result(None)
            self._answer = None


def _pack(report: Report) -> bytes:
    body = msgspec.msgpack.encode(report)
    return len(body).to_bytes(HEAD_BYTES) + body
