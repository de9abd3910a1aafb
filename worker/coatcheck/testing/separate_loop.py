"""Running something on an event loop of its own, from tests with and without one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

__all__ = ["Died", "run_apart"]

T = TypeVar("T")


class Died(BaseException):
    """Raised inside a replica at the moment it dies; nothing it does afterwards has an effect."""


def run_apart(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on a fresh event loop and return its result.

    Where a loop runs already it happens in a thread, and the caller waits: two loops do not fit into one thread.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(make)
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(copy_context().run, _run, make).result()


def _run(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    # Not asyncio.run: at its end it would wake what has died, so that it could clean up.
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(_ignore_the_dead)
    try:
        return loop.run_until_complete(make())
    finally:
        loop.close()


def _ignore_the_dead(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    if not isinstance(context.get("exception"), Died):
        loop.default_exception_handler(context)
