"""Publishing: whatever waits when the connection is free goes as one statement, which is one transaction.

No timer: when idle a batch goes at once, when busy many callers share a commit. The commit is the confirmation. A batch
that was sent and not answered is in doubt; it is not sent again, its callers are told.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import asyncpg

from coatcheck.broker.background import reap
from coatcheck.broker.headers import REASON
from coatcheck.broker.port import BrokerStats, Outgoing, Routing, count_routings
from coatcheck.broker.postgres.codec import encode_head, is_nameable
from coatcheck.broker.postgres.connection import DRIVER_ERRORS, PostgresLink, PostgresUplink, describe
from coatcheck.broker.postgres.sql import SQL
from coatcheck.broker.settings import MEBIBYTE, BrokerSettings
from coatcheck.errors import BrokerUnavailable, CoatcheckError, MalformedMessage, OversizedMessage
from coatcheck.points import reach

_MAX_MESSAGES = 1000
_MAX_BYTES = 16 * MEBIBYTE
_REFUSALS = (asyncpg.RaiseError, asyncpg.IntegrityConstraintViolationError, asyncpg.ConfigurationLimitExceededError)
"""What a trigger or constraint answers that bounds a queue. Postgres itself bounds none."""
_IN_DOUBT = "any message of the batch may or may not have arrived"


@dataclass(slots=True)
class _Waiting:
    """What goes together in any case: a caller's batch, or a part of it if that is large."""

    batch: Sequence[Outgoing]
    heads: list[bytes]
    size: int
    routings: asyncio.Future[list[Routing]]

    def fail(self, error: CoatcheckError) -> None:
        if not self.routings.done():
            self.routings.set_exception(error)


class PostgresPublisher:
    """Publishes over one uplink. Safe for concurrent callers."""

    def __init__(self, uplink: PostgresUplink, settings: BrokerSettings, stats: BrokerStats) -> None:
        self._uplink = uplink
        self._settings = settings
        self._stats = stats
        self._timeout_s = settings.publish_timeout.total_seconds()
        self._pending: deque[_Waiting] = deque()
        self._sending: list[_Waiting] = []
        self._flusher: asyncio.Task[None] | None = None

    async def publish(self, batch: Sequence[Outgoing]) -> list[Routing]:
        """See `Broker.publish`."""
        for outgoing in batch:
            self._check(outgoing)
        if not self._uplink.is_started:
            raise BrokerUnavailable(self._uplink.explain("publish: not started"))
        heads = [encode_head(outgoing.message) for outgoing in batch]
        waitings = [self._wait(batch[part], heads[part]) for part in _split(batch)]
        if waitings and self._flusher is None:
            self._flusher = asyncio.create_task(self._flush(), name="broker-publisher")
        try:
            # Whoever leaves takes back what was not sent yet, and nothing else.
            async with asyncio.timeout(self._timeout_s):
                answers = await asyncio.gather(*(waiting.routings for waiting in waitings))
        except (TimeoutError, BrokerUnavailable) as exc:
            self._stats.publish_failure_count += 1
            if isinstance(exc, BrokerUnavailable):
                raise
            raise BrokerUnavailable(self._uplink.explain(f"publish: not confirmed in time; {_IN_DOUBT}")) from exc
        routings = [routing for answer in answers for routing in answer]
        count_routings(self._stats, routings)
        return routings

    def _wait(self, part: Sequence[Outgoing], heads: list[bytes]) -> _Waiting:
        size = sum(len(outgoing.message.body) for outgoing in part)
        waiting = _Waiting(part, heads, size, asyncio.get_running_loop().create_future())
        self._pending.append(waiting)
        return waiting

    async def stop(self) -> None:
        """Give up what is still waiting."""
        await reap(self._flusher)
        given_up, self._pending, self._sending = [*self._sending, *self._pending], deque(), []
        for waiting in given_up:
            waiting.fail(BrokerUnavailable(f"publish: the broker was stopped; {_IN_DOUBT}"))

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

    def _take(self) -> list[_Waiting]:
        """Take what goes together; those whose callers have left do not go at all."""
        together: list[_Waiting] = []
        count = size = 0
        while self._pending:
            first = self._pending[0]
            count, size = count + len(first.batch), size + first.size
            if together and (count > _MAX_MESSAGES or size > _MAX_BYTES):
                break
            self._pending.popleft()
            if not first.routings.done():
                together.append(first)
        return together

    async def _send(self, link: PostgresLink, together: Sequence[_Waiting]) -> None:
        batch = [outgoing for waiting in together for outgoing in waiting.batch]
        places = [place for place, outgoing in enumerate(batch) if is_nameable(outgoing.to)]
        sent = [batch[place] for place in places]
        heads = [head for waiting in together for head in waiting.heads]
        try:
            (answer,) = await link.fetch(
                SQL["publish"],
                places,
                [outgoing.to for outgoing in sent],
                [outgoing.is_broadcast for outgoing in sent],
                [heads[place] for place in places],
                [outgoing.message.body for outgoing in sent],
                [outgoing.delay for outgoing in sent],
                timeout_s=self._timeout_s,
            )
        except DRIVER_ERRORS as exc:
            await self._on_failed(link, together, exc)
            return
        for _ in batch:
            reach("message_confirmed")
        routed = set(answer["routed"])
        routings = iter([Routing.ROUTED if place in routed else Routing.NO_ROUTE for place in range(len(batch))])
        for waiting in together:
            mine = [next(routings) for _ in waiting.batch]
            if not waiting.routings.done():
                waiting.routings.set_result(mine)

    async def _on_failed(self, link: PostgresLink, together: Sequence[_Waiting], exc: Exception) -> None:
        """Tell the callers. What the server refuses to store is refused alone: its neighbours are sent without it."""
        is_refusal = isinstance(exc, _REFUSALS)
        if is_refusal or isinstance(exc, asyncpg.DataError):
            if len(together) > 1:
                for waiting in together:
                    await self._send(link, [waiting])
            elif is_refusal:
                await self._send_halves(link, together[0])
            else:
                together[0].fail(MalformedMessage("unencodable", f"Postgres cannot keep it: {describe(exc)}"))
            return
        # Also when the server is well but refuses, as a standby does: the next connection may find another.
        link.abort(f"a publish failed: {describe(exc)}")
        for waiting in together:
            error = BrokerUnavailable(self._uplink.explain(f"publish: {describe(exc)}; {_IN_DOUBT}"))
            error.__cause__ = exc
            waiting.fail(error)

    async def _send_halves(self, link: PostgresLink, waiting: _Waiting) -> None:
        """Find the messages of a batch that are refused: each alone in the end, its neighbours sent without it."""
        middle = len(waiting.batch) // 2
        if middle == 0:
            if not waiting.routings.done():
                waiting.routings.set_result([Routing.REFUSED])
            return
        loop = asyncio.get_running_loop()
        halves = [
            _Waiting(waiting.batch[part], waiting.heads[part], 0, loop.create_future())
            for part in (slice(middle), slice(middle, None))
        ]
        for half in halves:
            await self._send(link, [half])
        answers = await asyncio.gather(*(half.routings for half in halves), return_exceptions=True)
        lost = next((each for each in answers if isinstance(each, BaseException)), None)
        if isinstance(lost, CoatcheckError):
            waiting.fail(lost)
        elif not waiting.routings.done():
            waiting.routings.set_result([routing for each in answers if isinstance(each, list) for routing in each])

    def _check(self, outgoing: Outgoing) -> None:
        size = len(outgoing.message.body)
        if size > self._settings.max_body and REASON not in outgoing.message.headers:
            raise OversizedMessage(
                "oversized", f"body of {size} bytes to {outgoing.to!r}; max_body is {self._settings.max_body}"
            )


def _split(batch: Sequence[Outgoing]) -> Iterator[slice]:
    """Cut a batch into parts that one statement can carry."""
    first = size = 0
    for place, outgoing in enumerate(batch):
        size += len(outgoing.message.body)
        if place > first and (place - first >= _MAX_MESSAGES or size > _MAX_BYTES):
            yield slice(first, place)
            first, size = place, len(outgoing.message.body)
    if batch:
        yield slice(first, None)
