"""How the size of the tables affects the statements that run on them."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

import asyncpg
from bench.scale.fill import Copies, sizes, spread
from bench.scale.report import Line, indexes_of, percentile, ratio, reads_whole_tables
from bench.scale.rig import Rig
from sqlalchemy import TextClause

from coatcheck.store import CallState, Store, TaskState, encode
from coatcheck.store.postgres.sql import STATEMENTS
from coatcheck.store.postgres.sweeps import RETIRE_TASKS
from coatcheck.store.rows import Arrival, CallId, Verdict
from coatcheck.store.views import Retention

REPLY = encode({"text": "x" * 100})
QUIET = timedelta()
FOR_LONG = Retention(timedelta(days=1), timedelta(days=1))
_BLOCK = 50


async def size_lines(rig: Rig, copies: Copies) -> list[Line]:
    found = await sizes(rig.sql)
    whole = sum(found.values())
    parts = [
        Line(f"  {name}", size / copies.task_count, "B") for name, size in found.items() if size > copies.task_count
    ]
    return [Line("bytes per parked task", whole / copies.task_count, "B", target=2560), *parts]


async def claim_lines(big: Rig, copies: Copies, small: Rig, few: Copies, *, count: int) -> list[Line]:
    """One claim at a time, on calls all over the tables. Big and small take turns, so that noise affects both."""
    calls = {
        "big": await copies.call_ids(big.sql, spread(count, copies.task_count), 1),
        "small": await few.call_ids(small.sql, spread(count, few.task_count), 1),
    }
    stores = {"big": Store(big.store), "small": Store(small.store)}
    taken: dict[str, list[float]] = {"big": [], "small": []}
    try:
        for name, store in stores.items():  # connect, prepare
            await _claim(store, (await (copies if name == "big" else few).call_ids(
                (big if name == "big" else small).sql, [1, 2, 3], 2)))  # fmt: skip
        for first in range(0, count, _BLOCK):
            for name, store in stores.items():
                taken[name] += await _claim(store, calls[name][first : first + _BLOCK])
    finally:
        for store in stores.values():
            await store.close()
    p50, p99 = ({name: percentile(each, share) for name, each in taken.items()} for share in (0.5, 0.99))
    return [
        Line("claim p50, many parked / few", ratio(p50["big"], p50["small"]), "x", note=_pair(p50)),
        Line("claim p99, many parked / few", ratio(p99["big"], p99["small"]), "x", target=2, note=_pair(p99)),
    ]


def _pair(taken: dict[str, float]) -> str:
    return f"{taken['big']:.1f} / {taken['small']:.1f} ms"


async def _claim(store: Store, ids: Sequence[UUID]) -> list[float]:
    taken = []
    for one in ids:
        begun = time.perf_counter()
        ruling = await store.claim(Arrival(CallId(one), CallState.OK, REPLY))
        taken.append((time.perf_counter() - begun) * 1000)
        if ruling.verdict is not Verdict.RECORDED:
            raise SystemExit(f"a copied call was {ruling.verdict}")
    return taken


async def look_lines(big: Rig, small: Rig) -> list[Line]:
    """What the sweeper asks all the time. Big and small take turns here, too."""
    again = timedelta(seconds=30)
    stores = {"big": Store(big.store, pool_size=2), "small": Store(small.store, pool_size=2)}
    lines = []
    try:
        for name, ask, statements in (
            ("next due time", lambda store: store.next_look(), (STATEMENTS["next_look"],)),
            (
                "look, nothing due",
                lambda store: store.look(limit=1000, again=again),
                (STATEMENTS["calls_to_look_at"], STATEMENTS["tasks_to_look_at"]),
            ),
            (
                "retire, nothing to go",
                lambda store: store.retire(limit=1000, keep=FOR_LONG),
                tuple(RETIRE_TASKS.values()),
            ),
        ):
            taken: dict[str, list[float]] = {"big": [], "small": []}
            for number in range(10):
                for which, store in stores.items():
                    found = await _time(lambda ask=ask, store=store: ask(store), times=20)  # type: ignore[misc]
                    taken[which] += found[1:] if number == 0 else found
            p50, p99 = ({key: percentile(each, share) for key, each in taken.items()} for share in (0.5, 0.99))
            plan = await _plan(big.sql, *statements)
            lines += [
                Line(f"{name}, p50", p50["big"], "ms", target=5, note=plan),
                Line("  p99, many parked / few", ratio(p99["big"], p99["small"]), "x", target=2, note=_pair(p99)),
            ]
    finally:
        for store in stores.values():
            await store.close()
    return lines


async def people_lines(rig: Rig) -> list[Line]:
    """Queries that run now and then, and may read a whole table."""
    store = Store(rig.store, pool_size=2)
    after = UUID(int=1 << 127)
    try:
        return [
            Line(f"{name}, p50", percentile(await _time(ask, times=times), 0.5), "ms", note=note)
            for name, ask, times, note in (
                ("repair, a slice of 1,000", lambda: store.repair(after=after, limit=1000, quiet=QUIET), 20, "sweeper"),
                ("count_tasks", store.count_tasks, 3, "sweeper, once in N / 1,000 s"),
                ("tasks without a waker, all", store.without_waker, 1, "doctor"),
                ("find_late", lambda: store.find_late(grace=timedelta(minutes=1)), 3, "doctor"),
                ("newest 50", lambda: store.summarise_tasks(limit=50), 3, "ps"),
                ("newest 50 held", lambda: store.summarise_tasks(states=[TaskState.HELD], limit=50), 3, "ps"),
                ("list_tasks, newest 50", lambda: store.list_tasks(limit=50), 3, "client"),
            )
        ]
    finally:
        await store.close()


async def _time(ask: Callable[[], Awaitable[Any]], *, times: int) -> list[float]:
    taken = []
    for _ in range(times):
        begun = time.perf_counter()
        await ask()
        taken.append((time.perf_counter() - begun) * 1000)
    return taken


async def _plan(sql: asyncpg.Connection, *statements: TextClause) -> str:
    plans = []
    for statement in statements:
        text = statement.text
        for name, value in (("limit", "1000"), ("again_s", "30"), ("keep_s", "86400")):
            text = re.sub(rf":{name}\b", value, text)
        plans.append("\n".join(row[0] for row in await sql.fetch(f"EXPLAIN {text}")))
    if any(reads_whole_tables(plan) for plan in plans):
        return "reads a whole table"
    return ", ".join(sorted(set.union(*(indexes_of(plan) for plan in plans))))
