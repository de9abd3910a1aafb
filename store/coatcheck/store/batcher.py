"""Group commit: collect what arrives while the previous batch is in flight, commit it together.

No timer: when idle an item goes at once, when busy hundreds share a commit. One bad item never fails its batch: a
batch that fails for a reason of its own is split until the item alone fails. A locked row never stalls a batch: mostly
another replica has it for the time of one statement, so the items that want it go along with the next batches. If it
is busy even so, they leave for a lane, one lane for each such row, and wait for it there, together.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from coatcheck.errors import StoreUnavailable, TransientError

In = TypeVar("In")
Out = TypeVar("Out")

LANE_WIDTH = 4
BATCH_ROUNDS = 5
"""Tries beside others. Four replies of one task come to two replicas at once; a lane for each would cost a transaction
of six round trips, a further try nothing."""
_MAX_LANE_ROUNDS = 200


class LockTimeout(StoreUnavailable):
    """Another transaction held a row for longer than we wait."""


@dataclass(frozen=True, slots=True)
class Busy:
    """What a commit returns for an item it could not take: another transaction, or an earlier item, has the row."""

    key: Hashable


@dataclass(frozen=True, slots=True)
class Unreadable:
    """What a commit returns for an item it has written and cannot answer: what its row holds makes no sense here."""

    error: Exception


Commit = Callable[[Sequence[In], bool], Awaitable[Sequence[Out | Busy | Unreadable]]]
Observe = Callable[[str, int, float], None]


@dataclass(slots=True)
class _Waiting(Generic[In, Out]):
    item: In
    future: asyncio.Future[Out]
    batch_rounds: int = 0
    lane_rounds: int = 0


class Batcher(Generic[In, Out]):
    """Feeds single items to a set-based `commit(items, waits_for_locks)`, one batch in flight at a time.

    `lane` bounds how many lanes wait at once; several batchers on one pool share it, so that locked rows cannot
    take all its connections.
    """

    def __init__(
        self,
        name: str,
        commit: Commit[In, Out],
        *,
        max_size: int = 500,
        lane: asyncio.Semaphore | None = None,
        observe: Observe | None = None,
    ) -> None:
        self._name = name
        self._commit = commit
        self._max_size = max_size
        self._observe = observe
        self._pending: deque[_Waiting[In, Out]] = deque()
        self._flusher: asyncio.Task[None] | None = None
        self._lane = lane or asyncio.Semaphore(LANE_WIDTH)
        self._lanes: dict[Hashable, deque[_Waiting[In, Out]]] = {}
        self._lane_tasks: set[asyncio.Task[None]] = set()

    def submit(self, item: In) -> asyncio.Future[Out]:
        """Commit the item with all else that waits. Cancelling the future does not undo it."""
        waiting: _Waiting[In, Out] = _Waiting(item, asyncio.get_running_loop().create_future())
        self._pending.append(waiting)
        if self._flusher is None:
            self._flusher = asyncio.create_task(self._flush(), name=f"batcher:{self._name}")
        return waiting.future

    async def drain(self) -> None:
        """Wait until everything submitted so far has been committed or has failed."""
        # By whether they are done: a flusher that was cancelled before its first step has not signed off.
        while running := [task for task in (*self._lane_tasks, self._flusher) if task is not None and not task.done()]:
            await asyncio.wait(running)

    async def _flush(self) -> None:
        try:
            while self._pending:
                await self._commit_batch(self._take(self._pending), waits=False)
        finally:
            self._flusher = None

    def _take(self, queue: deque[_Waiting[In, Out]]) -> list[_Waiting[In, Out]]:
        return [queue.popleft() for _ in range(min(len(queue), self._max_size))]

    async def _commit_batch(self, batch: list[_Waiting[In, Out]], *, waits: bool) -> None:
        begun = time.perf_counter()
        try:
            results = await self._commit([waiting.item for waiting in batch], waits)
        except LockTimeout as error:
            if waits:
                _fail(batch, error)
            else:
                # Something that SKIP LOCKED cannot skip was in the way of one of them, and nothing says which.
                for waiting in batch:
                    self._move_to_lane(waiting, key=waiting.future)
        except TransientError as error:
            _fail(batch, error)
        except Exception as error:  # noqa: BLE001 - what one item did must not reach its neighbours
            await self._bisect(batch, error, waits=waits)
        else:
            if self._observe:
                self._observe(self._name, len(batch), time.perf_counter() - begun)
            for waiting, result in zip(batch, results, strict=True):
                self._hand_over(waiting, result, waits=waits)

    async def _bisect(self, batch: list[_Waiting[In, Out]], error: Exception, *, waits: bool) -> None:
        if len(batch) == 1:
            _fail(batch, error)
            return
        middle = len(batch) // 2
        await self._commit_batch(batch[:middle], waits=waits)
        await self._commit_batch(batch[middle:], waits=waits)

    def _hand_over(self, waiting: _Waiting[In, Out], result: Out | Busy | Unreadable, *, waits: bool) -> None:
        if isinstance(result, Busy):
            waiting.lane_rounds += waits
            waiting.batch_rounds += not waits
            if not waits and waiting.batch_rounds < BATCH_ROUNDS and result.key not in self._lanes:
                self._pending.append(waiting)
            elif waiting.lane_rounds > _MAX_LANE_ROUNDS:
                _fail([waiting], StoreUnavailable(f"a row stayed busy for {_MAX_LANE_ROUNDS} transactions"))
            else:
                self._move_to_lane(waiting, key=result.key)
        elif isinstance(result, Unreadable):
            _fail([waiting], result.error)
        elif not waiting.future.done():
            waiting.future.set_result(result)

    def _move_to_lane(self, waiting: _Waiting[In, Out], *, key: Hashable) -> None:
        if key in self._lanes:
            self._lanes[key].append(waiting)
            return
        self._lanes[key] = deque([waiting])
        task = asyncio.create_task(self._run_lane(key), name=f"batcher:{self._name}:lane")
        self._lane_tasks.add(task)
        task.add_done_callback(self._lane_tasks.discard)

    async def _run_lane(self, key: Hashable) -> None:
        """Wait for one row with all the items that want it. An item that is busy even so joins the next round."""
        lane = self._lanes[key]
        try:
            while lane:
                async with self._lane:
                    await self._commit_batch(self._take(lane), waits=True)
        finally:
            del self._lanes[key]


def _fail(batch: Sequence[_Waiting[In, Out]], error: Exception) -> None:
    for waiting in batch:
        if not waiting.future.done():
            waiting.future.set_exception(error)
