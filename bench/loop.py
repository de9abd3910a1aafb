"""How the processes of a bench use their event loop: uvloop where it is installed, and one batch for each turn."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


def run(work: Coroutine[Any, Any, R]) -> R:
    """Run on uvloop where it is installed, as `coatcheck worker` does, else on asyncio's own loop."""
    with _runner() as runner:
        return runner.run(work)


def serve(work: Coroutine[Any, Any, None]) -> None:
    """Run a process that the measuring process waits for. Any error ends it, so that the measuring process notices."""
    with _runner() as runner:
        runner.get_loop().set_exception_handler(_give_up)
        runner.run(work)


def _runner() -> asyncio.Runner:
    try:
        import uvloop
    except ImportError:
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def _give_up(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    loop.default_exception_handler(context)
    logging.shutdown()
    os._exit(1)


class Turns(Generic[T]):
    """Collects the items that are added during one turn of the loop, for one batch; several may be under way.

    A batch that fails goes to the loop's exception handler.
    """

    def __init__(self, work: Callable[[list[T]], Awaitable[None]]) -> None:
        self._work = work
        self._waiting: list[T] = []
        self._under_way: set[asyncio.Task[None]] = set()

    def add(self, item: T) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._begin)
        self._waiting.append(item)

    def _begin(self) -> None:
        batch, self._waiting = self._waiting, []
        task = asyncio.ensure_future(self._work(batch))
        self._under_way.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.result()


class GroupCommit(Generic[T]):
    """Collects the items that are added while the previous batch is in flight: no timer, and one batch at a time."""

    def __init__(self, work: Callable[[list[T]], Awaitable[None]]) -> None:
        self._work = work
        self._waiting: list[T] = []
        self._has_some = asyncio.Event()

    def add(self, item: T) -> None:
        self._waiting.append(item)
        self._has_some.set()

    async def run(self) -> None:
        while True:
            await self._has_some.wait()
            self._has_some.clear()
            batch, self._waiting = self._waiting, []
            await self._work(batch)
