"""When Postgres is away: stop consuming, keep what we hold unacked, look for it with growing pauses, go on."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

from coatcheck.errors import StoreUnavailable
from coatcheck.log import get_logger
from coatcheck.store.batcher import LockTimeout
from coatcheck.worker.events import Events, StoreLost

log = get_logger(__name__)

T = TypeVar("T")

LONGEST_PAUSE_S = 5.0
SETTLED_S = 1.0
"""A gate that stays open for this long has a Postgres behind it that takes writes."""


class StoreGate:
    """Open while Postgres answers. The first failure closes it; one prober opens it again.

    A ping may pass while every write fails (a full disk, a standby that takes none). So a gate that was closed again
    soon after it opened stays closed a little longer each time.
    """

    def __init__(
        self,
        ping: Callable[[], Awaitable[object]],
        *,
        on_close: Callable[[], Awaitable[None]],
        on_open: Callable[[], Awaitable[None]],
        events: Events,
    ) -> None:
        self._ping = ping
        self._on_close = on_close
        self._on_open = on_open
        self._events = events
        self._opened = asyncio.Event()
        self._opened.set()
        self._opened_s = -math.inf
        self._flap_count = 0
        self._prober: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    async def insist(self, work: Callable[[bool], Awaitable[T]], *, first: Awaitable[T] | None = None) -> T:
        """Do `work` until Postgres takes it. It is told whether an earlier try may have been committed after all.

        `first` is a try that was begun already.
        """
        is_in_doubt = False
        while True:
            try:
                return await (work(is_in_doubt) if first is None else first)
            except LockTimeout as error:  # one row is held; Postgres is well, and the others need not wait
                is_in_doubt = is_in_doubt or error.is_in_doubt
                log.warning("row_held", error=str(error))
                await asyncio.sleep(random.uniform(0.05, 0.2))
            except StoreUnavailable as error:
                is_in_doubt = is_in_doubt or error.is_in_doubt
                self.close(error)
                await self._opened.wait()
            first = None

    def close(self, error: StoreUnavailable) -> None:
        """Report that Postgres did not answer."""
        if not self.is_open:
            return
        self._opened.clear()
        is_flapping = time.monotonic() - self._opened_s < SETTLED_S
        self._flap_count = self._flap_count + 1 if is_flapping else 0
        if self._prober is None:
            self._prober = asyncio.create_task(self._probe(), name="store-prober")
        self._events.tell(StoreLost(None, str(error)))

    async def stop(self) -> None:
        if self._prober is not None:
            self._prober.cancel()
            await asyncio.wait([self._prober])

    async def _probe(self) -> None:
        try:
            while not self.is_open:  # again, if it was lost while the consumers were being resumed
                await self._tell(self._on_close)
                await asyncio.sleep(self._flap_pause_s())
                await self._wait_for_answer()
                log.info("store_found")
                self._opened_s = time.monotonic()
                self._opened.set()
                await self._tell(self._on_open)
        finally:
            self._prober = None

    async def _tell(self, listener: Callable[[], Awaitable[None]]) -> None:
        try:
            await listener()
        except Exception:
            log.exception("gate_not_heard")  # the gate itself must go on

    async def _wait_for_answer(self) -> None:
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(Exception),  # a prober that dies would leave the gate shut for good
            wait=wait_random_exponential(multiplier=0.1, max=LONGEST_PAUSE_S),
        ):
            with attempt:
                await self._ping()

    def _flap_pause_s(self) -> float:
        if self._flap_count == 0:
            return 0.0
        return random.uniform(0.5, 1.0) * min(0.05 * 2.0 ** min(self._flap_count, 10), LONGEST_PAUSE_S)
