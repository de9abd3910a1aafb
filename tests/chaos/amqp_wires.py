"""Plain AMQP: a peer's wire in aio-pika, a client's in pika. Nothing of Coatcheck is imported."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import aio_pika
import pika
import pika.exceptions
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage
from aiormq.exceptions import AMQPError
from pamqp.common import FieldTable
from pika.adapters.blocking_connection import BlockingChannel
from tests.chaos.wires import CONNECT_S, Letter, OnLetter, OnReply, Wires

ARGUMENTS: FieldTable = {"x-queue-type": "quorum", "x-delivery-limit": 100_000}
FEW: FieldTable = {**ARGUMENTS, "x-max-length": 5, "x-overflow": "reject-publish"}
"""A client's replies have little room: once it is frozen its queue refuses what comes, for as long as that lasts."""
HELD_COUNT = 5
PERSISTENT = 2
CLIENT_LOST = (OSError, pika.exceptions.AMQPError)


class AmqpPeerWire:
    def __init__(self, url: str) -> None:
        self.broken = asyncio.Event()
        self._url = url
        self._connection: Any = None
        self._channel: AbstractChannel | None = None

    async def open(self) -> None:
        async with asyncio.timeout(CONNECT_S):
            self._connection = await aio_pika.connect(self._url)
        self._connection.close_callbacks.add(lambda *_: self.broken.set())

    async def consume(self, queue: str, *, on_request: OnLetter, on_control: OnLetter) -> None:
        async with asyncio.timeout(CONNECT_S):
            self._channel = await self._connection.channel(publisher_confirms=True)
            await self._channel.set_qos(prefetch_count=300)
            for name, on_letter in ((queue, on_request), (f"{queue}.control", on_control)):
                declared = await self._channel.declare_queue(name, durable=True, arguments=ARGUMENTS)
                await declared.consume(_handing_to(on_letter))

    async def send(self, to: str, letter: Letter) -> None:
        assert self._channel is not None
        message = aio_pika.Message(
            letter.body,
            correlation_id=letter.correlation_id,
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
            content_type=letter.content_type,
            headers=dict(letter.headers),
        )
        await self._channel.default_exchange.publish(message, to, mandatory=True)

    async def close(self) -> None:
        if self._connection is not None:
            async with asyncio.timeout(CONNECT_S):
                await self._connection.close()


def _handing_to(on_letter: OnLetter) -> Callable[[AbstractIncomingMessage], Awaitable[None]]:
    async def on_message(message: AbstractIncomingMessage) -> None:
        letter = Letter(
            message.body,
            correlation_id=message.correlation_id,
            reply_to=message.reply_to,
            content_type=message.content_type,
            headers=message.headers,
        )
        await on_letter(letter, message.ack)

    return on_message


class AmqpClientWire:
    def __init__(self, url: str, replies: str, on_reply: OnReply) -> None:
        self._on_reply = on_reply
        parameters = pika.URLParameters(url)
        parameters.socket_timeout = parameters.stack_timeout = 5
        parameters.blocked_connection_timeout = 10
        parameters.heartbeat = 10
        self._connection = pika.BlockingConnection(parameters)
        try:
            self._channel = self._connection.channel()
            self._channel.queue_declare(replies, durable=True, arguments=FEW)
            self._channel.confirm_delivery()
            self._channel.basic_qos(prefetch_count=HELD_COUNT)
            self._channel.basic_consume(replies, self._on_message)
        except BaseException:
            self.close()
            raise

    def send(self, to: str, letter: Letter) -> None:
        properties = pika.BasicProperties(
            reply_to=letter.reply_to,
            correlation_id=letter.correlation_id,
            content_type=letter.content_type,
            type=letter.type,
            delivery_mode=PERSISTENT,
            message_id=letter.message_id,
            headers=dict(letter.headers),
        )
        self._channel.basic_publish("", to, letter.body, properties, mandatory=True)

    def pump(self, for_s: float) -> None:
        self._connection.process_data_events(time_limit=for_s)

    def close(self) -> None:
        with suppress(*CLIENT_LOST):
            self._connection.close()

    def _on_message(self, channel: BlockingChannel, method: Any, reply: pika.BasicProperties, body: bytes) -> None:
        self._on_reply(
            Letter(
                body,
                correlation_id=reply.correlation_id,
                content_type=reply.content_type,
                headers=reply.headers or {},
            )
        )
        channel.basic_ack(method.delivery_tag)


WIRES = Wires(
    AmqpPeerWire,
    AmqpClientWire,
    peer_lost=(OSError, AMQPError, TimeoutError, RuntimeError),
    client_lost=CLIENT_LOST,
)
