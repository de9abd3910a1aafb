"""The store as the worker sees it: single items in, group commits underneath."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias, TypeVar
from uuid import UUID

from coatcheck.store.audits import ChainPage, EntryFilter, FoundEntry, SealLag
from coatcheck.store.batcher import Batcher, Observe
from coatcheck.store.migrate import schema_version
from coatcheck.store.postgres import audits, cancels, claims, puts, queries, seals, sweeps
from coatcheck.store.postgres.database import Database
from coatcheck.store.postgres.records import load_known
from coatcheck.store.rows import (
    MAX_HISTORY,
    Address,
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

T = TypeVar("T")


class Store:
    """Postgres, through one pool. Every method raises StoreUnavailable while it is away; then a write may or may not be
    in, and repeating it is safe: a put knows itself by its checkpoint number, the rest is repeated as redelivered.
    A write whose values cannot be stored (a NUL in a name) raises Rejected, alone of its batch.
    """

    def __init__(
        self, url: str, *, lease: timedelta = timedelta(seconds=60), pool_size: int = 8, observe: Observe | None = None,
        begins: bool = False, max_history: int = MAX_HISTORY, replica: str = "",
    ) -> None:  # fmt: skip
        self._database = Database(url, pool_size=pool_size, begins=begins)
        # Half the pool, so that locked rows leave connections for the rest.
        self._wire(
            lane=asyncio.Semaphore(max(1, pool_size // 2)), lease=lease, observe=observe, max_history=max_history,
            replica=replica,
        )  # fmt: skip

    def _wire(
        self, *, lane: asyncio.Semaphore, lease: timedelta, observe: Observe | None, max_history: int, replica: str
    ) -> None:
        """Put a batcher before each operation that takes single items."""

        def batcher(name: str, work: Callable[..., Awaitable[Any]], **options: Any) -> Batcher[Any, Any]:
            async def commit(items: Sequence[Any], waits: bool) -> Any:
                return await self._do(work, items, waits, **options)

            made: Batcher[Any, Any] = Batcher(name, commit, lane=lane, observe=observe)
            self._batchers.append(made)
            return made

        granting: dict[str, Any] = {"lease": lease, "max_history": max_history}
        self._batchers: list[Batcher[Any, Any]] = []
        self._put: Batcher[Put, PutDone | PutRefused | None] = batcher("put", puts.put, replica=replica)
        self._put_locked: Batcher[Put, PutDone | PutRefused] = batcher("put", puts.put_locked, replica=replica)
        self._claim: Batcher[Arrival, Ruling] = batcher("claim", claims.claim, **granting)
        self._create: Batcher[Request, Ruling | None] = batcher("accept", claims.create, lease=lease)
        self._accept: Batcher[Request, Ruling | None] = batcher("accept", claims.accept, **granting)
        self._resume: Batcher[Wake, Ruling] = batcher("resume", claims.resume, **granting)
        self._cancel: Batcher[CancelAsk, Ruling] = batcher("cancel", cancels.cancel)
        self._find: Batcher[TaskId, Task | None] = batcher("find", queries.find_tasks)

    @property
    def place(self) -> str:
        """The address for messages, without its password."""
        return self._database.place

    async def close(self) -> None:
        """Wait for what is in flight, then close the connections."""
        await self._drain()
        await self._database.close()

    async def _drain(self) -> None:
        for batcher in self._batchers:
            await batcher.drain()

    def now(self) -> datetime:
        """The time as this process has it, for what is shown and recorded. Deadlines are Postgres's own affair."""
        return datetime.now(UTC)

    async def ping(self) -> str | None:
        """Reach Postgres and tell the schema's version. Raises StoreUnavailable."""
        return await self._do(schema_version)

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

    async def find_task(self, task_id: TaskId) -> Task | None:
        """A plain look, without a lock."""
        return await self._find.submit(task_id)

    # --- many at once ---

    async def renew(
        self, renewals: Sequence[Renewal], *, lease: timedelta, detaches: bool = False, counted: int = 0
    ) -> Renewed:
        """Move leases on; tasks missing from the answer are not ours any more. `counted` pick-ups are added."""
        return await self._do(sweeps.renew, renewals, lease=lease, detaches=detaches, uncounted=-counted)

    async def give_back(self, renewals: Sequence[Renewal], *, lease: timedelta, detaches: bool) -> None:
        """Leave granted tasks to others once a short lease is over, as if they had never been picked up."""
        await self._do(sweeps.renew, renewals, lease=lease, detaches=detaches, uncounted=1)

    async def hasten_held(self, service: str) -> int:
        """Let the held tasks of a service be tried again now: new code is here, which may fit them."""
        return await self._do(sweeps.hasten_held, service)

    async def hasten_unsent(self, queue: str, *, limit: int = 1000) -> int:
        """Let what waits to be sent to this queue be sent now: it takes messages again. The oldest goes first."""
        return await self._do(sweeps.hasten_unsent, queue, limit=limit)

    async def mark_sent(self, calls: Sequence[CallId]) -> None:
        await self._do(sweeps.mark_sent, calls)

    async def mark_final_sent(self, told: Mapping[TaskId, Sequence[Address]]) -> None:
        """Note that the final replies of these were sent, to these addresses. One whose row has another by now stays
        unsent.
        """
        await self._do(sweeps.mark_final_sent, told)

    async def resend_calls(self, calls: Sequence[CallId], *, after: timedelta) -> None:
        """Have the sweeper send these, as their queue refused them."""
        await self._do(sweeps.resend_calls, calls, after=after)

    async def resend_to(self, task_id: TaskId, address: Address, *, after: timedelta) -> bool:
        """Have the sweeper send a final reply to this address. False: the row takes no more of them."""
        return await self._do(sweeps.resend_to, task_id, address, after=after)

    async def look(self, *, limit: int, again: timedelta) -> LookedAt:
        return await self._do(sweeps.look, limit=limit, again=again)

    async def next_look(self) -> timedelta | None:
        return await self._do(sweeps.next_look)

    async def retire(self, *, limit: int, keep: Retention) -> int:
        return await self._do(sweeps.retire, limit=limit, keep=keep)

    async def repair(self, *, after: UUID, limit: int, quiet: timedelta) -> tuple[int, UUID | None]:
        return await self._do(sweeps.repair, after=after, limit=limit, quiet=quiet)

    async def without_waker(self, *, limit: int = 100) -> list[TaskId]:
        return await self._do(sweeps.without_waker, limit=limit)

    # --- for people ---

    async def list_tasks(
        self, *, service: str | None = None, states: Collection[TaskState] = (), limit: int = 50
    ) -> list[Task]:
        return await self._do(queries.list_tasks, service=service, states=states, limit=limit)

    async def count_tasks(self) -> dict[TaskState, int]:
        return await self._do(queries.count_tasks)

    async def summarise_tasks(
        self, *, service: str | None = None, states: Collection[TaskState] = (), limit: int = 50
    ) -> list[Summary]:
        return await self._do(queries.summarise_tasks, service=service, states=states, limit=limit)

    async def find_ids(self, prefix: str, *, limit: int = 10) -> list[TaskId]:
        return await self._do(queries.find_ids, prefix=prefix, limit=limit)

    async def count_services(self) -> list[ServiceCount]:
        return await self._do(queries.count_services)

    async def find_late(self, *, grace: timedelta) -> list[Late]:
        return await self._do(queries.find_late, grace=grace)

    async def find_unsent(self, *, grace: timedelta) -> list[Backlog]:
        """What waits to be sent for longer than `grace`, by peer; final replies under the peer None."""
        return await self._do(queries.find_unsent, grace=grace)

    async def find_known(self, task_id: TaskId) -> Known:
        """What a task's next run would begin with; empty for a task that no row knows."""
        return (await self._do(load_known, [task_id])).get(task_id, Known())

    async def read_clock(self) -> datetime:
        """The time by the clock that made the rows; this machine's own may be ahead or behind."""
        return await self._do(queries.read_clock)

    async def task_lines(self, task_id: UUID) -> Sequence[Line]:
        return await self._do(queries.task_lines, task_id)

    # --- seals and audits ---

    async def read_unsealed(self, *, limit: int = 100_000, keep: timedelta | None = None) -> Unsealed:
        """What the next seal is to cover; `keep` is how long history is kept, None: for ever."""
        return await self._do(seals.read_unsealed, limit=limit, keep=keep)

    async def add_seal(self, seal: Seal, leaves: Sequence[Leaf]) -> bool:
        """Keep a seal. False: there is one of its number, and this one is nothing."""
        return await self._do(seals.add_seal, seal, leaves)

    async def read_seals(self, *, after: int = 0, limit: int = 1000) -> list[Seal]:
        return await self._do(seals.read_seals, after=after, limit=limit)

    async def read_leaves(self, *, after: int, last: int, limit: int) -> list[tuple[int, Leaf]]:
        return await self._do(seals.read_leaves, after=after, last=last, limit=limit)

    async def read_sinks(self) -> list[SinkMark]:
        return await self._do(seals.read_sinks)

    async def mark_sink(self, sink: str, number: int) -> None:
        await self._do(seals.mark_sink, sink, number)

    async def read_chains(
        self, *, after: tuple[UUID, int], last: UUID = audits.LAST_TASK, sealed: int, limit: int
    ) -> ChainPage:
        """The next entries of all tasks by id and number, with what seals up to `sealed` and rows say of them."""
        return await self._do(audits.read_chains, after=after, last=last, sealed=sealed, limit=limit)

    async def find_entries(self, wanted: EntryFilter, *, limit: int) -> list[FoundEntry]:
        return await self._do(audits.find_entries, wanted=wanted, limit=limit)

    async def count_unchained(self) -> int:
        return await self._do(audits.count_unchained)

    async def find_seal_lag(self) -> SealLag:
        return await self._do(audits.find_seal_lag)

    async def _do(self, work: Callable[..., Awaitable[T]], *args: Any, **options: Any) -> T:
        """Every operation goes this way, in a transaction of its own."""
        return await self._database.transact(lambda connection: work(connection, *args, **options))


OpenStore: TypeAlias = Callable[..., Store]
"""Makes a store for an address, with the keyword options of `Store`."""
