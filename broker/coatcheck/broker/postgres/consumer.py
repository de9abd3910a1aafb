"""A consumer: what is wanted of it, and what it has in hand. The receiver's loop acts on both.

`pause`, `resume` and `stop` only say what is wanted and wait, so a caller that is cancelled leaves nothing half done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from coatcheck.broker.port import BrokerStats, Consumer, Delivery
from coatcheck.broker.postgres.session import Hold
from coatcheck.errors import BrokerUnavailable, CoatcheckError
from coatcheck.log import get_logger

log = get_logger(__name__)

_SMALLEST_BITE = 4
_LARGEST_BITE = 128


class PostgresConsumer(Consumer):
    """A consumer. `attached_as` is its row in the line of its queue, while it stands there."""

    def __init__(
        self,
        queue: str,
        on_delivery: Callable[[Delivery], None],
        *,
        prefetch: int,
        on_lost: Callable[[], None] | None,
        wake: Callable[[], None],
        patience_s: float,
        stats: BrokerStats,
    ) -> None:
        self.queue = queue
        self.prefetch = prefetch
        self.rank = _rank(queue)
        self.is_wanted = True
        self.is_stopping = False
        self.is_stopped = False
        self.attached_as: int | None = None
        self.channel = ""
        self.hold: Hold | None = None
        self.failure: CoatcheckError | None = None
        """Why it could not be attached; it is tried again at `retry_at_s`."""
        self.retry_at_s = 0.0
        self.is_hungry = False
        """There may be something for it."""
        self.due_at_s: float | None = None
        """When a delayed message of its queue is due, by the clock of the event loop."""
        self._bite = _SMALLEST_BITE
        self._on_delivery = on_delivery
        self._on_lost = on_lost
        self._wake = wake
        self._patience_s = patience_s
        self._stats = stats
        self._changed = asyncio.Event()

    # --- what callers say ---

    async def start(self) -> None:
        """Wait until it stands in line. Raises `UsageError` if there is no such queue, else `BrokerUnavailable`."""
        await self._until(lambda: self.attached_as is not None or self.failure is not None)
        if self.failure is not None:
            raise self.failure
        if self.is_stopped:
            raise BrokerUnavailable(f"consumer of {self.queue!r}: the broker was stopped")

    async def pause(self) -> None:
        self.is_wanted = False
        await self._until(lambda: self.attached_as is None)

    async def resume(self) -> None:
        self.is_wanted = True
        await self._until(lambda: self.attached_as is not None or not self.is_wanted)

    async def stop(self) -> None:
        self.is_stopping = True
        await self._until(lambda: self.is_stopped)

    async def _until(self, is_so: Callable[[], bool]) -> None:
        """Wait until a state is reached. While the server is away that may never be; then say so, but keep the wish."""
        self._wake()
        try:
            async with asyncio.timeout(self._patience_s):
                while not is_so() and not self.is_stopped:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as exc:
            raise BrokerUnavailable(f"consumer of {self.queue!r}: the broker does not answer") from exc

    # --- what the receiver says ---

    def tell_changed(self) -> None:
        self._changed.set()

    @property
    def appetite(self) -> int:
        """How many it would take now.

        A bite doubles for as long as the queue fills it: a burst is shared with the other processes, which are awake
        by then, and a backlog is worked off in large bites.
        """
        if not self.is_hungry or self.attached_as is None or self.hold is None:
            return 0
        return min(self._bite, self.prefetch - len(self.hold.unacked))

    def feed(self, rows: list[Mapping[str, Any]], *, asked: int) -> None:
        """Hand over what was fetched for it. Fewer than asked: the queue is empty until somebody says otherwise."""
        assert self.hold is not None
        is_filled = len(rows) == asked
        self.is_hungry |= is_filled
        self._bite = min(2 * self._bite, _LARGEST_BITE) if is_filled else _SMALLEST_BITE
        for row in rows:
            self._deliver(self.hold.take(row, self._stats))

    def _deliver(self, delivery: Delivery) -> None:
        try:
            self._on_delivery(delivery)
        except Exception:
            # A bug in the receiver of the message. Handing it back costs a delivery each time, so the queue's limit
            # ends the loop in the dead-letter queue, where somebody looks.
            log.exception("on_delivery_failed", queue=self.queue)
            delivery.requeue()

    def lose(self, reason: str) -> None:
        """Everything it had in hand comes again, to it or to others."""
        hold, self.hold = self.hold, None
        self.attached_as = None
        if hold is None:
            return
        hold.lose()
        self._stats.consumer_lost_count += 1
        log.warning("consumer_lost", queue=self.queue, reason=reason, unacked_count=len(hold.unacked))
        if self._on_lost is not None and not self.is_stopping:
            try:
                self._on_lost()
            except Exception:
                log.exception("on_lost_failed", queue=self.queue)


def _rank(queue: str) -> int:
    """Whose messages are handed over first: orders, then answers, so that what has begun goes on, then new requests."""
    if queue.endswith(".control"):
        return 0
    return 1 if queue.endswith(".replies") or ".private." in queue or ".replica." in queue else 2
