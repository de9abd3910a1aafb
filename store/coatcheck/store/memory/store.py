"""`Store` on plain Python rows: the same batchers and methods, with operations that take `Tables` for a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, TypeVar

from coatcheck.store.batcher import LANE_WIDTH, Observe
from coatcheck.store.memory import claims, puts, queries, seals, sweeps
from coatcheck.store.memory.tables import Tables
from coatcheck.store.migrate import newest_version, schema_version
from coatcheck.store.postgres import audits as pg_audits
from coatcheck.store.postgres import cancels as pg_cancels
from coatcheck.store.postgres import claims as pg_claims
from coatcheck.store.postgres import puts as pg_puts
from coatcheck.store.postgres import queries as pg_queries
from coatcheck.store.postgres import records as pg_records
from coatcheck.store.postgres import seals as pg_seals
from coatcheck.store.postgres import sweeps as pg_sweeps
from coatcheck.store.postgres.in_flight import InFlight
from coatcheck.store.postgres.store import Store
from coatcheck.store.rows import MAX_HISTORY

T = TypeVar("T")

_VERSION = newest_version()

OPERATIONS: Mapping[Callable[..., Any], Callable[..., Any]] = MappingProxyType(
    {
        pg_puts.put: puts.put,
        pg_puts.put_locked: puts.put,
        pg_claims.claim: claims.claim,
        pg_claims.create: claims.create,
        pg_claims.accept: claims.accept,
        pg_claims.resume: claims.resume,
        pg_cancels.cancel: claims.cancel,
        pg_sweeps.renew: sweeps.renew,
        pg_sweeps.hasten_held: sweeps.hasten_held,
        pg_sweeps.hasten_unsent: sweeps.hasten_unsent,
        pg_sweeps.mark_sent: sweeps.mark_sent,
        pg_sweeps.mark_final_sent: sweeps.mark_final_sent,
        pg_sweeps.resend_calls: sweeps.resend_calls,
        pg_sweeps.resend_to: sweeps.resend_to,
        pg_sweeps.look: sweeps.look,
        pg_sweeps.next_look: sweeps.next_look,
        pg_sweeps.retire: sweeps.retire,
        pg_sweeps.repair: sweeps.repair,
        pg_sweeps.without_waker: sweeps.without_waker,
        pg_queries.find_tasks: queries.find_tasks,
        pg_queries.list_tasks: queries.list_tasks,
        pg_queries.summarise_tasks: queries.summarise_tasks,
        pg_queries.find_ids: queries.find_ids,
        pg_queries.count_tasks: queries.count_tasks,
        pg_queries.count_services: queries.count_services,
        pg_queries.find_late: queries.find_late,
        pg_queries.find_unsent: queries.find_unsent,
        pg_queries.read_clock: lambda tables: tables.now,
        pg_queries.task_lines: queries.task_lines,
        pg_records.load_known: queries.load_known,
        pg_seals.read_unsealed: seals.read_unsealed,
        pg_seals.add_seal: seals.add_seal,
        pg_seals.read_seals: seals.read_seals,
        pg_seals.read_leaves: seals.read_leaves,
        pg_seals.read_sinks: seals.read_sinks,
        pg_seals.mark_sink: seals.mark_sink,
        pg_audits.read_chains: seals.read_chains,
        pg_audits.find_entries: seals.find_entries,
        pg_audits.count_unchained: seals.count_unchained,
        pg_audits.find_seal_lag: seals.find_seal_lag,
        schema_version: lambda tables: _VERSION,
    }
)
"""What does here what the other does on a connection to Postgres."""


class MemoryStore(Store):
    """One replica's store over tables that it may share with others."""

    def __init__(
        self, tables: Tables, *, lease: timedelta = timedelta(seconds=60), observe: Observe | None = None,
        begins: bool = False, max_history: int = MAX_HISTORY, replica: str = "",
    ) -> None:  # fmt: skip
        """`begins` makes no difference here: an operation is one step, and there is nothing to be in doubt about."""
        self.tables = tables
        self._in_flight = InFlight()
        self._wire(
            lane=asyncio.Semaphore(LANE_WIDTH), lease=lease, observe=observe, max_history=max_history, replica=replica
        )

    @property
    def place(self) -> str:
        return "memory"

    def now(self) -> datetime:
        return self.tables.clock()

    async def close(self) -> None:
        """Wait for what is in flight."""
        await self._drain()
        await self._in_flight.drain()

    async def _do(self, work: Callable[..., Awaitable[T]], *args: Any, **options: Any) -> T:
        operation: Callable[..., T] = OPERATIONS[work]

        def atomic(tables: Tables) -> T:
            return tables.atomically(lambda rows: operation(rows, *args, **options))

        return await self._in_flight.shield(self._transact(atomic))

    async def _transact(self, work: Callable[[Tables], T]) -> T:
        """Do one operation, all of it or nothing. The only way to the tables; what is awaited here is the network."""
        await asyncio.sleep(0)
        result = work(self.tables)
        await asyncio.sleep(0)
        return result
