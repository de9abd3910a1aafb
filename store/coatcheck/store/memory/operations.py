"""The port on plain Python rows: each operation is a function of `Tables`, and is done whole or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from datetime import datetime
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from coatcheck.store.batcher import LANE_WIDTH
from coatcheck.store.in_flight import InFlight
from coatcheck.store.memory import claims, orders, puts, queries, seals, sweeps
from coatcheck.store.memory.tables import Tables
from coatcheck.store.versions import newest_version

P = ParamSpec("P")
T = TypeVar("T")

_VERSION = newest_version()


class Transact(Protocol):
    def __call__(self, work: Callable[[Tables], T]) -> Awaitable[T]: ...


def operation(
    work: Callable[Concatenate[Tables, P], T],
) -> Callable[Concatenate[MemoryOperations, P], Coroutine[Any, Any, T]]:
    """A method that does `work` on the tables, all of it or nothing."""

    def run(self: MemoryOperations, /, *args: P.args, **options: P.kwargs) -> Coroutine[Any, Any, T]:
        return self.do(lambda tables: tables.atomically(lambda rows: work(rows, *args, **options)))

    return run


class MemoryOperations:
    """`Operations` of one replica, over tables that it may share with others."""

    lane_width = LANE_WIDTH
    place = "memory"

    def __init__(self, tables: Tables, *, transact: Transact | None = None) -> None:
        """`transact` is the only way to the tables; a test makes it slow, or lets it fail."""
        self.tables = tables
        self._in_flight = InFlight()
        self._through = transact or self.transact

    def now(self) -> datetime:
        return self.tables.clock()

    async def close(self) -> None:
        await self._in_flight.drain()

    async def do(self, work: Callable[[Tables], T]) -> T:
        async def run() -> T:
            return await self._through(work)

        return await self._in_flight.shield(run())

    async def transact(self, work: Callable[[Tables], T]) -> T:
        """Do one operation. What is awaited here is the network."""
        await asyncio.sleep(0)
        result = work(self.tables)
        await asyncio.sleep(0)
        return result

    schema_version = operation(lambda tables: _VERSION)
    put = operation(puts.put)
    put_locked = operation(puts.put_locked)
    claim = operation(claims.claim)
    create = operation(claims.create)
    accept = operation(claims.accept)
    resume = operation(claims.resume)
    cancel = operation(claims.cancel)
    order = operation(orders.order)
    find_for_order = operation(orders.find_for_order)
    find_tasks = operation(queries.find_tasks)
    renew = operation(sweeps.renew)
    hasten_held = operation(sweeps.hasten_held)
    hasten_unsent = operation(sweeps.hasten_unsent)
    mark_sent = operation(sweeps.mark_sent)
    mark_final_sent = operation(sweeps.mark_final_sent)
    resend_calls = operation(sweeps.resend_calls)
    resend_to = operation(sweeps.resend_to)
    look = operation(sweeps.look)
    next_look = operation(sweeps.next_look)
    retire = operation(sweeps.retire)
    forget_histories = operation(sweeps.forget_histories)
    repair = operation(sweeps.repair)
    without_waker = operation(sweeps.without_waker)
    load_known = operation(queries.load_known)
    list_tasks = operation(queries.list_tasks)
    summarise_tasks = operation(queries.summarise_tasks)
    find_ids = operation(queries.find_ids)
    count_tasks = operation(queries.count_tasks)
    count_services = operation(queries.count_services)
    find_late = operation(queries.find_late)
    find_unsent = operation(queries.find_unsent)
    read_clock = operation(lambda tables: tables.now)
    task_lines = operation(queries.task_lines)
    read_history = operation(queries.read_history)
    read_stored = operation(queries.read_stored)
    read_unsealed = operation(seals.read_unsealed)
    add_seal = operation(seals.add_seal)
    read_seals = operation(seals.read_seals)
    read_leaves = operation(seals.read_leaves)
    read_sinks = operation(seals.read_sinks)
    mark_sink = operation(seals.mark_sink)
    read_chains = operation(seals.read_chains)
    find_entries = operation(seals.find_entries)
    count_unchained = operation(seals.count_unchained)
    find_seal_lag = operation(seals.find_seal_lag)
