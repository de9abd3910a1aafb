"""The socket of a connection, shared by two readers: messages and confirms are ours, all the rest is the driver's.

aiormq takes two tasks for a delivery, three reads for a frame and a lock held across every publish; with a bare loop
on top of it, four fifths of the CPU are its own. So it keeps what happens now and then: the handshake, heartbeats,
channels, declares, consume and cancel. What happens for every message goes past it. Frames are split here as they
arrive, without a task or an await, and whole batches are written as one buffer.

Both write to the same socket, always whole frames, so they may alternate. Within a channel the order holds: our
frames are handed over at once, and the driver's answers wait for its reader, so what it hears is never ahead of us.

A broker is not trusted. What AMQP does not allow it to send ends the connection, before the driver sees it: nothing is
kept that is over a limit, and no part of a message is delivered.
"""

from __future__ import annotations

import asyncio
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, cast

from aiormq.connection import TransportFactory
from aiormq.exceptions import AMQPConnectionError
from yarl import URL

from coatcheck.broker.amqp import codec
from coatcheck.broker.amqp.codec import ProtocolViolated
from coatcheck.broker.headers import KEPT_OF_OVERSIZED
from coatcheck.log import get_logger

log = get_logger(__name__)

_CONTENT = frozenset({codec.DELIVER, codec.GET_OK, codec.RETURN})
_OURS = _CONTENT | {codec.ACK, codec.NACK, codec.GET_EMPTY}
_KINDS = frozenset({codec.METHOD, codec.HEADER, codec.BODY, codec.HEARTBEAT})
_HEARTBEAT_EVERY_S = 1.0
_WRITE_HIGH = 1 << 20
"""So many bytes wait for the socket before publishers hold back."""

# What a broker may do to us. RabbitMQ stays far below each of these.
_FRAME_MAX = 1 << 17
"""The largest frame before the broker has made its offer, which is the same unless its configuration says otherwise."""
_FRAME_MAX_RANGE = (1 << 12, 1 << 22)
_LARGEST_GREETING = 1 << 14
"""The greeting has the one table that the driver decodes, in time that grows with the square of its size."""
_LARGEST_BODY = 1 << 31
_MOST_PER_SECOND = 5000
"""So many heartbeats and answers for the driver may come within a second."""


class ChannelReceiver(ABC):
    """What gets the messages and confirms of one channel. Called in the order of the wire; must not block.

    It raises `ProtocolViolated` for what no broker may send, and nothing else. `takes` are the methods it is for. Of a
    body over `max_body` bytes it gets the beginning: all that is kept while the rest is read and dropped.
    """

    takes: frozenset[int]
    max_body = 0

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
    """A channel's message in the making: a method, then a header that announces a size, then bodies of that size.

    `left` is what is announced and has not come, `room` how much of it is still to be kept.
    """

    __slots__ = ("args", "header", "left", "method", "parts", "receiver", "room")

    def __init__(self, receiver: ChannelReceiver) -> None:
        self.receiver = receiver
        self.method = 0
        self.args = self.header = b""
        self.left = self.room = 0
        self.parts: list[bytes] = []

    def begin(self, method: int, args: bytes) -> None:
        if self.method:
            raise ProtocolViolated(f"method {method:#x} in the middle of a message")
        if method not in self.receiver.takes:
            raise ProtocolViolated(f"method {method:#x} on a channel that did not ask for it")
        if method in _CONTENT:
            self.method, self.args = method, args
        else:
            self.receiver.on_method(method, args)

    def add_header(self, header: bytes) -> None:
        if not self.method or self.header:
            raise ProtocolViolated("a content header that no method announced")
        self.header = header
        self.left = self.room = size = codec.read_body_size(header)
        if not size:
            self._finish(b"")
        elif size > self.receiver.max_body:
            if size > _LARGEST_BODY:
                raise ProtocolViolated(f"a body of {size} bytes is announced; the limit is {_LARGEST_BODY}")
            self.room = min(KEPT_OF_OVERSIZED, self.receiver.max_body)

    def add_body(self, piece: bytes) -> None:
        size = len(piece)
        if not 0 < size <= self.left:
            raise ProtocolViolated(f"a body frame of {size} bytes where {self.left} were due")
        self.left -= size
        if self.left:
            if self.room:
                self.parts.append(piece[: self.room])
                self.room = max(0, self.room - size)
            return
        body = piece[: self.room]
        if self.parts:
            self.parts.append(body)
            body = b"".join(self.parts)
            self.parts = []
        self._finish(body)

    def _finish(self, body: bytes) -> None:
        method, self.method = self.method, 0
        header, self.header = self.header, b""
        self.receiver.on_message(method, self.args, header, body)


class Wire(asyncio.StreamReaderProtocol):
    """The protocol of one connection.

    `on_alarm` hears when the broker blocks it, and when no more. `on_violation` hears why nothing more is read: the
    broker sent what AMQP does not allow. It has to give the connection up.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        *,
        on_alarm: Callable[[bool], None],
        on_violation: Callable[[str], None],
    ) -> None:
        self._clock_loop = asyncio.get_running_loop()
        super().__init__(reader, loop=self._clock_loop)
        self._reader = reader
        self._on_alarm = on_alarm
        self._on_violation = on_violation
        self._socket: asyncio.Transport | None = None
        self._rest = b""
        self._frame_max = _FRAME_MAX
        self._is_greeted = False
        self._is_broken = False
        self._intakes: dict[int, _Intake] = {}
        self._driver_heard_s = self._counted_s = self._clock_loop.time()
        self._count = 0
        self.is_clogged = False
        self.on_writable: list[Callable[[], None]] = []

    # --- channels ---

    def attach(self, channel: int, receiver: ChannelReceiver) -> None:
        """Give a channel's messages and confirms to `receiver`, from here on."""
        self._intakes[channel] = _Intake(receiver)

    def detach(self, channel: int, receiver: ChannelReceiver) -> None:
        """Drop them from here on, unless the channel's number is another receiver's by now."""
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
        if self._is_broken:
            return
        buffer = self._rest + data if self._rest else data
        try:
            self._rest = self._split(buffer)
        except ProtocolViolated as exc:
            self._break(f"the broker broke AMQP: {exc}")
        except Exception:
            # A bug of ours. Out of here it would reach the driver, and from there every loop that waits for an answer;
            # a connection that is cut is what those know.
            log.exception("frame_not_understood", size=len(buffer))
            self._break("a frame could not be understood")

    def _break(self, reason: str) -> None:
        """Read nothing more. What was announced and has not come is never delivered."""
        self._is_broken = True
        self._rest = b""
        self._intakes.clear()
        self._on_violation(reason)

    def _split(self, buffer: bytes) -> bytes:
        """Deal with every frame that is there as a whole, and give back the rest, which is less than one frame."""
        at, end = 0, len(buffer)
        unpack = codec.HEAD.unpack_from
        while end - at >= codec.HEAD.size:
            kind, channel, size = unpack(buffer, at)
            if kind not in _KINDS or size + codec.FRAME_OVERHEAD > self._frame_max:
                raise ProtocolViolated(self._explain(buffer[at : at + 8], size))
            stop = at + 7 + size
            if stop >= end:
                break
            if buffer[stop] != codec.FRAME_END:
                raise ProtocolViolated(f"a frame of {size} bytes has no end")
            if kind == codec.METHOD:
                self._take_method(channel, buffer[at + 7 : stop])
            elif kind == codec.HEARTBEAT:
                self._count_rare()
            else:
                self._take_content(kind, channel, buffer[at + 7 : stop])
            at = stop + 1
        if at:
            self._reassure()
        return buffer[at:]

    def _take_content(self, kind: int, channel: int, payload: bytes) -> None:
        intake = self._intakes.get(channel)
        if intake is None:
            return  # of a channel that is being closed: the broker takes it back
        if kind == codec.BODY:
            intake.add_body(payload)
        else:
            intake.add_header(payload)

    def _take_method(self, channel: int, payload: bytes) -> None:
        if len(payload) < codec.METHOD_ID.size:
            raise ProtocolViolated(f"a method frame of {len(payload)} bytes")
        method = codec.METHOD_ID.unpack_from(payload)[0]
        if method not in _OURS:
            self._pass_on(method, channel, payload)
        elif (intake := self._intakes.get(channel)) is not None:
            intake.begin(method, payload)

    def _pass_on(self, method: int, channel: int, payload: bytes) -> None:
        """Give the driver a method that is its own, if a broker may send it."""
        if method not in codec.FROM_BROKERS or self._is_greeted == (method == codec.START):
            raise ProtocolViolated(f"method {method:#x}, which is not for us at this point")
        if method == codec.START and len(payload) > _LARGEST_GREETING:
            raise ProtocolViolated(f"a greeting of {len(payload)} bytes; the limit is {_LARGEST_GREETING}")
        if method == codec.TUNE:
            payload, self._frame_max = codec.tune(payload, *_FRAME_MAX_RANGE)
        self._is_greeted = True
        self._count_rare()
        self._watch(method, channel)
        self._driver_heard_s = self._clock_loop.time()
        self._reader.feed_data(codec.method_frame(channel, payload))

    def _watch(self, method: int, channel: int) -> None:
        if method in (codec.BLOCKED, codec.UNBLOCKED):
            self._on_alarm(method == codec.BLOCKED)
        elif method in (codec.CHANNEL_CLOSE, codec.CHANNEL_CLOSE_OK):
            intake = self._intakes.pop(channel, None)
            if intake is not None:
                intake.receiver.on_close()

    def _count_rare(self) -> None:
        """Count what comes now and then, so that a flood of it does not take the event loop for itself."""
        self._count += 1
        if self._count > _MOST_PER_SECOND:
            now = self._clock_loop.time()
            if now - self._counted_s < 1.0:
                raise ProtocolViolated(f"more than {_MOST_PER_SECOND} heartbeats and answers within a second")
            self._count, self._counted_s = 0, now

    def _reassure(self) -> None:
        """Tell the driver that the line is alive: it counts the frames it sees, and those are few."""
        now = self._clock_loop.time()
        if self._is_greeted and now - self._driver_heard_s > _HEARTBEAT_EVERY_S:
            self._driver_heard_s = now
            self._reader.feed_data(codec.HEARTBEAT_FRAME)

    def _explain(self, head: bytes, size: int) -> str:
        if not self._is_greeted and head.startswith(b"AMQP"):
            return f"it wants another version than 0-9-1 ({head!r})"
        if not self._is_greeted or head[0] not in _KINDS:
            return f"this is no frame: {head!r}"
        return f"a frame of {size} bytes; the limit is {self._frame_max - codec.FRAME_OVERHEAD}"


class WireFactory(TransportFactory):
    """Opens the socket for the driver, with a `Wire` on it."""

    def __init__(
        self,
        context: ssl.SSLContext | None,
        *,
        on_alarm: Callable[[bool], None],
        on_violation: Callable[[str], None],
    ) -> None:
        self._context = context
        self._on_alarm = on_alarm
        self._on_violation = on_violation
        self.wire: Wire | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def create(self, url: URL, **kwargs: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        kwargs.pop("ssl_context_provider", None)  # ours was made with the address
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        wire = Wire(reader, on_alarm=self._on_alarm, on_violation=self._on_violation)
        try:
            transport, _ = await loop.create_connection(
                lambda: wire, url.host or "", url.port or 0, ssl=self._context, **kwargs
            )
        except OSError as exc:
            raise AMQPConnectionError(*exc.args) from exc
        self.wire = wire
        self.writer = asyncio.StreamWriter(transport, wire, reader, loop)
        return reader, self.writer
