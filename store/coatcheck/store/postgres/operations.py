"""The port on Postgres: each operation is a function of a connection, and runs in a transaction of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from datetime import UTC, datetime
from typing import Any, Concatenate, ParamSpec, TypeVar

from coatcheck.store.migrate import schema_version as version_of_tables
from coatcheck.store.postgres import audits, cancels, claims, histories, orders, puts, queries, records, seals, sweeps
from coatcheck.store.postgres.connection import Connection
from coatcheck.store.postgres.database import Database

P = ParamSpec("P")
T = TypeVar("T")


def operation(
    work: Callable[Concatenate[Connection, P], Awaitable[T]],
) -> Callable[Concatenate[PostgresOperations, P], Coroutine[Any, Any, T]]:
    """A method that does `work` in a transaction."""

    def run(self: PostgresOperations, /, *args: P.args, **options: P.kwargs) -> Coroutine[Any, Any, T]:
        return self.database.transact(lambda connection: work(connection, *args, **options))

    return run


class PostgresOperations:
    """`Operations` through one pool of connections."""

    def __init__(self, url: str, *, pool_size: int = 8, begins: bool = False) -> None:
        self.database = Database(url, pool_size=pool_size, begins=begins)
        # Half the pool, so that locked rows leave connections for the rest.
        self.lane_width = max(1, pool_size // 2)

    @property
    def place(self) -> str:
        return self.database.place

    def now(self) -> datetime:
        return datetime.now(UTC)

    async def close(self) -> None:
        await self.database.close()

    schema_version = operation(version_of_tables)
    put = operation(puts.put)
    put_locked = operation(puts.put_locked)
    claim = operation(claims.claim)
    create = operation(claims.create)
    accept = operation(claims.accept)
    resume = operation(claims.resume)
    cancel = operation(cancels.cancel)
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
    load_known = operation(records.load_known)
    list_tasks = operation(queries.list_tasks)
    summarise_tasks = operation(queries.summarise_tasks)
    find_ids = operation(queries.find_ids)
    count_tasks = operation(queries.count_tasks)
    count_services = operation(queries.count_services)
    find_late = operation(queries.find_late)
    find_unsent = operation(queries.find_unsent)
    read_clock = operation(queries.read_clock)
    task_lines = operation(queries.task_lines)
    read_history = operation(histories.read_history)
    read_stored = operation(queries.read_stored)
    read_unsealed = operation(seals.read_unsealed)
    add_seal = operation(seals.add_seal)
    read_seals = operation(seals.read_seals)
    read_leaves = operation(seals.read_leaves)
    read_sinks = operation(seals.read_sinks)
    mark_sink = operation(seals.mark_sink)
    read_chains = operation(audits.read_chains)
    find_entries = operation(audits.find_entries)
    count_unchained = operation(audits.count_unchained)
    find_seal_lag = operation(audits.find_seal_lag)
