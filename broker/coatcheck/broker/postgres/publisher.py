"""Publishing: what waits when the connection is free goes as one statement, which is one transaction.

No timer: when idle a batch goes at once, when busy many callers share a commit. The commit is the confirmation. A
statement that was sent and not answered is in doubt; it is not sent again, its callers are told.
"""

from __future__ import annotations

import asyncio
from asyncio import Future, TimerHandle
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import asyncpg

from coatcheck.broker.background import reap
from coatcheck.broker.port import BrokerStats, Outgoing, Routing, fail
from coatcheck.broker.postgres.codec import encode_head, is_nameable
from coatcheck.broker.postgres.connection import DRIVER_ERRORS, PostgresLink, PostgresUplink, describe
from coatcheck.broker.postgres.sql import SQL
from coatcheck.broker.settings import MEBIBYTE, BrokerSettings
from coatcheck.errors import BrokerUnavailable, MalformedMessage
from coatcheck.points import reach

_MAX_MESSAGES = 1000
_MAX_BYTES = 16 * MEBIBYTE
_LOOKS = 20
"""How often in a publish timeout we look for messages that wait too long."""
_REFUSALS = (asyncpg.RaiseError, asyncpg.IntegrityConstraintViolationError, asyncpg.ConfigurationLimitExceededError)
"""What a trigger or constraint answers that bounds a queue. Postgres itself bounds none."""
_IN_DOUBT = "any message of the batch may or may not have arrived"


@dataclass(slots=True, eq=False)
class _Sending:
    """One message on its way."""

    outgoing: Outgoing
    head: bytes
    routing: Future[Routing]
    since_s: float


class PostgresPublisher:
    """Publishes over one uplink. Safe for concurrent callers."""

    def __init__(self, uplink: PostgresUplink, settings: BrokerSettings, stats: BrokerStats) -> None:
        self._uplink = uplink
        self._stats = stats
        self._timeout_s = settings.publish_timeout.total_seconds()
        self._pending: deque[_Sending] = deque()
        self._sending: list[_Sending] = []
        self._progress_s = 0.0
        """When a statement was last answered: messages wait for longer than the timeout only while others go."""
        self._flusher: asyncio.Task[None] | None = None
        self._looking: TimerHandle | None = None

    def publish(self, outgoing: Outgoing) -> Future[Routing]:
        """See `Broker.publish_soon`. Raises MalformedMessage, and BrokerUnavailable if nothing was started."""
        if not self._uplink.is_started:
            raise BrokerUnavailable(self._uplink.explain("publish: not started"))
        loop = asyncio.get_running_loop()
        sending = _Sending(outgoing, encode_head(outgoing.message), loop.create_future(), loop.time())
        if not is_nameable(outgoing.to):
            self._settle(sending, Routing.NO_ROUTE)
            return sending.routing
        self._pending.append(sending)
        if self._flusher is None:
            self._flusher = asyncio.create_task(self._flush(), name="broker-publisher")
        if self._looking is None:
            self._looking = loop.call_later(self._timeout_s / _LOOKS, self._look)
        return sending.routing

    async def stop(self) -> None:
        """Give up what is still waiting."""
        await reap(self._flusher)
        if self._looking is not None:
            self._looking.cancel()
        given_up, self._pending, self._sending = [*self._sending, *self._pending], deque(), []
        self._fail(given_up, BrokerUnavailable(f"publish: the broker was stopped; {_IN_DOUBT}"))

    def _look(self) -> None:
        """Tell the callers of messages that have waited for too long, in line or for an answer.

        Those in line are let go: an outage may last for hours, and each look would meet all that failed in it.
        """
        self._looking = None
        loop = asyncio.get_running_loop()
        long_ago_s = loop.time() - self._timeout_s
        waiting = [*self._sending, *self._pending]
        late = [sending for sending in waiting if max(sending.since_s, self._progress_s) <= long_ago_s]
        self._fail(late, BrokerUnavailable(self._uplink.explain(f"publish: not confirmed in time; {_IN_DOUBT}")))
        self._pending = deque(sending for sending in self._pending if not sending.routing.done())
        if self._sending or self._pending:
            self._looking = loop.call_later(self._timeout_s / _LOOKS, self._look)

    async def _flush(self) -> None:
        try:
            while self._pending:
                link = await self._uplink.get()
                self._sending = self._take()
                if self._sending:
                    await self._send(link, self._sending)
                self._sending = []
        finally:
            self._flusher = None

    def _take(self) -> list[_Sending]:
        """Take what goes together. A message whose caller has left does not go at all."""
        together: list[_Sending] = []
        size = 0
        while self._pending and len(together) < _MAX_MESSAGES:
            size += len(self._pending[0].outgoing.message.body)
            if together and size > _MAX_BYTES:
                break
            sending = self._pending.popleft()
            if not sending.routing.done():
                together.append(sending)
        return together

    async def _send(self, link: PostgresLink, together: Sequence[_Sending]) -> None:
        try:
            (answer,) = await link.fetch(
                SQL["publish"],
                list(range(len(together))),
                [sending.outgoing.to for sending in together],
                [sending.outgoing.is_broadcast for sending in together],
                [sending.head for sending in together],
                [sending.outgoing.message.body for sending in together],
                [sending.outgoing.delay for sending in together],
                timeout_s=self._timeout_s,
            )
        except (*_REFUSALS, asyncpg.DataError) as exc:
            await self._find_refused(link, together, exc)
        except DRIVER_ERRORS as exc:
            # Also when the server is well but refuses, as a standby does: the next connection may find another.
            link.abort(f"a publish failed: {describe(exc)}")
            self._fail(together, BrokerUnavailable(self._uplink.explain(f"publish: {describe(exc)}; {_IN_DOUBT}")), exc)
        else:
            self._progress_s = asyncio.get_running_loop().time()
            for _ in together:
                reach("message_confirmed")
            routed = set(answer["routed"])
            for place, sending in enumerate(together):
                self._settle(sending, Routing.ROUTED if place in routed else Routing.NO_ROUTE)

    async def _find_refused(self, link: PostgresLink, together: Sequence[_Sending], exc: Exception) -> None:
        """Find what the server refuses to store: a message alone in the end, its neighbours sent without it."""
        self._progress_s = asyncio.get_running_loop().time()
        middle = len(together) // 2
        if middle:
            await self._send(link, together[:middle])
            await self._send(link, together[middle:])
        elif isinstance(exc, _REFUSALS):
            self._settle(together[0], Routing.REFUSED)
        else:
            fail(together[0].routing, MalformedMessage("unencodable", f"Postgres cannot keep it: {describe(exc)}"))

    def _settle(self, sending: _Sending, routing: Routing) -> None:
        self._stats.count_routing(routing)
        if not sending.routing.done():
            sending.routing.set_result(routing)

    def _fail(self, sendings: Sequence[_Sending], error: BrokerUnavailable, cause: Exception | None = None) -> None:
        for sending in sendings:
            if not sending.routing.done():
                self._stats.publish_failure_count += 1
                fail(sending.routing, BrokerUnavailable(*error.args), cause=cause)
