"""Tasks and events as both adapters need them: long-lived tasks that end loudly, and waits for the first of several."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from coatcheck.log import get_logger

log = get_logger(__name__)


def spawn(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Run a long-lived task whose end by a bug is reported, never silent. The caller keeps, cancels and awaits it."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_report_crash)
    return task


def _report_crash(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (exc := task.exception()) is not None:
        log.error("broker_task_crashed", task=task.get_name(), exc_info=exc)


async def reap(task: asyncio.Task[Any] | None) -> None:
    """Cancel a task and wait until it has ended; again if need be, because a library may swallow a cancellation."""
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=1.0)


async def wait_first(*events: asyncio.Event, timeout_s: float | None = None) -> None:
    """Wait until one of the events is set, or the time is over."""
    if any(event.is_set() for event in events):
        return
    waiters = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiters, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for waiter in waiters:
            waiter.cancel()
