"""What the broker tests stand on: a broker of either kind whose network can be broken, and things to wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiormq
import asyncpg
from tests.broker.proxy import Proxy

from coatcheck.broker import Broker, Consumer, Delivery, Message, Outgoing, Routing, connect
from coatcheck.broker.memory import MemoryBroker, _Queue

PATIENCE_S = 15.0
QUICK: dict[str, Any] = {"backoff_min": 0.02, "backoff_max": 0.2, "publish_timeout": 5, "rpc_timeout": 5}


class Rig:
    """A way to get connected brokers of one kind and to break their network. Brokers are stopped at the end."""

    def __init__(self, url: str, proxy: Proxy | None) -> None:
        self.url = url
        self.proxy = proxy
        self._brokers: list[Broker] = []

    async def connect(self, **settings: Any) -> Broker:
        broker = connect(self.url, **{**QUICK, **settings})
        self._brokers.append(broker)
        await broker.start()
        return broker

    def cut(self) -> None:
        if self.proxy is not None:
            self.proxy.cut()
        for broker in self._brokers:
            if isinstance(broker, MemoryBroker):
                broker.cut()

    def go_dark(self) -> None:
        if self.proxy is not None:
            self.proxy.refuse()
        for broker in self._brokers:
            if isinstance(broker, MemoryBroker):
                broker.go_dark()

    def come_back(self) -> None:
        if self.proxy is not None:
            self.proxy.accept()
        for broker in self._brokers:
            if isinstance(broker, MemoryBroker):
                broker.come_back()

    async def limit(self, queue: str, max_length: int) -> None:
        """Have a queue, made for this, that refuses what comes while so many messages are ready in it."""
        if self.url.startswith("amqp"):
            connection = await aiormq.connect(self.url)
            channel = await connection.channel()
            arguments: Any = {"x-max-length": max_length, "x-overflow": "reject-publish"}
            await channel.queue_declare(queue, durable=True, arguments=arguments)
            await connection.close()
        elif self.url.startswith("pg"):
            await _bound(self.url.replace("pg://", "postgresql://", 1), queue, max_length)
        else:
            broker = self._brokers[0]
            assert isinstance(broker, MemoryBroker)
            broker.server.declare(_Queue(queue))
            broker.server.limit(queue, max_length)

    async def close(self) -> None:
        for broker in self._brokers:
            await broker.stop()


async def _bound(url: str, queue: str, max_length: int) -> None:
    """Bound a queue in Postgres as an operator can: by a trigger."""
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(
            f"""
            SET search_path = coatcheck_broker;
            INSERT INTO queue (name) VALUES ('{queue}');
            CREATE OR REPLACE FUNCTION refuse_when_full() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                IF (SELECT count(*) FROM coatcheck_broker.message WHERE queue_id = NEW.queue_id) >= TG_ARGV[1]::integer
                    THEN RAISE 'queue % is full', TG_ARGV[0]; END IF;
                RETURN NEW;
            END $$;
            """
        )
        number = await connection.fetchval("SELECT id FROM coatcheck_broker.queue WHERE name = $1", queue)
        await connection.execute(
            f"""
            CREATE TRIGGER full_{number} BEFORE INSERT ON coatcheck_broker.message FOR EACH ROW
              WHEN (NEW.queue_id = {number})
              EXECUTE FUNCTION coatcheck_broker.refuse_when_full('{queue}', '{max_length}')
            """
        )
    finally:
        await connection.close()


class Inbox:
    """Collects deliveries; `take` waits for the next one, `lost` for the loss of a consumer."""

    def __init__(self, *, is_acking: bool = False) -> None:
        self.deliveries: asyncio.Queue[Delivery] = asyncio.Queue()
        self.losses: asyncio.Queue[None] = asyncio.Queue()
        self._is_acking = is_acking

    def __call__(self, delivery: Delivery) -> None:
        if self._is_acking:
            delivery.ack()
        self.deliveries.put_nowait(delivery)

    def on_lost(self) -> None:
        self.losses.put_nowait(None)

    async def take(self, count: int = 1) -> list[Delivery]:
        async with asyncio.timeout(PATIENCE_S):
            return [await self.deliveries.get() for _ in range(count)]

    async def take_one(self) -> Delivery:
        return (await self.take())[0]

    async def lost(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.losses.get()

    @property
    def is_empty(self) -> bool:
        return self.deliveries.empty()

    async def consume(self, broker: Broker, queue: str, prefetch: int = 10) -> Consumer:
        return await broker.consume(queue, self, prefetch=prefetch, on_lost=self.on_lost)


async def until(is_so: Callable[[], Awaitable[bool]] | Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """Wait until something outside this process, which cannot signal, is so."""
    async with asyncio.timeout(patience_s):
        while True:
            answer = is_so()
            if await answer if isinstance(answer, Awaitable) else answer:
                return
            await asyncio.sleep(0.02)


async def until_depth(broker: Broker, queue: str, depth: int | None) -> None:
    async def is_so() -> bool:
        return await broker.depth(queue) == depth

    await until(is_so)


def as_broker(store_url: str) -> str:
    """The address of the queues in a store's database."""
    return f"pg{store_url[store_url.index('://') :]}"


async def make_tables(url: str) -> None:
    """Have the tables of a Postgres broker made, as whoever starts first does."""
    async with connect(url, **QUICK):
        pass


async def send(broker: Broker, queue: str, *bodies: bytes) -> list[Routing]:
    return await broker.publish([Outgoing(queue, Message(body)) for body in bodies])
