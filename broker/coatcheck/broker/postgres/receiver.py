"""Receiving: one session, one loop, all consumers of a process.

    opening ──tables, session, own queues──► serving ──lost or reaped──► on_lost(), opening again …

A turn of the loop follows the wishes of consumers, writes what was settled, fetches for those that have room, and looks
after the house when it is time. It sleeps until a delivery is acked, a NOTIFY comes, a delayed message is due, or the
poll floor is reached: a NOTIFY may be lost together with its connection, so nothing depends on it but speed.

Every process keeps house for all: it gives back what dead sessions held, and clears what is not needed any more. A
session is dead when its connection is gone, which its advisory lock shows at once, or when it was silent for longer
than its lease. Burying one is a transaction: lock its row, give its messages back, forget it. A living process that was
buried finds its row gone. If we die in the middle, nothing happened, and the next process that looks does it.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import asyncpg

from coatcheck.broker.background import reap, spawn, wait_first
from coatcheck.broker.port import BrokerStats
from coatcheck.broker.postgres.connection import DRIVER_ERRORS, PostgresLink, PostgresUplink, describe
from coatcheck.broker.postgres.consumer import Holding, PostgresConsumer, PostgresSession, limit_bodies
from coatcheck.broker.postgres.sql import CHANNEL_PREFIX, NAMESPACE, SQL, ensure_schema
from coatcheck.broker.settings import BrokerSettings
from coatcheck.errors import BrokerUnavailable, InvalidSettings, UsageError
from coatcheck.log import get_logger

log = get_logger(__name__)

POLL_S = (0.5, 1.0)
"""How long to sleep at most, drawn anew each time so that a fleet does not poll in step."""
SWEEP_S = (5.0, 10.0)
LEASE_IN_HEARTBEATS = 3
_SCHEMA_PATIENCE_S = 60.0
_BITE = 5000
_DELETED_STAYS = timedelta(minutes=1)
"""Longer than any statement may run, so that a publish that saw a queue before it was deleted has ended."""


class PostgresReceiver:
    """Keeps one session open, for ever, while started, and serves the consumers from it.

    `restore` makes the queues of this process again when a session opens; `ensure_queue` makes one again that a
    consumer misses, if it was ours, and says whether it did.
    """

    def __init__(
        self,
        uplink: PostgresUplink,
        settings: BrokerSettings,
        stats: BrokerStats,
        *,
        restore: Callable[[PostgresSession], Awaitable[None]],
        ensure_queue: Callable[[PostgresSession, str], Awaitable[bool]],
    ) -> None:
        self.process = uuid.uuid4()
        self.consumers: list[PostgresConsumer] = []
        self._uplink = uplink
        self._settings = settings
        self._stats = stats
        self._restore = restore
        self._ensure_queue = ensure_queue
        self._rpc_s = settings.rpc_timeout.total_seconds()
        self._session: PostgresSession | None = None
        self._is_up = asyncio.Event()
        self._is_refused = asyncio.Event()
        self._refusal: InvalidSettings | None = None
        self._task: asyncio.Task[None] | None = None
        self._next_look_s = self._next_renewal_s = self._next_sweep_s = 0.0

    # --- what callers say ---

    @property
    def session(self) -> PostgresSession | None:
        """The open session, if there is one at this moment."""
        return self._session if self._session is not None and not self._session.lost.is_set() else None

    async def start(self) -> None:
        """Open a session. Raises `BrokerUnavailable` after `connect_budget`, or at once if waiting is pointless."""
        self._uplink.begin()
        if self._task is None:
            self._task = spawn(self._run(), "broker-receiver")
        budget_s = self._settings.connect_budget.total_seconds()
        await wait_first(self._is_up, self._is_refused, self._uplink.is_refused, timeout_s=budget_s)
        if self._refusal is not None:
            raise self._refusal
        if not self._is_up.is_set():
            raise BrokerUnavailable(self._uplink.explain(f"cannot connect within {budget_s:g} s"))

    async def stop(self) -> None:
        """End the session, so that what it holds is free at once, and disconnect. Repeating it is safe."""
        task, self._task = self._task, None
        await reap(task)
        if (session := self.session) is not None:
            with suppress(*DRIVER_ERRORS):
                await bury(session, [session.id], is_certain=True)
        self._part("stopped")
        await self._uplink.stop()

    async def get_session(self) -> PostgresSession:
        """Give the open session, waiting for one. Raises `BrokerUnavailable`."""
        if (session := self.session) is not None:
            return session
        if self._task is None:
            raise BrokerUnavailable(self._uplink.explain("not started"))
        try:
            async with asyncio.timeout(self._rpc_s):
                while (session := self.session) is None:
                    await self._is_up.wait()
                    await asyncio.sleep(0)  # a session just lost stays "up" until the loop has run
        except TimeoutError as exc:
            raise BrokerUnavailable(self._uplink.explain("not connected")) from exc
        return session

    def wake(self) -> None:
        """Have the loop look at the wishes of its consumers. Without a session it will when it has one; a consumer that
        is to stop has nothing left to give back then.
        """
        if self._session is not None:
            self._session.woken.set()
        else:
            self._remove_stopping()

    # --- the one task that acts ---

    async def _run(self) -> None:
        while True:
            link = await self._uplink.get()
            try:
                session = await self._open(link)
                await self._serve(session)
                reason = session.reason
            except InvalidSettings as exc:
                reason = str(exc)
                self._refusal = exc
                self._is_refused.set()
            except DRIVER_ERRORS as exc:
                reason = describe(exc)
            except Exception:
                # A bug of ours. Nothing else would ever consume again, so it costs the session and no more.
                log.exception("broker_receiver_failed")
                reason = "a bug: see broker_receiver_failed in the log"
            # Also when only the session is over: its lock goes with the connection.
            link.abort(reason)
            self._part(reason)

    async def _open(self, link: PostgresLink) -> PostgresSession:
        settings = self._settings
        await link.run(
            lambda connection: ensure_schema(connection, declares=settings.declares), timeout_s=_SCHEMA_PATIENCE_S
        )
        lease = LEASE_IN_HEARTBEATS * settings.heartbeat
        (opened,) = await link.fetch(
            SQL["open_session"], self.process, settings.name, lease, NAMESPACE, timeout_s=self._rpc_s
        )
        session = PostgresSession(opened["id"], link, self._stats, rpc_s=self._rpc_s)
        # We know best that our earlier sessions are over, also where the server still believes in them.
        own = [row["id"] for row in await session.fetch(SQL["find_own_sessions"], self.process, session.id)]
        if own:
            await bury(session, own, is_certain=True)
        await self._restore(session)
        now_s = asyncio.get_running_loop().time()
        self._next_look_s = self._next_sweep_s = now_s
        self._next_renewal_s = now_s + settings.heartbeat.total_seconds()
        self._refusal = None
        self._is_refused.clear()
        self._session = session
        self._is_up.set()
        return session

    def _part(self, reason: str) -> None:
        session, self._session = self._session, None
        self._is_up.clear()
        if session is not None:
            session.lose(reason)
            for consumer in self.consumers:
                consumer.lose(session.reason)
        self._remove_stopping()
        for consumer in self.consumers:
            consumer.tell_changed()

    async def _serve(self, session: PostgresSession) -> None:
        loop = asyncio.get_running_loop()
        while not session.lost.is_set():
            session.woken.clear()
            await self._follow_wishes(session, loop.time())
            await session.flush()
            is_look_due = await self._keep_house(session, loop.time())
            await self._fetch(session, looks_anyway=is_look_due)
            if not any(consumer.appetite for consumer in self.consumers):
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._sleep_s(loop.time())):
                        await session.woken.wait()

    def _sleep_s(self, now_s: float) -> float:
        dues = [consumer.due_at_s for consumer in self.consumers if consumer.due_at_s is not None]
        return max(0.0, min([self._next_look_s, *dues]) - now_s)

    # --- wishes ---

    async def _follow_wishes(self, session: PostgresSession, now_s: float) -> None:
        for consumer in tuple(self.consumers):
            is_wanted = consumer.is_wanted and not consumer.is_stopping
            if is_wanted and consumer.attached_as is None and consumer.retry_at_s <= now_s:
                await self._attach(session, consumer)
            elif not is_wanted and consumer.attached_as is not None:
                await self._detach(session, consumer)
            if consumer.is_stopping:
                if consumer.hold is not None:
                    await consumer.hold.release()
                self._remove(consumer)

    async def _attach(self, session: PostgresSession, consumer: PostgresConsumer) -> None:
        """Stand in line, and listen. A queue that has gone is made again if it was ours."""
        rows = await session.fetch(SQL["attach"], consumer.queue, session.id)
        if not rows and await self._ensure_queue(session, consumer.queue):
            rows = await session.fetch(SQL["attach"], consumer.queue, session.id)
        if not rows:
            consumer.failure = UsageError(f"there is no queue {consumer.queue!r}: declare it first")
            consumer.retry_at_s = asyncio.get_running_loop().time() + POLL_S[0]
            consumer.tell_changed()
            return
        consumer.channel = f"{CHANNEL_PREFIX}{rows[0]['queue_id']}"
        await session.run(lambda connection: connection.add_listener(consumer.channel, self._on_notify))
        consumer.attached_as = rows[0]["id"]
        consumer.hold = consumer.hold or Holding(session, consumer.queue)
        consumer.failure = None
        consumer.is_hungry = True
        consumer.tell_changed()

    async def _detach(self, session: PostgresSession, consumer: PostgresConsumer) -> None:
        await session.fetch(SQL["detach"], consumer.attached_as)
        consumer.attached_as = None
        if not any(it.channel == consumer.channel and it.attached_as is not None for it in self.consumers):
            await session.run(lambda connection: connection.remove_listener(consumer.channel, self._on_notify))
        consumer.tell_changed()

    def _remove_stopping(self) -> None:
        for consumer in [it for it in self.consumers if it.is_stopping]:
            self._remove(consumer)

    def _remove(self, consumer: PostgresConsumer) -> None:
        self.consumers.remove(consumer)
        consumer.is_stopped = True
        consumer.tell_changed()

    def _on_notify(self, _connection: Any, _pid: int, channel: str, _payload: str) -> None:
        for consumer in self.consumers:
            if consumer.channel == channel:
                consumer.is_hungry = True
        self.wake()

    # --- fetching ---

    async def _fetch(self, session: PostgresSession, *, looks_anyway: bool) -> None:
        """Fetch for the consumers that have room; `looks_anyway` also to see whether all still stand in line."""
        attached = sorted((it for it in self.consumers if it.attached_as is not None), key=lambda it: it.rank)
        asked = [consumer.appetite for consumer in attached]
        if not any(asked) and not (looks_anyway and attached):
            return
        for consumer, room in zip(attached, asked, strict=True):
            # Before, not after: a NOTIFY that comes while the fetch is under way may be about something it missed.
            consumer.is_hungry &= room == 0
        found = await session.fetch(
            SQL["fetch"], session.id, [it.attached_as for it in attached], asked, *limit_bodies(self._settings)
        )
        now_s = asyncio.get_running_loop().time()
        by_consumer: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
        for row in found:
            by_consumer[row["consumer_id"]].append(row)
        for consumer, room in zip(attached, asked, strict=True):
            assert consumer.attached_as is not None
            rows = by_consumer.get(consumer.attached_as)
            if rows is None:
                await self._miss(session, consumer)
                continue
            due_in_s = rows[0]["due_in_s"]
            consumer.due_at_s = None if due_in_s is None else now_s + due_in_s
            if room:
                consumer.feed([row for row in rows if row["id"] is not None], asked=room)

    async def _miss(self, session: PostgresSession, consumer: PostgresConsumer) -> None:
        """A consumer's row is gone: we were taken for dead, or its queue was deleted."""
        await self._renew(session)
        if not session.lost.is_set():
            consumer.lose("its queue was deleted")
            session.woken.set()

    # --- the house ---

    async def _keep_house(self, session: PostgresSession, now_s: float) -> bool:
        """Do what is due, and say whether it was time for a look at everything."""
        for consumer in self.consumers:
            if consumer.due_at_s is not None and consumer.due_at_s <= now_s:
                consumer.is_hungry, consumer.due_at_s = True, None
        if now_s >= self._next_renewal_s:
            self._next_renewal_s = now_s + self._settings.heartbeat.total_seconds()
            await self._renew(session)
        is_look_due = now_s >= self._next_look_s
        if is_look_due:
            self._next_look_s = now_s + random.uniform(*POLL_S)
            for consumer in self.consumers:
                consumer.is_hungry = True
            await bury_the_dead(session)
        if now_s >= self._next_sweep_s:
            self._next_sweep_s = now_s + random.uniform(*SWEEP_S)
            await sweep(session)
        return is_look_due

    async def _renew(self, session: PostgresSession) -> None:
        if not await session.fetch(SQL["renew_session"], session.id):
            session.lose("taken for dead: it was silent for longer than its lease")


# --- the house, of all processes ---


async def bury_the_dead(session: PostgresSession) -> None:
    """Look for sessions that are no more, and give back what they held. Raises a driver error."""
    dead = [row["id"] for row in await session.fetch(SQL["find_dead"], session.id, NAMESPACE)]
    if dead:
        await bury(session, dead, is_certain=False)


async def bury(session: PostgresSession, dead: Sequence[int], *, is_certain: bool) -> None:
    """End sessions. Unless it is certain that they are over, one that was seen again meanwhile is left alone."""

    async def work(connection: asyncpg.Connection) -> int:
        async with connection.transaction():
            locked = [row["id"] for row in await connection.fetch(SQL["lock_dead"], dead, NAMESPACE, is_certain)]
            if locked:
                # Statements of their own, so that they see what a session fetched up to the moment it was locked.
                await connection.fetch(SQL["give_back"], locked, None)
                await connection.fetch(SQL["forget_sessions"], locked)
            return len(locked)

    buried_count = await session.run(work)
    if buried_count and not is_certain:
        log.warning("broker_sessions_buried", count=buried_count)


async def clear(session: PostgresSession, queues: Sequence[int], *, with_held: bool) -> int:
    """Delete a bite of what queues hold, and say how much that was. Raises a driver error."""
    return len(await session.fetch(SQL["clear"], queues, _BITE, with_held))


async def clear_all(session: PostgresSession, queues: Sequence[int], *, with_held: bool) -> None:
    while await clear(session, queues, with_held=with_held):
        pass


async def sweep(session: PostgresSession) -> None:
    """Delete the queues of processes long gone, and a bite of what deleted queues hold. Raises a driver error."""
    await session.fetch(SQL["expire"])
    deleted = [row["id"] for row in await session.fetch(SQL["find_deleted"])]
    if deleted and not await clear(session, deleted, with_held=True):
        await session.fetch(SQL["forget_deleted"], deleted, _DELETED_STAYS)
