"""Transactions in flight: they end by themselves, also when their caller has left."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class InFlight:
    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    async def shield(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it to its end in a task of its own. A caller that is cancelled leaves; the work goes on."""
        running = asyncio.create_task(work)
        self._running.add(running)
        running.add_done_callback(self._forget)
        return await asyncio.shield(running)

    async def drain(self) -> None:
        while self._running:
            await asyncio.wait(self._running)

    def _forget(self, running: asyncio.Task[Any]) -> None:
        self._running.discard(running)
        if not running.cancelled():
            running.exception()  # its caller may have left; asyncio would complain that the error was not read
