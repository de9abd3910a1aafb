"""A RabbitMQ that breaks AMQP on demand: a proxy in front of the real one that puts frames of its own between.

    async with EvilBroker(broker_url) as evil:
        evil.arm("stray_body")            # the next connection that reaches the attack's place is attacked
        broker = connect(evil.url)
        …
        await evil.until_played("stray_body")

`EvilBroker.attacks` has them all by name, each with its place: `start` and `tune` (the broker's own frame of that name
is replaced), `consume` (the answer to a consume passes, then the attack plays before any delivery). What the client has
to do is the same for each: give the connection up, come back later, deliver no part of what it was sent. `cut()` makes
clients come back now.
"""

from __future__ import annotations

import asyncio
import struct
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, Self
from urllib.parse import urlsplit, urlunsplit

import pamqp.frame
from pamqp.commands import Basic, Connection, Queue

METHOD, HEADER, BODY, HEARTBEAT = 1, 2, 3, 8
_END = b"\xce"
_PLACES = {0x0A000A: "start", 0x0A001E: "tune", 0x3C0015: "consume"}
PATIENCE_S = 30.0


def frame(kind: int, channel: int, payload: bytes) -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + _END


def deliver(channel: int, tag: int, consumer: str = "c") -> bytes:
    return pamqp.frame.marshal(Basic.Deliver(consumer, tag, False, "", "q"), channel)


def header(channel: int, size: int, *, properties: bytes = b"\0\0", kind: int = 60) -> bytes:
    return frame(HEADER, channel, struct.pack(">HHQ", kind, 0, size) + properties)


def nested(depth: int) -> bytes:
    """A header table that many tables deep."""
    table = b""
    for _ in range(depth):
        table = b"\x01aF" + struct.pack(">I", len(table)) + table
    return struct.pack(">H", 0x2000) + struct.pack(">I", len(table)) + table


class Victim:
    """A connection under attack: what the attack writes to, and the channel that consumes on it."""

    def __init__(self, writer: asyncio.StreamWriter, channel: int, consumer: str) -> None:
        self.channel = channel
        self.consumer = consumer
        self._writer = writer

    async def send(self, data: bytes) -> None:
        """Write, as fast as the client reads. Raises OSError when it has hung up."""
        self._writer.write(data)
        await self._writer.drain()
        if self._writer.is_closing():
            raise ConnectionResetError


@dataclass(frozen=True, slots=True)
class Attack:
    name: str
    place: str
    play: Callable[[Victim], Awaitable[None]]


def attack(place: str = "consume") -> Callable[[Callable[[Victim], Awaitable[None]]], None]:
    def register(play: Callable[[Victim], Awaitable[None]]) -> None:
        name = play.__name__
        EvilBroker.attacks[name] = Attack(name, place, play)

    return register


class EvilBroker:
    """Passes everything on between clients and one RabbitMQ, but for what it was armed with."""

    attacks: ClassVar[dict[str, Attack]] = {}

    def __init__(self, url: str) -> None:
        self._parts = urlsplit(url)
        self._server: asyncio.Server | None = None
        self._armed: dict[str, deque[Attack]] = {"start": deque(), "tune": deque(), "consume": deque()}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self.begun: Counter[str] = Counter()
        self.played: Counter[str] = Counter()
        self.connection_count = 0

    @property
    def address(self) -> tuple[str, int]:
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    @property
    def url(self) -> str:
        """The given URL, with this broker's address in it."""
        user = self._parts.netloc.rpartition("@")[0]
        place = "{}:{}".format(*self.address)
        return urlunsplit(self._parts._replace(netloc=f"{user}@{place}" if user else place))

    def arm(self, name: str, times: int = 1) -> None:
        """Attack the next connections that come to the place."""
        found = self.attacks[name]
        self._armed[found.place].extend([found] * times)

    def cut(self) -> None:
        """Close every connection hard, so that clients come back to what is armed."""
        for task in tuple(self._tasks):
            task.cancel()

    @property
    def is_armed(self) -> bool:
        return any(self._armed.values())

    async def until_played(self, name: str, times: int = 1) -> None:
        """Wait until an attack has been played to its end, or to the end of its connection."""
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(lambda: self.played[name] >= times)

    async def until_begun(self, name: str, times: int = 1) -> None:
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(lambda: self.begun[name] >= times)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    # --- between client and server ---

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connection_count += 1
        try:
            server_reader, server_writer = await asyncio.open_connection(self._parts.hostname, self._parts.port or 5672)
        except OSError:
            writer.transport.abort()
            return

        def hang_up(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            writer.transport.abort()
            server_writer.transport.abort()

        for work in (self._pass_up(reader, server_writer), self._pass_down(server_reader, writer)):
            task = asyncio.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(hang_up)

    async def _pass_up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()

    async def _pass_down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readexactly(7)
                kind, channel, size = struct.unpack(">BHI", head)
                payload = await reader.readexactly(size + 1)
                place = _PLACES.get(struct.unpack_from(">I", payload)[0]) if kind == METHOD else None
                armed = self._armed[place].popleft() if place and self._armed[place] else None
                if armed is None or place == "consume":
                    writer.write(head + payload)
                if armed is not None:
                    consumer = payload[5 : 5 + payload[4]].decode() if place == "consume" else ""
                    await self._play(armed, Victim(writer, channel, consumer))
                await writer.drain()

    async def _play(self, chosen: Attack, victim: Victim) -> None:
        await self._note(self.begun, chosen)
        try:
            await chosen.play(victim)
        finally:
            await self._note(self.played, chosen)

    async def _note(self, counts: Counter[str], chosen: Attack) -> None:
        counts[chosen.name] += 1
        async with self._changed:
            self._changed.notify_all()


# --- the handshake ---


@attack("start")
async def another_version(it: Victim) -> None:
    await it.send(b"AMQP\0\0\x09\x01")


@attack("start")
async def http(it: Victim) -> None:
    await it.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@attack("start")
async def random_bytes_for_ever(it: Victim) -> None:
    while True:
        await it.send(bytes(range(256)) * 256)


@attack("start")
async def silence(_: Victim) -> None:
    await asyncio.sleep(PATIENCE_S / 2)


@attack("start")
async def greeting_without_capabilities(it: Victim) -> None:
    await it.send(pamqp.frame.marshal(Connection.Start(0, 9, {}, "PLAIN", "en_US"), 0))


@attack("start")
async def greeting_with_a_long_table(it: Victim) -> None:
    await it.send(pamqp.frame.marshal(Connection.Start(0, 9, {"a": [None] * 60_000}, "PLAIN", "en_US"), 0))


@attack("start")
async def greeting_with_a_deep_table(it: Victim) -> None:
    table = nested(2_000)[2:]
    await it.send(frame(METHOD, 0, struct.pack(">IBB", 0x0A000A, 0, 9) + table + struct.pack(">I", 0) * 2))


@attack("tune")
async def tune_to_tiny_frames(it: Victim) -> None:
    await it.send(frame(METHOD, 0, struct.pack(">IHIH", 0x0A001E, 10, 1, 0)))


@attack("tune")
async def tune_to_huge_frames(it: Victim) -> None:
    """Allowed; what comes of it is not."""
    await it.send(frame(METHOD, 0, struct.pack(">IHIH", 0x0A001E, 2047, 0xFFFFFFFF, 60)))
    await it.send(struct.pack(">BHI", METHOD, 0, 0xFFFFFFFF) + b"\0" * 1_000_000)


# --- frames ---


@attack()
async def frame_of_4_gib(it: Victim) -> None:
    await it.send(struct.pack(">BHI", BODY, it.channel, 0xFFFFFFFF))
    while True:
        await it.send(b"\0" * 65536)


@attack()
async def frame_over_the_limit(it: Victim) -> None:
    await it.send(deliver(it.channel, 1, it.consumer) + header(it.channel, 200_000))
    await it.send(frame(BODY, it.channel, b"x" * 200_000))


@attack()
async def frame_without_an_end(it: Victim) -> None:
    await it.send(deliver(it.channel, 1, it.consumer)[:-1] + b"\0")


@attack()
async def frame_of_an_unknown_kind(it: Victim) -> None:
    await it.send(frame(4, it.channel, b"trace"))


@attack()
async def method_cut_short(it: Victim) -> None:
    await it.send(frame(METHOD, it.channel, b"\0\x3c"))


@attack()
async def method_of_an_unknown_class(it: Victim) -> None:
    await it.send(frame(METHOD, it.channel, struct.pack(">I", 0x630001)))


@attack()
async def method_that_is_for_brokers(it: Victim) -> None:
    await it.send(pamqp.frame.marshal(Queue.Declare(queue="q", arguments={"a": [None] * 30_000}), it.channel))


@attack()
async def second_greeting(it: Victim) -> None:
    await it.send(pamqp.frame.marshal(Connection.Start(0, 9, {}, "PLAIN", "en_US"), 0))


@attack()
async def answer_cut_short(it: Victim) -> None:
    await it.send(frame(METHOD, it.channel, struct.pack(">IB", 0x32000B, 200)))


@attack()
async def answers_to_no_question(it: Victim) -> None:
    while True:
        await it.send(pamqp.frame.marshal(Queue.DeclareOk("q", 1, 1), it.channel) * 1000)


@attack()
async def heartbeat_flood(it: Victim) -> None:
    while True:
        await it.send(frame(HEARTBEAT, 0, b"") * 8000)


@attack()
async def silence_after_consume(_: Victim) -> None:
    await asyncio.sleep(PATIENCE_S / 2)


# --- messages ---


@attack()
async def stray_body(it: Victim) -> None:
    await it.send(frame(BODY, it.channel, b'"forged"'))


@attack()
async def body_before_its_header(it: Victim) -> None:
    await it.send(deliver(it.channel, 1, it.consumer) + frame(BODY, it.channel, b'"forged"'))


@attack()
async def header_of_no_message(it: Victim) -> None:
    await it.send(header(it.channel, 8) + frame(BODY, it.channel, b'"forged"'))


@attack()
async def header_of_another_class(it: Victim) -> None:
    await it.send(deliver(it.channel, 1, it.consumer) + header(it.channel, 0, kind=50))


@attack()
async def header_cut_short(it: Victim) -> None:
    await it.send(deliver(it.channel, 1, it.consumer) + frame(HEADER, it.channel, b"\0\x3c\0"))


@attack()
async def more_body_than_announced(it: Victim) -> None:
    await it.send(deliver(it.channel, 1, it.consumer) + header(it.channel, 3) + frame(BODY, it.channel, b'"forged"'))


@attack()
async def half_a_message_and_the_next(it: Victim) -> None:
    half = deliver(it.channel, 1, it.consumer) + header(it.channel, 100) + frame(BODY, it.channel, b'"forged"')
    await it.send(half + deliver(it.channel, 2, it.consumer) + header(it.channel, 0))


@attack()
async def body_of_two_to_the_63(it: Victim) -> None:
    await it.send(deliver(it.channel, 1, it.consumer) + header(it.channel, 2**63))
    while True:
        await it.send(frame(BODY, it.channel, b"x" * 100_000))


@attack()
async def delivery_without_its_tag(it: Victim) -> None:
    await it.send(frame(METHOD, it.channel, struct.pack(">IB", 0x3C003C, 255) + b"c") + header(it.channel, 0))


@attack()
async def delivery_tag_again(it: Victim) -> None:
    await it.send((deliver(it.channel, 1, it.consumer) + header(it.channel, 0)) * 2)


@attack()
async def more_than_was_asked_for(it: Victim) -> None:
    for tag in range(1, 1_000_000):
        await it.send(deliver(it.channel, tag, it.consumer) + header(it.channel, 1) + frame(BODY, it.channel, b"x"))


@attack()
async def get_answered_that_was_not_asked(it: Victim) -> None:
    await it.send(pamqp.frame.marshal(Basic.GetOk(1, False, "", "q", 0), it.channel) + header(it.channel, 0))


@attack()
async def confirm_on_a_consuming_channel(it: Victim) -> None:
    await it.send(pamqp.frame.marshal(Basic.Ack(1, True), it.channel))
