"""The brokers a trial can run on, as it looks at them from outside: their queues, and what can be done to them."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

import aiormq
import asyncpg
from tests import services
from tests.broker.node import Node, _script

from coatcheck.points import POINTS

ON_REFUSAL = ("before_leave", "after_leave")
ON_ORDER = ("before_order", "after_order")
"""People give no orders in these trials; the simulation has them."""
"""Points that a process comes to where a client's queue refuses its answer."""
ON_SEALING = ("before_seal", "after_seal", "after_sink")
"""Points of a sweeper that has a key; those of a trial have none."""


class Broker(ABC):
    """One of them. `heavy_faults` are those that a whole server suffers."""

    kind: str
    url: str
    heavy_faults: tuple[str, ...]
    heavy_every_s: float
    peer_suffixes: tuple[str, ...]
    """Which queues a peer has."""
    points: tuple[str, ...] = tuple(name for name in POINTS if name not in (*ON_ORDER, *ON_SEALING))
    """At which points a process can die on it."""

    @abstractmethod
    async def depths(self, queues: Iterable[str]) -> dict[str, int]:
        """How many messages each queue has."""

    @abstractmethod
    async def find_unconsumed(self, queues: Iterable[str]) -> set[str]:
        """Which of these nobody consumes, or are not there yet."""

    @abstractmethod
    async def versions(self) -> dict[str, str]: ...


class RabbitMQ(Broker):
    """A RabbitMQ of the trial's own; where the program is missing, a borrowed one that must not be harmed."""

    kind = "amqp"
    heavy_faults = ("restart_postgres", "kill_broker", "close_connections", "memory_alarm", "full_disk")
    heavy_every_s = 15.0
    peer_suffixes = ("", ".control")

    def __init__(self, running: ExitStack, borrowed_url: str | None = None) -> None:
        self.node: Node | None = None
        if _script("rabbitmq-server") is not None:
            self.node = Node()
            running.callback(lambda: services.run_sync(self.node.close()))  # type: ignore[union-attr]
            services.run_sync(self.node.start())
            self.url = self.node.url
        else:
            url = borrowed_url or services.find_rabbitmq(running).url
            if url is None:
                raise services.NotHere("no rabbitmq-server to start, and no RabbitMQ to borrow")
            self.url = url

    async def depths(self, queues: Iterable[str]) -> dict[str, int]:
        connection = await aiormq.connect(self.url)
        try:
            channel = await connection.channel()
            declared = [(queue, await channel.queue_declare(queue, passive=True)) for queue in queues]
            return {queue: found.message_count or 0 for queue, found in declared}
        finally:
            await connection.close()

    async def find_unconsumed(self, queues: Iterable[str]) -> set[str]:
        unconsumed = set(queues)
        with contextlib.suppress(aiormq.exceptions.AMQPError, OSError):
            connection = await aiormq.connect(self.url)
            try:
                channel = await connection.channel()
                for queue in sorted(unconsumed):
                    if (await channel.queue_declare(queue, passive=True)).consumer_count:
                        unconsumed.discard(queue)
            finally:
                await connection.close()
        return unconsumed

    async def versions(self) -> dict[str, str]:
        connection = await aiormq.connect(self.url)
        try:
            return {"RabbitMQ": str(connection.server_properties.get("version", "unknown"))}
        finally:
            await connection.close()

    async def evaluate(self, expression: str) -> None:
        """Have our own node do something. `erl_call` is there at once; `rabbitmqctl` takes seconds to start."""
        assert self.node is not None
        erl_call = shutil.which("erl_call")
        if erl_call is None:
            await self.node.control("eval", expression)
            return
        name = self.node._environment["RABBITMQ_NODENAME"]
        cookie = (self.node._home / ".erlang.cookie").read_text().strip()
        process = await asyncio.create_subprocess_exec(
            erl_call, "-n", name, "-c", cookie, "-e", stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        said, _ = await process.communicate(f"{expression}\n".encode())
        assert process.returncode == 0, said
        assert b"ok" in said, said


class QueuesInPostgres(Broker):
    """The tables that `pg://` keeps in the store's database. What is done to Postgres is done to both."""

    kind = "pg"
    heavy_faults = ("restart_postgres", "full_disk")
    heavy_every_s = 20.0  # each of them takes the store and the broker at once
    # A peer declares itself as a service does. Nothing may end up in its replies and dead letters.
    peer_suffixes = ("", ".control", ".replies", ".dead")
    # Its queues have no limit. What happens when one refuses all the same is the simulation's to crash.
    points = tuple(name for name in POINTS if name not in (*ON_REFUSAL, *ON_ORDER, *ON_SEALING))

    def __init__(self, store_url: str) -> None:
        self._store_url = store_url
        self.url = f"pg{store_url[store_url.index('://') :]}"

    async def depths(self, queues: Iterable[str]) -> dict[str, int]:
        """Also what somebody holds, or what is delayed: what RabbitMQ would not tell."""
        counted = await self._fetch(
            """SELECT queue.name, count(message.id)::integer AS count
                 FROM coatcheck_broker.queue LEFT JOIN coatcheck_broker.message ON message.queue_id = queue.id
                WHERE queue.name = ANY($1::text[]) GROUP BY queue.name""",
            list(queues),
        )
        return {row["name"]: row["count"] for row in counted}

    async def find_unconsumed(self, queues: Iterable[str]) -> set[str]:
        wanted = set(queues)
        with contextlib.suppress(asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError):
            consumed = await self._fetch(
                """SELECT DISTINCT queue.name FROM coatcheck_broker.queue
                     JOIN coatcheck_broker.consumer ON consumer.queue_id = queue.id
                    WHERE queue.name = ANY($1::text[])""",
                list(wanted),
            )
            return wanted - {row["name"] for row in consumed}
        return wanted

    async def versions(self) -> dict[str, str]:
        return {}

    async def _fetch(self, query: str, names: Sequence[str]) -> list[asyncpg.Record]:
        connection = await asyncpg.connect(self._store_url, timeout=10)
        try:
            found: list[asyncpg.Record] = await connection.fetch(query, names)
            return found
        finally:
            await connection.close()
