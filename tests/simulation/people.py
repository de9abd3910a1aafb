"""People who give orders while everything else goes on, and look at what came of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from tests.simulation import flows

from coatcheck.errors import StoreUnavailable
from coatcheck.store import CallState, Line, Store, Task, TaskId
from coatcheck.store.orders import Order, OrderDone, Pause, Resume, Retry, Rewind
from coatcheck.worker.messages import task_id_of

T = TypeVar("T")
Complain = Callable[[str], None]
LONGEST_PAUSE_S = 20.0
FAILURES = (CallState.FAILED, CallState.TIMED_OUT)


async def order_all(store: Store, orders: Sequence[tuple[float, str, int]], complain: Complain) -> None:
    begun_s = asyncio.get_running_loop().time()
    for at, kind, number in orders:
        await asyncio.sleep(max(0.0, begun_s + at - asyncio.get_running_loop().time()))
        task_id = task_id_of(flows.SERVICE, f"ask-{number}")
        task = await _insist(lambda task_id=task_id: store.find_task(task_id))  # type: ignore[misc]
        if task is None:
            continue
        if kind == "retry":
            await _wait_for_its_end(store, task_id)
        rng = random.Random(f"{at} {kind}")
        if kind == "pause":
            await _pause(store, task_id, rng)
        else:
            await _take_back(store, task, kind, rng, complain)


async def _wait_for_its_end(store: Store, task_id: TaskId) -> None:
    for _ in range(100):
        task = await _insist(lambda: store.find_task(task_id))
        if task is not None and task.state.is_final:
            return
        await asyncio.sleep(1.0)


async def _pause(store: Store, task_id: TaskId, rng: random.Random) -> None:
    await _insist(lambda: store.order(Pause(task_id=task_id)))
    await asyncio.sleep(rng.random() * LONGEST_PAUSE_S)
    await _insist(lambda: store.order(Resume(task_id=task_id)))


async def _take_back(store: Store, task: Task, kind: str, rng: random.Random, complain: Complain) -> None:
    point = rng.randint(0, task.checkpoint)
    order: Order = Retry(task_id=task.task_id) if kind == "retry" else Rewind(task_id=task.task_id, to=point)
    before = {_row(line): line for line in await _insist(lambda: store.task_lines(task.task_id))}
    done = await _insist(lambda: store.order(order))
    if not isinstance(done, OrderDone):
        return
    for line in await _insist(lambda: store.task_lines(task.task_id)):
        was = before.get(_row(line))
        if was is None or was.is_forgotten:
            continue
        if kind == "rewind" and line.checkpoint <= point and was.state is CallState.OK and line.is_forgotten:
            complain(f"a rewind to {point} discarded {line.key}, which was answered before it")
        if kind == "retry" and done.before == "failed" and was.state in FAILURES and not line.is_forgotten:
            complain(f"a retry kept {line.key}, which failed")


def _row(line: Line) -> tuple[object, ...]:
    return (line.call_id,) if line.call_id is not None else (line.key, line.seq)


async def _insist(work: Callable[[], Awaitable[T]]) -> T:
    while True:
        try:
            return await work()
        except StoreUnavailable:
            await asyncio.sleep(0.5)
