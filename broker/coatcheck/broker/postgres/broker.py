"""The Postgres adapter, put together: two supervised connections, a publisher, a receiver, and the queues they need.

Publishing and consuming use separate connections, so that a fetch never waits for the disk behind a publish. What is
published is on disk when its caller hears of it. Fetches and acks are not waited for: what a crashed server forgets
of them comes again, and that is what an unacked message does anyway.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import asyncpg

from coatcheck.broker import topology
from coatcheck.broker.port import Broker, BrokerStats, Consumer, Delivery, Outgoing, Routing, failed
from coatcheck.broker.postgres.codec import is_nameable
from coatcheck.broker.postgres.connection import DRIVER_ERRORS, PostgresAddress, PostgresUplink, translating
from coatcheck.broker.postgres.consumer import Holding, PostgresConsumer, PostgresSession, limit_bodies
from coatcheck.broker.postgres.publisher import PostgresPublisher
from coatcheck.broker.postgres.receiver import PostgresReceiver, clear_all
from coatcheck.broker.postgres.sql import SQL
from coatcheck.broker.settings import BrokerSettings
from coatcheck.broker.topology import Names
from coatcheck.errors import BrokerUnavailable, CoatcheckError, InvalidSettings, UsageError
from coatcheck.log import get_logger

T = TypeVar("T")
log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Declared:
    """A queue as it is declared. `broadcast` is what it is bound to, `expires` how long it outlives its process."""

    name: str
    delivery_limit: int | None = None
    dead: str | None = None
    is_single_active: bool = False
    expires: timedelta | None = None
    broadcast: str | None = None


class PostgresBroker(Broker):
    """Postgres 14 or newer."""

    def __init__(self, url: str, settings: BrokerSettings) -> None:
        self.stats = BrokerStats()
        self.max_body = settings.max_body
        self._settings = settings
        address = PostgresAddress.parse(url)
        self._publishing = PostgresUplink(
            address,
            settings,
            role="publish",
            stats=self.stats,
            server_settings={"statement_timeout": _ms(settings.publish_timeout)},
        )
        self._consuming = PostgresUplink(
            address,
            settings,
            role="consume",
            stats=self.stats,
            server_settings={"statement_timeout": _ms(settings.rpc_timeout), "synchronous_commit": "off"},
        )
        self._publisher = PostgresPublisher(self._publishing, settings, self.stats)
        self._receiver = PostgresReceiver(
            self._consuming, settings, self.stats, restore=self._restore, ensure_queue=self._ensure_queue
        )
        # What we declared, by queue, to make it again. A queue may be deleted under us, or a database come back empty.
        self._declared: dict[str, tuple[_Declared, ...]] = {}
        self._own: dict[str, _Declared] = {}

    @property
    def is_connected(self) -> bool:
        return self._publishing.link is not None and self._receiver.session is not None

    async def start(self) -> None:
        try:
            self._publishing.begin()
            await self._receiver.start()
            await self._publishing.get(self._settings.connect_budget.total_seconds())
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        with suppress(BrokerUnavailable):  # what they hold goes with the session
            await asyncio.gather(*(consumer.stop() for consumer in tuple(self._receiver.consumers)))
        await self._delete_own_queues()
        await self._publisher.stop()
        await self._receiver.stop()
        await self._publishing.stop()

    # --- topology ---

    async def declare_service(self, service: str) -> None:
        names = Names(service)
        limit = topology.SERVICE_DELIVERY_LIMIT
        queues = (
            _Declared(names.dead),
            *(
                _Declared(it, delivery_limit=limit, dead=names.dead)
                for it in (names.requests, names.replies, names.control)
            ),
        )
        await self._declare(queues, broadcast=names.broadcast)

    async def declare_sweeper(self, queue: str = topology.SWEEPER_QUEUE) -> None:
        await self._declare((_Declared(queue, is_single_active=True),))

    async def declare_replica(self, service: str) -> str:
        names = Names(service)
        expires = timedelta(milliseconds=topology.REPLICA_EXPIRES_MS)
        return await self._declare_own(_Declared(names.new_replica(), expires=expires, broadcast=names.broadcast))

    async def declare_private(self) -> str:
        expires = timedelta(milliseconds=topology.PRIVATE_EXPIRES_MS)
        return await self._declare_own(_Declared(topology.new_private(), expires=expires))

    async def _declare(self, queues: tuple[_Declared, ...], *, broadcast: str | None = None) -> None:
        names = [queue.name for queue in queues]
        what = f"declare {', '.join(names)}"
        broadcasts = [broadcast] if broadcast else []
        if self._settings.declares:
            await self._on_session(lambda session: self._make(session, *queues, broadcasts=broadcasts), what)
        else:
            missing = await self._on_session(
                lambda session: session.fetch(SQL["find_missing"], names, broadcasts), what
            )
            if missing:
                raise InvalidSettings(
                    f"{', '.join(row['name'] for row in missing)} not there, and this process was told not to make "
                    "them; run `coatcheck declare` as a user who may"
                )
        self._declared |= dict.fromkeys(names, queues)

    async def _declare_own(self, queue: _Declared) -> str:
        broadcasts = [queue.broadcast] if queue.broadcast else []
        if broadcasts and not self._settings.declares:
            await self._declare((), broadcast=queue.broadcast)
        await self._on_session(
            lambda session: self._make(session, queue, broadcasts=broadcasts), f"declare {queue.name}"
        )
        self._own[queue.name] = queue
        return queue.name

    async def _make(self, session: PostgresSession, *queues: _Declared, broadcasts: Sequence[str]) -> None:
        """Make queues in one transaction; those that are there stay as they are."""

        async def work(connection: asyncpg.Connection) -> None:
            async with connection.transaction():
                if self._settings.declares:
                    await connection.executemany(SQL["declare_broadcast"], [(name,) for name in broadcasts])
                for queue in queues:
                    owner = self._receiver.process if queue.expires is not None else None
                    await connection.execute(
                        SQL["declare"],
                        queue.name,
                        queue.delivery_limit,
                        queue.dead,
                        queue.is_single_active,
                        owner,
                        queue.expires,
                    )
                    if queue.broadcast is not None:
                        await connection.execute(SQL["bind"], queue.broadcast, queue.name)

        await session.run(work)

    async def _restore(self, session: PostgresSession) -> None:
        """Make the queues of this process again, as far as they have gone. A driver error is the session's."""
        if self._own:
            broadcasts = {queue.broadcast for queue in self._own.values() if queue.broadcast is not None}
            await self._make(session, *self._own.values(), broadcasts=sorted(broadcasts))

    async def _ensure_queue(self, session: PostgresSession, queue: str) -> bool:
        own = self._own.get(queue)
        queues = (own,) if own else self._declared.get(queue, ())
        if not queues or (own is None and not self._settings.declares):
            return False
        await self._make(session, *queues, broadcasts=[own.broadcast] if own and own.broadcast else [])
        log.warning("queue_declared_again", queue=queue)
        return True

    async def _delete_own_queues(self) -> None:
        queues, self._own = self._own, {}
        for queue in queues:
            if self._receiver.session is not None:
                with suppress(BrokerUnavailable):  # they expire by themselves
                    await self.delete_queue(queue)

    # --- messages ---

    async def consume(
        self,
        queue: str,
        on_delivery: Callable[[Delivery], None],
        *,
        prefetch: int,
        on_lost: Callable[[], None] | None = None,
    ) -> Consumer:
        if not 1 <= prefetch <= 65_535:
            raise InvalidSettings(f"prefetch is {prefetch}; it must be between 1 and 65535")
        if not is_nameable(queue):
            raise UsageError(f"consume {queue!r}: there can be no queue of that name")
        await self._receiver.get_session()
        consumer = PostgresConsumer(
            queue,
            on_delivery,
            prefetch=prefetch,
            on_lost=on_lost,
            wake=self._receiver.wake,
            patience_s=(self._settings.publish_timeout + self._settings.rpc_timeout).total_seconds(),
            stats=self.stats,
        )
        self._receiver.consumers.append(consumer)
        try:
            await consumer.start()
        except BaseException:
            consumer.is_stopping = True
            self._receiver.wake()
            raise
        return consumer

    def publish_soon(self, batch: Sequence[Outgoing]) -> list[Future[Routing]]:
        return [self._publish(outgoing) for outgoing in batch]

    def _publish(self, outgoing: Outgoing) -> Future[Routing]:
        try:
            self.check(outgoing)
            return self._publisher.publish(outgoing)
        except CoatcheckError as error:
            return failed(error)

    @asynccontextmanager
    async def browse(self, queue: str, limit: int) -> AsyncIterator[list[Delivery]]:
        what = f"browse {queue!r}"
        session = await self._receiver.get_session()
        hold = Holding(session, queue)
        async with translating(what):
            found = await session.fetch(SQL["find_queue"], queue) if is_nameable(queue) else []
            if not found:
                raise BrokerUnavailable(f"{what}: there is no such queue")
            rows = await session.fetch(SQL["take"], session.id, found[0]["id"], limit, *limit_bodies(self._settings))
        deliveries: list[Delivery] = [hold.take(row, self.stats) for row in rows]
        try:
            yield deliveries
        finally:
            with suppress(*DRIVER_ERRORS):  # then the session is over, and all of it is back
                await hold.release()

    # --- looking at queues ---

    async def depth(self, queue: str) -> int | None:
        return await self._look(SQL["depth"], queue, f"depth of {queue!r}")

    async def consumer_count(self, queue: str) -> int | None:
        return await self._look(SQL["count_consumers"], queue, f"consumers of {queue!r}")

    async def _look(self, statement: str, queue: str, what: str) -> int | None:
        if not is_nameable(queue):
            return None
        rows = await self._on_session(lambda session: session.fetch(statement, queue), what)
        return rows[0]["count"] if rows else None

    async def purge(self, queue: str) -> None:
        async def purge(session: PostgresSession) -> None:
            found = [row["id"] for row in await session.fetch(SQL["find_queue"], queue)]
            await clear_all(session, found, with_held=False)

        await self._on_session(purge, f"purge {queue!r}")

    async def delete_queue(self, queue: str) -> None:
        async def delete(session: PostgresSession) -> None:
            deleted = [row["id"] for row in await session.fetch(SQL["delete_queue"], queue)]
            await clear_all(session, deleted, with_held=True)

        self._declared.pop(queue, None)
        self._own.pop(queue, None)
        await self._on_session(delete, f"delete {queue!r}")

    async def delete_service(self, service: str) -> None:
        names = Names(service)
        await super().delete_service(service)
        await self._on_session(
            lambda session: session.fetch(SQL["delete_broadcast"], names.broadcast), f"delete {names.broadcast!r}"
        )

    async def _on_session(self, work: Callable[[PostgresSession], Awaitable[T]], what: str) -> T:
        """Do something on the consuming connection, in turn with its loop. Raises `BrokerUnavailable`."""
        session = await self._receiver.get_session()
        async with translating(what):
            return await work(session)


def _ms(duration: timedelta) -> str:
    return str(max(1, int(duration.total_seconds() * 1000)))
