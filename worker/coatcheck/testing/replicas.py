"""The real worker, as a part of a stage."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from coatcheck.broker.memory import MemoryBroker
from coatcheck.testing.virtual_time import Part
from coatcheck.worker.app import App
from coatcheck.worker.worker import Worker

__all__ = ["Replica"]


class Replica:
    """One replica of an app on a stage."""

    def __init__(
        self,
        worker: Worker,
        *,
        part: Part,
        running: asyncio.Task[None],
        finish: Callable[[asyncio.Task[None]], Awaitable[bool]],
    ) -> None:
        self.worker = worker
        self.part = part
        self.running = running
        self._finish = finish

    def __repr__(self) -> str:
        return f"Replica({self.worker.name!r})"

    @property
    def app(self) -> App:
        return self.worker.app

    @property
    def is_gone(self) -> bool:
        """Whether it was stopped or killed, or has ended by itself."""
        return self.part.is_dead or self.running.done()

    async def start(self) -> None:
        """Return when it consumes. Raises what kept it from starting."""
        while not self.worker.is_ready:
            if self.running.done():
                self.running.result()
            await asyncio.sleep(0)

    async def stop(self) -> None:
        """Stop as on a deploy: runs are finished or put down, and what is parked waits for another replica."""
        if not self.is_gone:
            self.worker.stop()
            await self._finish(self.running)

    def kill(self) -> None:
        """Die, as by `kill -9`: nothing of it runs any more, and the broker has its unacked messages back."""
        broker = self.worker._broker  # noqa: SLF001 - a death is nobody's method
        assert isinstance(broker, MemoryBroker)
        self.part.is_dead = True
        broker.go_dark()
