"""Coatcheck's own broker port, for a trial whose broker speaks no protocol that others speak: `pg://`.

Peers and clients stay programs of their own with books of their own; the port is all they have of Coatcheck.
"""

from __future__ import annotations

import asyncio
from collections import deque

from tests.chaos.wires import CONNECT_S, Ack, Letter, OnLetter, OnReply, Wires

from coatcheck.broker import Broker, Delivery, Message, Outgoing, Routing, connect
from coatcheck.errors import BrokerUnavailable


class PortWire:
    """A broker that would heal itself, used as a connection that does not: lost once, it is given up."""

    def __init__(self, url: str) -> None:
        self.broken = asyncio.Event()
        self._broker: Broker = connect(url, connect_budget=CONNECT_S, publish_timeout=5, rpc_timeout=5, name="trial")
        self._handing_over: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        await self._broker.start()

    async def consume(self, queue: str, *, on_request: OnLetter, on_control: OnLetter) -> None:
        await self._broker.declare_service(queue)
        await self.listen(queue, on_request, prefetch=300)
        await self.listen(f"{queue}.control", on_control, prefetch=300)

    async def declare(self, queue: str) -> None:
        await self._broker.declare_service(queue)

    async def listen(self, queue: str, on_letter: OnLetter, *, prefetch: int) -> None:
        def on_delivery(delivery: Delivery) -> None:
            task = asyncio.create_task(on_letter(_letter(delivery.message), _acking(delivery)))
            self._handing_over.add(task)
            task.add_done_callback(self._handing_over.discard)

        await self._broker.consume(queue, on_delivery, prefetch=prefetch, on_lost=self.broken.set)

    async def send(self, to: str, letter: Letter) -> None:
        message = Message(
            letter.body,
            correlation_id=letter.correlation_id,
            reply_to=letter.reply_to,
            content_type=letter.content_type,
            type=letter.type,
            message_id=letter.message_id,
            headers=letter.headers,
        )
        (routing,) = await self._broker.publish([Outgoing(to, message)])
        if routing is not Routing.ROUTED:
            raise ConnectionError(f"there is no queue {to!r}")

    async def close(self) -> None:
        await self._broker.stop()


class PortClientWire:
    """The same, for a client that blocks: the broker's tasks run while the client sends or waits."""

    def __init__(self, url: str, replies: str, on_reply: OnReply) -> None:
        self._on_reply = on_reply
        self._come: deque[tuple[Letter, Ack]] = deque()
        self._runner = asyncio.Runner()
        try:
            self._wire = self._runner.run(self._open(url, replies))
        except BaseException:
            self._runner.close()
            raise

    async def _open(self, url: str, replies: str) -> PortWire:
        wire = PortWire(url)
        await wire.open()
        try:
            await wire.declare(replies)
            await wire.listen(replies, self._keep, prefetch=100)
        except BaseException:
            await wire.close()
            raise
        return wire

    async def _keep(self, letter: Letter, ack: Ack) -> None:
        self._come.append((letter, ack))

    def send(self, to: str, letter: Letter) -> None:
        self._runner.run(self._wire.send(to, letter))

    def pump(self, for_s: float) -> None:
        self._runner.run(self._pump(for_s))

    async def _pump(self, for_s: float) -> None:
        await asyncio.sleep(for_s)
        while self._come:
            letter, ack = self._come.popleft()
            self._on_reply(letter)
            await ack()
        if self._wire.broken.is_set():
            raise ConnectionError("the connection was lost")

    def close(self) -> None:
        try:
            self._runner.run(self._wire.close())
        finally:
            self._runner.close()


def _letter(message: Message) -> Letter:
    return Letter(
        message.body,
        correlation_id=message.correlation_id,
        reply_to=message.reply_to,
        content_type=message.content_type,
        headers=message.headers,
    )


def _acking(delivery: Delivery) -> Ack:
    async def ack() -> None:
        delivery.ack()

    return ack


LOST = (OSError, BrokerUnavailable)
WIRES = Wires(PortWire, PortClientWire, peer_lost=LOST, client_lost=LOST)
