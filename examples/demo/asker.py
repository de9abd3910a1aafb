"""The requester of the demo, in plain aio-pika: it sees every message that comes back, a repeated one too.

An application would use `coatcheck.worker.Client`, which hands each result out once.
"""

import asyncio
import json
import uuid
from typing import Any

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage, AbstractQueue
from aio_pika.exceptions import ChannelNotFoundEntity

from examples.demo.ledger import Ledger


class Asker:
    """Asks a service questions and writes down what is asked and what comes back."""

    def __init__(self, channel: AbstractChannel, replies: AbstractQueue, ledger: Ledger) -> None:
        self._channel = channel
        self._replies = replies
        self._ledger = ledger

    @classmethod
    async def start(cls, connection: aio_pika.abc.AbstractConnection, ledger: Ledger) -> "Asker":
        channel = await connection.channel(on_return_raises=True)
        asker = cls(channel, await channel.declare_queue("", exclusive=True), ledger)
        await asker._replies.consume(asker._on_reply)
        return asker

    async def ask(self, service: str, question: dict[str, Any]) -> None:
        """Ask, and return when the broker has it. The `cc-id` makes a repeated request the same task."""
        number = str(uuid.uuid4())
        message = aio_pika.Message(
            json.dumps(question).encode(),
            content_type="application/json",
            correlation_id=number,
            reply_to=self._replies.name,
            headers={"cc-id": number},
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        )
        await self._channel.default_exchange.publish(message, routing_key=service, mandatory=True)
        self._ledger.note_asked(number, question)

    async def _on_reply(self, reply: AbstractIncomingMessage) -> None:
        kind = reply.headers.get("cc-kind")
        if kind != "progress":
            self._ledger.note_answered(
                reply.correlation_id or "",
                reply_id=str(reply.headers.get("cc-id")),
                is_error=kind == "error",
                body=json.loads(reply.body),
            )
        await reply.ack()


async def count_consumers(connection: aio_pika.abc.AbstractConnection, queue: str) -> int:
    """How many processes consume a queue; 0 if it does not exist."""
    channel = await connection.channel()
    try:
        found = await channel.declare_queue(queue, passive=True)
        return found.declaration_result.consumer_count or 0
    except ChannelNotFoundEntity:
        return 0
    finally:
        await channel.close()


async def wait_for_consumers(connection: aio_pika.abc.AbstractConnection, queue: str, *, count: int) -> None:
    """Return when a queue has that many consumers; the caller sets the time limit."""
    while await count_consumers(connection, queue) < count:  # noqa: ASYNC110 - the broker tells only those who ask
        await asyncio.sleep(0.1)


async def delete_leftovers(connection: aio_pika.abc.AbstractConnection, *, queues: list[str], exchange: str) -> None:
    """Delete what the demo declared; what is not there is no error."""
    channel = await connection.channel()
    for queue in queues:
        await channel.queue_delete(queue)
    await channel.exchange_delete(exchange)
    await channel.close()
