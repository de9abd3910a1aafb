"""The same world on RabbitMQ and Postgres, with a stranger who writes AMQP by himself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import aiormq
import asyncpg
import pamqp.frame
from aiormq.abc import ChannelFrame
from aiormq.channel import Channel
from pamqp.body import ContentBody
from pamqp.commands import Basic
from pamqp.header import ContentHeader
from tests.flow.harness import until
from tests.fuzz.messages import QUEUES, Fuzzed
from tests.fuzz.world import Report, World

from coatcheck.store import Store, TaskState

_ROUTING = frozenset({"CC", "BCC"})
"""RabbitMQ itself acts on these, and closes the channel for anything but a list of texts."""


class ServerWorld(World):
    """On servers that are there; queues and database are the caller's to remove."""

    def __init__(self, service: str, *, broker: str, store: str) -> None:
        super().__init__(service, broker=broker, store=store)
        self._store = Store(store, pool_size=1)
        self._stranger: Channel | None = None

    async def run(self, seed: int, count: int, *, only: int | None = None) -> Report:
        connection = await aiormq.connect(self.settings.broker)
        channel = await connection.channel(publisher_confirms=False)
        assert isinstance(channel, Channel)
        self._stranger = channel
        try:
            return await super().run(seed, count, only=only)
        finally:
            await connection.close()
            await self._store.close()

    async def send(self, batch: Sequence[Fuzzed]) -> None:
        assert self._stranger is not None
        for each in batch:
            await self._stranger.basic_publish(
                each.message.body, routing_key=self.queue(each.queue), properties=properties_of(each), wait=False
            )
        await self._send_unreadable()

    async def _send_unreadable(self) -> None:
        """Properties that no driver can read: nothing tells whose they are, so they are counted only."""
        for make in (_with_bad_text, _with_bad_date, _with_bad_header):
            for queue in QUEUES[:3]:
                await self._write(self.queue(queue), make)
                self.unreadable_count += 1

    async def _write(self, queue: str, make: Callable[[int], bytes]) -> None:
        channel = self._stranger
        assert channel is not None
        number = channel.number
        publish = pamqp.frame.marshal(Basic.Publish(routing_key=queue), number)
        payload = publish + make(number) + pamqp.frame.marshal(ContentBody(b"x"), number)
        await channel.connection.write_queue.put(ChannelFrame(payload=payload, should_close=False))

    async def skip_time(self) -> None:
        connection = await asyncpg.connect(self.settings.store)
        try:
            await connection.execute(
                "UPDATE coatcheck.call SET due_at = now(), hard_due_at = now(), look_at = now() WHERE state = 'open'"
            )
        finally:
            await connection.close()

    async def count_tasks(self) -> dict[TaskState, int]:
        return await self._store.count_tasks()

    async def letters_are_in(self) -> None:
        """Confirms of dead letters come before the queue shows them."""
        await until(self._are_all_there, what="the dead letters are all there")

    async def _are_all_there(self) -> bool:
        return await self._depth("dead") == self._meter("dead_letters_total")


def properties_of(each: Fuzzed) -> Basic.Properties:
    message = each.message
    headers: Mapping[str, Any] = {name: value for name, value in message.headers.items() if name not in _ROUTING}
    return Basic.Properties(
        content_type=message.content_type,
        content_encoding=message.content_encoding,
        headers=dict(headers),
        correlation_id=message.correlation_id,
        reply_to=message.reply_to,
        message_id=message.message_id,
        message_type=message.type,
    )


def _with_bad_text(number: int) -> bytes:
    return _marshal(number, correlation_id="@@@@", reply_to="nobody").replace(b"@@@@", b"\xff\xfe\xff\xfe")


def _with_bad_header(number: int) -> bytes:
    return _marshal(number, headers={"cc-id": [None] * 20_000, "cc-kind": "result"})


def _with_bad_date(number: int) -> bytes:
    instant = datetime(2020, 1, 1, tzinfo=UTC)
    frame = _marshal(number, headers={"cc-deadline": instant})
    return frame.replace(int(instant.timestamp()).to_bytes(8, "big"), b"\x7f" + b"\xff" * 7)


def _marshal(number: int, **properties: Any) -> bytes:
    return pamqp.frame.marshal(ContentHeader(body_size=1, properties=Basic.Properties(**properties)), number)
