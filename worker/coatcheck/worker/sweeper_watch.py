"""A worker's eye on the sweeper: without one, timeouts, sleeps and retries wait, and nothing else would say so.

The consumers of the sweepers' queue are the sign of life: the broker takes a dead one off by itself. It is for people
only. A worker without a sweeper stays ready, for it takes requests and replies all the same.
"""

from __future__ import annotations

import asyncio

from coatcheck.broker.port import Broker
from coatcheck.errors import CoatcheckError
from coatcheck.log import get_logger
from coatcheck.worker.metrics import Metrics

log = get_logger(__name__)

LOOK_EVERY_S = 15.0
MOST_MISSES = 2
"""So many looks in a row without a sweeper are no restart of one, nor a start of everything at once."""


class SweeperWatch:
    """Looks now and then whether any sweeper consumes `queue`, and says when that changes."""

    def __init__(self, broker: Broker, queue: str, *, metrics: Metrics) -> None:
        self._broker = broker
        self._queue = queue
        self._metrics = metrics
        self._miss_count = 0

    @property
    def is_missing(self) -> bool:
        return self._miss_count >= MOST_MISSES

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Look once. While the broker is away, or does not let us look, what was seen last stands."""
        try:
            count = await self._broker.consumer_count(self._queue)
        except CoatcheckError:
            return
        was_missing = self.is_missing
        self._miss_count = 0 if count else self._miss_count + 1
        if self.is_missing and not was_missing:
            log.warning(
                "sweeper_missing",
                queue=self._queue,
                effect="timeouts, sleeps and retries wait until there is one",
                remedy="run `coatcheck sweeper`",
            )
        elif was_missing and not self.is_missing:
            log.info("sweeper_seen", queue=self._queue)
        self._metrics.sweeper_missing.set(self.is_missing)
