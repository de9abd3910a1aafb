"""A worker or a sweeper as a part of a program: `async with Worker(app): …`."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Self


class Running(ABC):
    """What runs until it is told to stop.

    `async with` starts it, goes on once it is ready, and at the end stops it and waits for it. If it fails on the way,
    the block is cancelled, and what it raised leaves the `async with` in an ExceptionGroup, as from a TaskGroup.
    """

    def __init__(self) -> None:
        self._started = asyncio.Event()
        self._leaving = AsyncExitStack()

    @abstractmethod
    async def run(self) -> None: ...

    @abstractmethod
    def stop(self) -> None: ...

    async def __aenter__(self) -> Self:
        await self._leaving.enter_async_context(_running(self, self._started))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leaving.__aexit__(kind, error, trace)


@asynccontextmanager
async def _running(part: Running, started: asyncio.Event) -> AsyncIterator[None]:
    raised: Exception | None = None
    async with asyncio.TaskGroup() as group:
        group.create_task(part.run())
        await started.wait()
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the block's own: it is raised as it is, once the part has stopped
            raised = error
        part.stop()
    if raised is not None:
        raise raised
