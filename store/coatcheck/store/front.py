"""The store as the worker sees it: single items in, group commits underneath."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeAlias
from uuid import UUID

from coatcheck.points import reach
from coatcheck.store.audits import LAST_TASK, ChainPage, EntryFilter, FoundEntry, SealLag
from coatcheck.store.batcher import Batcher, Observe
from coatcheck.store.chain import HistoryEntry
from coatcheck.store.checkpoints import CheckpointInfo, Stored, checkpoints_of
from coatcheck.store.history import Author
from coatcheck.store.opening import open_operations
from coatcheck.store.orders import Filter, Order, OrderDone, OrderRefused
from coatcheck.store.port import Operations
from coatcheck.store.rows import (
    MAX_HISTORY,
    Address,
    Answered,
    Arrival,
    CallId,
    CancelAsk,
    Known,
    Put,
    PutDone,
    PutRefused,
    Request,
    Ruling,
    Task,
    TaskId,
    TaskState,
    Wake,
)
from coatcheck.store.seals import Leaf, Seal, SinkMark, Unsealed
from coatcheck.store.views import Backlog, Late, Line, LookedAt, Renewal, Renewed, Retention, ServiceCount, Summary


class Store:
    """The rows of all tasks, at an address: `postgresql://...`, `memory://name` for one process, or any `Operations`.

    Every method raises StoreUnavailable while the store is away; then a write may or may not be in, and repeating it is
    safe: a put knows itself by its checkpoint number, the rest is repeated as redelivered. A write whose values cannot
    be stored (a NUL in a name) raises Rejected, alone of its batch.
    """

    def __init__(
        self, url: str | Operations, *, lease: timedelta = timedelta(seconds=60), pool_size: int = 8,
        observe: Observe | None = None, begins: bool = False, max_history: int = MAX_HISTORY, replica: str = "",
        keeps_values: bool = False,
    ) -> None:  # fmt: skip
        """Put a batcher before each operation that takes single items."""
        operations = open_operations(url, pool_size=pool_size, begins=begins) if isinstance(url, str) else url
        lane = asyncio.Semaphore(operations.lane_width)

        def batcher(name: str, work: Callable[..., Awaitable[Any]], **options: Any) -> Batcher[Any, Any]:
            made: Batcher[Any, Any] = Batcher(name, partial(work, **options), lane=lane, observe=observe)
            self._batchers.append(made)
            return made

        self._operations = operations
        self._author = author = Author(self.now, replica, has_values=keeps_values)
        granting: dict[str, Any] = {"lease": lease, "max_history": max_history, "author": author}
        self._batchers: list[Batcher[Any, Any]] = []
        self._put: Batcher[Put, PutDone | PutRefused | None] = batcher("put", operations.put, author=author)
        self._put_locked: Batcher[Put, PutDone | PutRefused] = batcher("put", operations.put_locked, author=author)
        self._claim: Batcher[Arrival, Ruling] = batcher("claim", operations.claim, **granting)
        self._create: Batcher[Request, Ruling | None] = batcher("accept", operations.create, lease=lease, author=author)
        self._accept: Batcher[Request, Ruling | None] = batcher("accept", operations.accept, **granting)
        self._resume: Batcher[Wake, Ruling] = batcher("resume", operations.resume, **granting)
        self._cancel: Batcher[CancelAsk, Ruling] = batcher("cancel", operations.cancel, author=author)
        self._find: Batcher[TaskId, Task | None] = batcher("find", operations.find_tasks)

    @property
    def place(self) -> str:
        """The address for messages, without its password."""
        return self._operations.place

    async def close(self) -> None:
        """Wait for what is in flight, then close the connections."""
        for batcher in self._batchers:
            await batcher.drain()
        await self._operations.close()

    def now(self) -> datetime:
        """The time as this process has it, for what is shown and recorded. Deadlines are the store's own affair."""
        return self._operations.now()

    async def ping(self) -> str | None:
        """Reach the store and tell the schema's version. Raises StoreUnavailable."""
        return await self._operations.schema_version()

    # --- one task at a time, committed together ---

    async def put(self, put: Put) -> PutDone | PutRefused:
        """Write what a run wants recorded. Repeating the same put is safe."""
        # Mostly the row stands as the run believes, and one statement does it. If not, the lock tells how it stands.
        return await self._put.submit(put) or await self._put_locked.submit(put)

    def claim(self, arrival: Arrival) -> asyncio.Future[Ruling]:
        """Take a reply, progress or timeout. A future and no coroutine: most replies need no task of their own."""
        return self._claim.submit(arrival)

    async def accept(self, request: Request) -> Ruling:
        """Find or make the row of a request."""
        while True:
            ruling = await self._create.submit(request) or await self._accept.submit(request)
            if ruling is not None:
                return ruling  # else retention took the row between the two, and the next try is the first

    async def resume(self, wake: Wake) -> Ruling:
        """Pick a task up whose lease or retry time is over."""
        return await self._resume.submit(wake)

    async def cancel(self, ask: CancelAsk) -> Ruling:
        """End a task as cancelled, or bury an unknown one."""
        return await self._cancel.submit(ask)

    async def order(self, order: Order) -> OrderDone | OrderRefused:
        """Do what a person ordered: rewind, fork, retry, pause, resume. Repeating it does it once more, unless it says
        which epoch it is for.
        """
        done = await self._operations.order(order, author=self._author)
        reach("after_order")
        return done

    async def find_for_order(self, wanted: Filter, *, limit: int) -> list[TaskId]:
        """The oldest tasks that an order in bulk means."""
        return await self._operations.find_for_order(wanted, limit=limit)

    async def find_task(self, task_id: TaskId) -> Task | None:
        """A plain look, without a lock."""
        return await self._find.submit(task_id)

    # --- many at once ---

    async def renew(
        self, renewals: Sequence[Renewal], *, lease: timedelta, detaches: bool = False, counted: int = 0
    ) -> Renewed:
        """Move leases on; tasks missing from the answer are not ours any more. `counted` pick-ups are added."""
        return await self._operations.renew(renewals, lease=lease, detaches=detaches, uncounted=-counted)

    async def give_back(self, renewals: Sequence[Renewal], *, lease: timedelta, detaches: bool) -> None:
        """Leave granted tasks to others once a short lease is over, as if they had never been picked up."""
        await self._operations.renew(renewals, lease=lease, detaches=detaches, uncounted=1)

    async def hasten_held(self, service: str) -> int:
        """Let the held tasks of a service be tried again now: new code is here, which may fit them."""
        return await self._operations.hasten_held(service)

    async def hasten_unsent(self, queue: str, *, limit: int = 1000) -> int:
        """Let what waits to be sent to this queue be sent now: it takes messages again. The oldest goes first."""
        return await self._operations.hasten_unsent(queue, limit=limit)

    async def mark_sent(self, calls: Sequence[CallId]) -> None:
        await self._operations.mark_sent(calls)

    async def mark_final_sent(self, told: Mapping[TaskId, Answered]) -> None:
        """Note that the final replies of these were sent, to these addresses. One whose row has another address or
        revision by now stays unsent.
        """
        await self._operations.mark_final_sent(told)

    async def resend_calls(self, calls: Sequence[CallId], *, after: timedelta) -> None:
        """Have the sweeper send these, as their queue refused them."""
        await self._operations.resend_calls(calls, after=after)

    async def resend_to(self, task_id: TaskId, address: Address, *, after: timedelta) -> bool:
        """Have the sweeper send a final reply to this address. False: the row takes no more of them."""
        return await self._operations.resend_to(task_id, address, after=after)

    async def look(self, *, limit: int, again: timedelta) -> LookedAt:
        return await self._operations.look(limit=limit, again=again)

    async def next_look(self) -> timedelta | None:
        return await self._operations.next_look()

    async def retire(self, *, limit: int, keep: Retention) -> int:
        return await self._operations.retire(limit=limit, keep=keep, author=self._author)

    async def forget_histories(self, *, limit: int, keep: timedelta) -> int:
        """Remove the histories of tasks that retention removed longer ago than `keep`."""
        return await self._operations.forget_histories(limit=limit, before=self.now() - keep)

    async def repair(self, *, after: UUID, limit: int, quiet: timedelta) -> tuple[int, UUID | None]:
        return await self._operations.repair(after=after, limit=limit, quiet=quiet)

    async def without_waker(self, *, limit: int = 100) -> list[TaskId]:
        return await self._operations.without_waker(limit=limit)

    # --- seals and audits ---

    async def read_unsealed(self, *, limit: int = 100_000, keep: timedelta | None = None) -> Unsealed:
        """What the next seal is to cover; `keep` is how long history is kept, None: for ever."""
        return await self._operations.read_unsealed(limit=limit, keep=keep)

    async def add_seal(self, seal: Seal, leaves: Sequence[Leaf]) -> bool:
        """Keep a seal. False: there is one of its number, and this one is nothing."""
        return await self._operations.add_seal(seal, leaves)

    async def read_seals(self, *, after: int = 0, limit: int = 1000) -> list[Seal]:
        return await self._operations.read_seals(after=after, limit=limit)

    async def read_leaves(self, *, after: int, last: int, limit: int) -> list[tuple[int, Leaf]]:
        return await self._operations.read_leaves(after=after, last=last, limit=limit)

    async def read_sinks(self) -> list[SinkMark]:
        return await self._operations.read_sinks()

    async def mark_sink(self, sink: str, number: int) -> None:
        await self._operations.mark_sink(sink, number)

    async def read_chains(
        self, *, after: tuple[UUID, int], last: UUID = LAST_TASK, sealed: int, limit: int
    ) -> ChainPage:
        """The next entries of all tasks by id and number, with what seals up to `sealed` and rows say of them."""
        return await self._operations.read_chains(after=after, last=last, sealed=sealed, limit=limit)

    async def find_entries(self, wanted: EntryFilter, *, limit: int) -> list[FoundEntry]:
        return await self._operations.find_entries(wanted=wanted, limit=limit)

    async def count_unchained(self) -> int:
        return await self._operations.count_unchained()

    async def find_seal_lag(self) -> SealLag:
        return await self._operations.find_seal_lag()

    # --- for people ---

    async def list_tasks(
        self, *, service: str | None = None, states: Collection[TaskState] = (), limit: int = 50,
        handler: str | None = None, after: UUID | None = None,
    ) -> list[Task]:  # fmt: skip
        """The newest first. `handler`: only of this one; `after`: only those older than the task of this id."""
        return await self._operations.list_tasks(
            service=service, states=states, limit=limit, handler=handler, after=after
        )

    async def count_tasks(self) -> dict[TaskState, int]:
        return await self._operations.count_tasks()

    async def summarise_tasks(
        self, *, service: str | None = None, states: Collection[TaskState] = (), limit: int = 50,
        handler: str | None = None, after: UUID | None = None,
    ) -> list[Summary]:  # fmt: skip
        """As `list_tasks`, without their payloads."""
        return await self._operations.summarise_tasks(
            service=service, states=states, limit=limit, handler=handler, after=after
        )

    async def find_ids(self, prefix: str, *, limit: int = 10) -> list[TaskId]:
        return await self._operations.find_ids(prefix=prefix, limit=limit)

    async def count_services(self) -> list[ServiceCount]:
        return await self._operations.count_services()

    async def find_late(self, *, grace: timedelta) -> list[Late]:
        return await self._operations.find_late(grace=grace)

    async def find_unsent(self, *, grace: timedelta) -> list[Backlog]:
        """What waits to be sent for longer than `grace`, by peer; final replies under the peer None."""
        return await self._operations.find_unsent(grace=grace)

    async def find_known(self, task_id: TaskId) -> Known:
        """What a task's next run would begin with; empty for a task that no row knows."""
        return (await self._operations.load_known([task_id])).get(task_id, Known())

    async def read_clock(self) -> datetime:
        """The time by the clock that made the rows; this machine's own may be ahead or behind."""
        return await self._operations.read_clock()

    async def task_lines(self, task_id: UUID) -> Sequence[Line]:
        return await self._operations.task_lines(task_id)

    async def read_history(self, task_id: UUID) -> list[HistoryEntry]:
        """What happened to a task, by number; it may outlive the task. Empty: nothing is kept of it."""
        return await self._operations.read_history(task_id)

    async def read_stored(self, task_id: TaskId) -> list[Stored]:
        """A task's journal and calls as they are kept, forgotten ones too; empty for a task that no row knows."""
        return await self._operations.read_stored(task_id)

    async def checkpoints(self, task_id: TaskId) -> list[CheckpointInfo]:
        """The known checkpoints of a task, by number; empty for a task that no row knows."""
        task = await self.find_task(task_id)
        return [] if task is None else checkpoints_of(task, await self.read_stored(task_id))


OpenStore: TypeAlias = Callable[..., Store]
"""Makes a store for an address, with the keyword options of `Store`."""
