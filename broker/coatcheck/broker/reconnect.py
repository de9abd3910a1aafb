"""The supervisor that always has the next connection ready, of either kind.

    down ──connect, with back-off──► up ──lost──► down …

The back-off is for attempts that fail and for links that do not last: a server that accepts us and then breaks the
protocol, or a link that its user gives up at once.

A link is lost once and for good; what used it asks the uplink for another. Nothing is carried over.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from typing import Generic, Protocol, TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from coatcheck.broker.background import reap, spawn
from coatcheck.broker.port import BrokerStats
from coatcheck.broker.settings import BrokerSettings
from coatcheck.errors import BrokerUnavailable
from coatcheck.log import get_logger

log = get_logger(__name__)

_STEADY_AFTER_S = 10.0
"""A link that lives so long has a server behind it that is well."""


class BrokerLink(Protocol):
    """A connection of some kind, until `lost` is set."""

    lost: asyncio.Event
    reason: str

    async def close(self) -> None: ...


L = TypeVar("L", bound=BrokerLink)


class Uplink(ABC, Generic[L]):
    """Keeps one link up, for ever, while started."""

    def __init__(self, settings: BrokerSettings, *, role: str, stats: BrokerStats) -> None:
        self.role = role
        self.is_up = asyncio.Event()
        self.is_refused = asyncio.Event()
        """The server does not want us, or is not who it should be: waiting is pointless."""
        self._settings = settings
        self._stats = stats
        self._link: L | None = None
        self._last_error: BaseException | None = None
        self._was_connected = False
        self._task: asyncio.Task[None] | None = None

    @abstractmethod
    async def _open(self) -> L:
        """Connect once. Raises what the driver raises."""

    @abstractmethod
    def _is_refusal(self, error: BaseException) -> bool:
        """Tell whether trying again is pointless."""

    @abstractmethod
    def explain(self, what: str) -> str:
        """A sentence about this server, with the last error if there was one, and without the password."""

    @property
    def link(self) -> L | None:
        """The live link, if there is one at this moment."""
        return self._link if self._link is not None and not self._link.lost.is_set() else None

    @property
    def is_started(self) -> bool:
        return self._task is not None

    def begin(self) -> None:
        """Start connecting, without waiting for it. Repeating it is safe."""
        if self._task is None:
            self._task = spawn(self._run(), f"broker-uplink-{self.role}")

    async def stop(self) -> None:
        """Disconnect and stay so. Repeating it is safe."""
        task, self._task = self._task, None
        await reap(task)
        link, self._link = self._link, None
        self.is_up.clear()
        if link is not None:
            await link.close()

    async def get(self, timeout_s: float | None = None) -> L:
        """Give the live link, waiting for one.

        Raises `BrokerUnavailable` when the time is over or nothing was started.
        """
        if (link := self.link) is not None:
            return link
        if self._task is None:
            raise BrokerUnavailable(self.explain("not started"))
        try:
            async with asyncio.timeout(timeout_s):
                while (link := self.link) is None:
                    await self.is_up.wait()
                    await asyncio.sleep(0)  # a link just lost stays "up" until its supervisor has run
        except TimeoutError as exc:
            raise BrokerUnavailable(self.explain("not connected")) from exc
        return link

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        short_count = 0
        while True:
            link = await self._connect()
            begun_s = loop.time()
            self._link = link
            self.is_up.set()
            await link.lost.wait()
            self.is_up.clear()
            self._stats.lost_count += 1
            log.warning("broker_link_lost", role=self.role, reason=link.reason)
            await link.close()
            short_count = 0 if loop.time() - begun_s > _STEADY_AFTER_S else short_count + 1
            await asyncio.sleep(self._pause_s(short_count))

    def _pause_s(self, short_count: int) -> float:
        """How long to wait after so many links in a row that came up and did not last. After the first: not at all."""
        if short_count < 2:
            return 0.0
        low, high = self._settings.backoff_min.total_seconds(), self._settings.backoff_max.total_seconds()
        return random.uniform(0.5, 1.0) * min(high, low * 2.0 ** min(short_count, 16))

    async def _connect(self) -> L:
        settings = self._settings
        retrying = AsyncRetrying(
            # Any error at all: nothing else would ever connect again. At the start the budget ends it, and says why.
            retry=retry_if_exception_type(Exception),
            wait=wait_random_exponential(
                multiplier=settings.backoff_min.total_seconds(),
                max=settings.backoff_max.total_seconds(),
                min=min(settings.backoff_min, settings.backoff_max).total_seconds(),
            ),
            before_sleep=self._on_connect_failed,
        )
        link: L = await retrying(self._open)
        self._stats.connect_count += 1
        self._stats.reconnect_count += self._was_connected
        self._was_connected = True
        self._last_error = None
        self.is_refused.clear()
        log.info("broker_connected", role=self.role)
        return link

    def _on_connect_failed(self, state: RetryCallState) -> None:
        self._stats.connect_failure_count += 1
        self._last_error = error = state.outcome.exception() if state.outcome else None
        if error is not None and self._is_refusal(error):
            self.is_refused.set()
        log.warning("broker_connect_failed", role=self.role, error=repr(error), attempt=state.attempt_number)
