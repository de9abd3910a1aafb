"""What all who take part in a hostile run share: addresses, a way to publish past our own client, and tallies."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiormq
from aiormq.abc import DeliveredMessage
from pamqp.commands import Basic
from tests.broker.evil import EvilBroker
from tests.fuzz.world import Knowledge

FULL_AFTER = 10
"""So many messages fill a queue of the run that is to be full."""
REFUSING: dict[str, Any] = {"x-max-length": FULL_AFTER, "x-overflow": "reject-publish"}

OnMessage = Callable[[DeliveredMessage], Awaitable[None]]


class Stranger:
    """A program with a connection of its own that publishes what our client would refuse to write."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: Any = None
        self._channel: Any = None

    async def __aenter__(self) -> Stranger:
        await self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._connection.close()

    async def _open(self) -> None:
        self._connection = await aiormq.connect(self._url)
        self._channel = await self._connection.channel(publisher_confirms=False)

    async def channel(self) -> Any:
        """Return a channel that works: RabbitMQ closes one over a message that it cannot take."""
        if self._connection.is_closed:
            await self._open()
        elif self._channel.is_closed:
            self._channel = await self._connection.channel(publisher_confirms=False)
        return self._channel

    async def send(self, to: str, body: bytes, **properties: Any) -> None:
        await self.send_with(Basic.Properties(**properties), to, body)

    async def send_with(self, properties: Basic.Properties, to: str, body: bytes) -> None:
        channel = await self.channel()
        with contextlib.suppress(aiormq.AMQPError, ConnectionError):
            await channel.basic_publish(body, routing_key=to, properties=properties, wait=False)

    async def consume(self, queue: str, on_message: OnMessage, **declare: Any) -> Any:
        """Declare a queue and consume it, acking what was handled, until the returned channel closes."""
        channel = await self.channel()
        if declare.pop("is_declared", True):
            await channel.queue_declare(queue, **declare)
        await channel.basic_qos(prefetch_count=100)

        async def take(message: DeliveredMessage) -> None:
            await on_message(message)
            await message.channel.basic_ack(message.delivery_tag or 0)

        await channel.basic_consume(queue, take)
        return channel


@dataclass
class Scene:
    """One run: who is who, when it ends, and what was done."""

    broker: str
    service: str
    knowledge: Knowledge
    ends: asyncio.Event = field(default_factory=asyncio.Event)
    counts: Counter[str] = field(default_factory=Counter)
    health_ports: list[int] = field(default_factory=list)
    evil: EvilBroker = field(init=False)
    """What stands between one replica and RabbitMQ."""

    def __post_init__(self) -> None:
        self.evil = EvilBroker(self.broker)

    @property
    def queues(self) -> dict[str, str]:
        service = self.service
        return {
            "requests": service,
            "replies": f"{service}.replies",
            "control": f"{service}.control",
            "hints": f"{service}.hints",
        }

    async def pause(self, seconds: float) -> bool:
        """Wait, at most until the run ends. Tells whether it goes on."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.ends.wait()
        return not self.ends.is_set()
