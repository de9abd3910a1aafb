"""The socket of a connection, shared by two readers: messages and confirms are ours, all the rest is the driver's.

aiormq takes two tasks for a delivery, three reads for a frame and a lock held across every publish; with a bare loop
on top of it, four fifths of the CPU are its own. So it keeps what happens now and then: the handshake, heartbeats,
channels, declares, consume and cancel. What happens for every message goes past it. Frames are split here as they
arrive, without a task or an await, and whole batches are written as one buffer.

Both write to the same socket, always whole frames, so they may alternate. Within a channel the order holds: our
frames are handed over at once, and the driver's answers wait for its reader, so what it hears is never ahead of us.
"""

from __future__ import annotations

import asyncio
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, cast

import structlog
from aiormq.connection import TransportFactory
from aiormq.exceptions import AMQPConnectionError
from yarl import URL

from coatcheck.broker import amqp_codec as codec

log = structlog.get_logger(__name__)

_CONTENT = frozenset({codec.DELIVER, codec.GET_OK, codec.RETURN})
_OURS = _CONTENT | {codec.ACK, codec.NACK, codec.GET_EMPTY}
_KINDS = frozenset({codec.METHOD, codec.HEADER, codec.BODY, codec.HEARTBEAT})
_HEARTBEAT_EVERY_S = 1.0
_WRITE_HIGH = 1 << 20
"""So many bytes wait for the socket before publishers hold back."""


class Receiver(ABC):
    """Who gets the messages and confirms of one channel. Called in the order of the wire; must not block or raise."""

    @abstractmethod
    def on_message(self, method: int, args: bytes, header: bytes, body: bytes) -> None:
        """A delivery, an answer to a get, or something returned; `args` is its method frame."""

    @abstractmethod
    def on_method(self, method: int, args: bytes) -> None:
        """A confirm, or word that a queue is empty."""

    @abstractmethod
    def on_close(self) -> None:
        """The channel is gone, and its number may be another's at any moment: nothing may be written to it any more.

        Why it is gone, the driver says a little later.
        """


class _Intake:
    """A channel's message in the making."""

    __slots__ = ("args", "header", "left", "method", "parts", "receiver")

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self.method = 0
        self.args = self.header = b""
        self.left = 0
        self.parts: list[bytes] = []

    def begin(self, method: int, args: bytes) -> None:
        if method in _CONTENT:
            self.method, self.args, self.parts = method, args, []
        else:
            self.receiver.on_method(method, args)

    def add_header(self, header: bytes) -> None:
        self.header = header
        self.left = codec.BODY_SIZE.unpack_from(header)[0]
        if not self.left:
            self.receiver.on_message(self.method, self.args, header, b"")

    def add_body(self, piece: bytes) -> None:
        self.left -= len(piece)
        if self.left > 0:
            self.parts.append(piece)
            return
        body = piece
        if self.parts:
            self.parts.append(piece)
            body, self.parts = b"".join(self.parts), []
        self.receiver.on_message(self.method, self.args, self.header, body)


class Wire(asyncio.StreamReaderProtocol):
    """The protocol of one connection. `on_alarm` hears when the broker blocks it, and when no more."""

    def __init__(self, reader: asyncio.StreamReader, on_alarm: Callable[[bool], None]) -> None:
        self._clock_loop = asyncio.get_running_loop()
        super().__init__(reader, loop=self._clock_loop)
        self._reader = reader
        self._on_alarm = on_alarm
        self._socket: asyncio.Transport | None = None
        self._rest = b""
        self._is_foreign = False
        self._intakes: dict[int, _Intake] = {}
        self._driver_heard_s = self._clock_loop.time()
        self.is_clogged = False
        self.on_writable: list[Callable[[], None]] = []

    # --- channels ---

    def attach(self, channel: int, receiver: Receiver) -> None:
        """Give a channel's messages and confirms to `receiver`, from here on."""
        self._intakes[channel] = _Intake(receiver)

    def detach(self, channel: int, receiver: Receiver) -> None:
        """Give them to nobody, unless the channel's number is somebody else's by now."""
        intake = self._intakes.get(channel)
        if intake is not None and intake.receiver is receiver:
            del self._intakes[channel]

    # --- out ---

    def write(self, frames: bytes) -> None:
        """Write whole frames. On a connection that is closing they vanish, like all else that was under way."""
        if self._socket is not None and not self._socket.is_closing():
            self._socket.write(frames)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._socket = cast("asyncio.Transport", transport)  # uvloop's are none by descent
        self._socket.set_write_buffer_limits(high=_WRITE_HIGH)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.is_clogged = True

    def resume_writing(self) -> None:
        super().resume_writing()
        self.is_clogged = False
        for callback in tuple(self.on_writable):
            callback()

    # --- in ---

    def data_received(self, data: bytes) -> None:
        if self._is_foreign:
            self._reader.feed_data(data)
            return
        buffer = self._rest + data if self._rest else data
        try:
            self._rest = self._split(buffer)
        except Exception:
            # A bug of ours. Out of here it would reach the driver, and from there every loop that waits for an answer;
            # a connection that is cut is what those know.
            log.exception("frame_not_understood", size=len(buffer))
            self._rest = b""
            if self._socket is not None:
                self._socket.abort()

    def _split(self, buffer: bytes) -> bytes:
        """Deal with every frame that is there as a whole, and give back the rest."""
        at, end = 0, len(buffer)
        is_taken = False
        unpack = codec.HEAD.unpack_from
        while end - at >= codec.FRAME_OVERHEAD:
            kind, channel, size = unpack(buffer, at)
            stop = at + 7 + size
            if kind in _KINDS and stop >= end:
                break
            if kind not in _KINDS or buffer[stop] != codec.FRAME_END:  # not AMQP as we know it; the driver explains
                self._is_foreign = True
                self._reader.feed_data(buffer[at:])
                return b""
            if self._take(kind, channel, buffer[at + 7 : stop]):
                is_taken = True
            else:
                self._driver_heard_s = self._clock_loop.time()
                self._reader.feed_data(buffer[at : stop + 1])
            at = stop + 1
        if is_taken:
            self._reassure()
        return buffer[at:]

    def _take(self, kind: int, channel: int, payload: bytes) -> bool:
        """Deal with a frame if it is ours."""
        method = codec.METHOD_ID.unpack_from(payload)[0] if kind == codec.METHOD else 0
        if (method and method not in _OURS) or kind == codec.HEARTBEAT:
            self._watch(method, channel)
            return False
        intake = self._intakes.get(channel)
        if intake is None:
            return True  # of a channel that is being closed: the broker takes it back
        if kind == codec.BODY:
            intake.add_body(payload)
        elif kind == codec.HEADER:
            intake.add_header(payload)
        else:
            intake.begin(method, payload)
        return True

    def _watch(self, method: int, channel: int) -> None:
        if method in (codec.BLOCKED, codec.UNBLOCKED):
            self._on_alarm(method == codec.BLOCKED)
        elif method in (codec.CHANNEL_CLOSE, codec.CHANNEL_CLOSE_OK):
            intake = self._intakes.pop(channel, None)
            if intake is not None:
                intake.receiver.on_close()

    def _reassure(self) -> None:
        """Tell the driver that the line is alive: it counts the frames it sees, and those are few."""
        now = self._clock_loop.time()
        if now - self._driver_heard_s > _HEARTBEAT_EVERY_S:
            self._driver_heard_s = now
            self._reader.feed_data(codec.HEARTBEAT_FRAME)


class WireFactory(TransportFactory):
    """Opens the socket for the driver, with a `Wire` on it."""

    def __init__(self, context: ssl.SSLContext | None, on_alarm: Callable[[bool], None]) -> None:
        self._context = context
        self._on_alarm = on_alarm
        self.wire: Wire | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def create(self, url: URL, **kwargs: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        kwargs.pop("ssl_context_provider", None)  # ours was made with the address
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        wire = Wire(reader, self._on_alarm)
        try:
            transport, _ = await loop.create_connection(
                lambda: wire, url.host or "", url.port or 0, ssl=self._context, **kwargs
            )
        except OSError as exc:
            raise AMQPConnectionError(*exc.args) from exc
        self.wire = wire
        self.writer = asyncio.StreamWriter(transport, wire, reader, loop)
        return reader, self.writer
