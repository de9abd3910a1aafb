"""A peer of the trial, in plain AMQP: `python -m tests.chaos.peer ROLE QUEUE BOOK`. It imports nothing of Coatcheck.

Every question is booked before it is answered, every answer before it is sent: it is the process that is killed here,
not the machine, so the lines need no sync. A crash, or anything odd about the
connection, and the broker asks again.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import uuid
from pathlib import Path
from typing import Any

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage
from aiormq.exceptions import AMQPError
from pamqp.common import FieldTable
from tests.chaos.books import Book

CONNECT_S = 10.0
STRAY_EVERY = 150  # one answer in so many is followed by one to a call that was never made


def f(n: int) -> int:
    return (n * n + 7) % 100_003


class Peer:
    """Consumes one queue and its control queue, and behaves as its role says."""

    def __init__(self, role: str, queue: str, book: Book) -> None:
        self._behave = getattr(self, f"_{role}")
        self._queue = queue
        self._book = book
        self._channel: AbstractChannel | None = None
        self._working: set[asyncio.Task[None]] = set()
        self._broken = asyncio.Event()

    async def serve(self, url: str) -> None:
        """Until the process ends; a lost connection is made anew."""
        while True:
            try:
                await self._serve_once(url)
            except (OSError, AMQPError, TimeoutError, RuntimeError):
                await asyncio.sleep(0.3)
            except asyncio.CancelledError:
                # A connection that is stuck cancels whoever waits for it.
                if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                    raise

    async def _serve_once(self, url: str) -> None:
        async with asyncio.timeout(CONNECT_S):
            connection = await aio_pika.connect(url)
        self._broken = asyncio.Event()
        broken = self._broken
        connection.close_callbacks.add(lambda *_: broken.set())
        try:
            async with asyncio.timeout(CONNECT_S):
                self._channel = await connection.channel(publisher_confirms=True)
                await self._channel.set_qos(prefetch_count=300)
                for name, consumer in ((self._queue, self._on_request), (f"{self._queue}.control", self._on_control)):
                    arguments: FieldTable = {"x-queue-type": "quorum", "x-delivery-limit": 100_000}
                    queue = await self._channel.declare_queue(name, durable=True, arguments=arguments)
                    await queue.consume(consumer)
            await broken.wait()
        finally:
            for task in self._working:
                task.cancel()
            async with asyncio.timeout(CONNECT_S):
                await connection.close()

    async def _on_request(self, message: AbstractIncomingMessage) -> None:
        task = asyncio.create_task(self._see_through(message, self._broken))
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    async def _on_control(self, message: AbstractIncomingMessage) -> None:
        await message.ack()

    async def _see_through(self, message: AbstractIncomingMessage, broken: asyncio.Event) -> None:
        """Book, answer, ack. Whatever fails: give the connection up, so that the broker asks again."""
        try:
            headers = message.headers
            self._book.write(
                "asked",
                is_synced=False,
                call=message.correlation_id,
                id=headers.get("cc-id"),
                key=headers.get("cc-key"),
                task=headers.get("cc-task"),
            )
            await self._behave(message, json.loads(message.body)["n"])
            await message.ack()
        except BaseException:
            broken.set()
            raise

    # --- roles ---

    async def _quick(self, message: AbstractIncomingMessage, n: int) -> None:
        await self._answer(message, n)
        if random.randrange(STRAY_EVERY) == 0:
            await self._stray(message)

    async def _slow(self, message: AbstractIncomingMessage, n: int) -> None:
        await asyncio.sleep(random.uniform(0.05, 1.5))
        await self._answer(message, n)

    async def _twice(self, message: AbstractIncomingMessage, n: int) -> None:
        await self._answer(message, n)
        await asyncio.sleep(random.choice((0, 0, 0.05, 1.0)))
        await self._answer(message, n)

    async def _failing(self, message: AbstractIncomingMessage, n: int) -> None:
        """Every other call fails, for good: asking again under the same id helps nobody."""
        if int((message.correlation_id or "0")[-1], 16) % 2:
            await self._answer(message, n)
            return
        problem = {"title": "No luck", "detail": f"not for {n}", "code": "no_luck", "retryable": True}
        self._book.write("failed", is_synced=False, call=message.correlation_id)
        await self._send(message, problem, content_type="application/problem+json")

    async def _progress(self, message: AbstractIncomingMessage, n: int) -> None:
        for done in range(3):
            await asyncio.sleep(random.uniform(0.2, 0.9))
            await self._send(message, {"done": done, "total": 3}, headers={"cc-kind": "progress"})
        await self._answer(message, n)

    async def _silent(self, message: AbstractIncomingMessage, n: int) -> None:
        pass

    async def _sink(self, message: AbstractIncomingMessage, n: int) -> None:
        pass

    async def _answer(self, message: AbstractIncomingMessage, n: int) -> None:
        token = uuid.uuid4().hex
        self._book.write("answered", is_synced=False, call=message.correlation_id, token=token)
        await self._send(message, {"value": f(n), "tokens": [token]}, content_type="application/json")

    async def _stray(self, message: AbstractIncomingMessage) -> None:
        """An answer to a call that nobody made: it belongs in the dead letters."""
        call = str(uuid.uuid4())
        self._book.write("strayed", call=call)
        await self._publish(message.reply_to, b"{}", call)
        self._book.write("stray_taken", call=call)

    async def _send(self, message: AbstractIncomingMessage, value: Any, **properties: Any) -> None:
        await self._publish(message.reply_to, json.dumps(value).encode(), message.correlation_id, **properties)

    async def _publish(self, to: str | None, body: bytes, call: str | None, **properties: Any) -> None:
        assert self._channel is not None
        reply = aio_pika.Message(
            body, correlation_id=call, delivery_mode=aio_pika.DeliveryMode.PERSISTENT, **properties
        )
        await self._channel.default_exchange.publish(reply, to or "", mandatory=True)


async def main() -> None:
    role, queue, book = sys.argv[1:]
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, os._exit, 0)
    await Peer(role, queue, Book(Path(book))).serve(os.environ["CHAOS_BROKER"])


def start() -> None:
    asyncio.run(main())


if __name__ == "__main__":
    start()
