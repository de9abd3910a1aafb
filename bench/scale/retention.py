"""Whether finished rows are removed as fast as new ones come, and what that leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import time
from datetime import timedelta

from bench.scale.fill import sizes
from bench.scale.lifecycles import Lives
from bench.scale.report import Line, ratio
from bench.scale.rig import Rig

from coatcheck.store import Store
from coatcheck.store.views import Retention

AT_ONCE = Retention(timedelta(), timedelta())

VACUUM_EVERY_S = 5.0
ROWS_EACH = 5
_DEAD = """
    SELECT sum(n_dead_tup)::bigint AS dead, sum(n_live_tup)::bigint AS live FROM pg_stat_user_tables
     WHERE schemaname = 'coatcheck'
"""


class Cleaner:
    """Vacuums as autovacuum would, for servers whose autovacuum runs only once a minute or is off."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.dead: list[int] = []

    async def run(self, is_over: asyncio.Event) -> None:
        while not is_over.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(VACUUM_EVERY_S):
                    await is_over.wait()
            await self.vacuum()

    async def vacuum(self) -> None:
        found = await self.rig.sql.fetchrow(_DEAD)
        self.dead.append(found["dead"])
        await self.rig.sql.execute("VACUUM coatcheck.task, coatcheck.call, coatcheck.journal")


async def retention_lines(rig: Rig, *, count: int) -> list[Line]:
    """Finish tasks whose retention ends at once, and retire them meanwhile; then repeat it, and compare."""
    store, sweeping = Store(rig.store), Store(rig.store, pool_size=1)
    lives = Lives(store, keep=timedelta())
    cleaner = Cleaner(rig)
    try:
        await lives.run(count, width=100)
        alone = await _retire_all(sweeping)
        await cleaner.vacuum()
        rounds = [await _round(lives, sweeping, cleaner, count=count) for _ in range(3)]
    finally:
        await store.close()
        await sweeping.close()
    finished, able, left = (sum(each[place] for each in rounds) / len(rounds) for place in range(3))
    levels = [each[3] for each in rounds]
    return [
        Line("retire alone", alone * ROWS_EACH, "rows/s", note=f"{alone:.0f} tasks/s"),
        Line("retiring / finishing, both at once", ratio(able, finished), "x", target=1, least=True,
             note=f"{able:.0f} / {finished:.0f} tasks/s; {left:.0f} of {count} left when the last had finished"),
        Line("tables after the third round / the second", ratio(levels[2], levels[1]), "x", target=1.1,
             note=", ".join(f"{level / 1e6:.1f} MB" for level in levels)),
        Line("dead rows before a vacuum, most", max(cleaner.dead), "", note=f"vacuumed every {VACUUM_EVERY_S:.0f} s"),
    ]  # fmt: skip


async def _retire_all(store: Store) -> float:
    begun, gone = time.perf_counter(), 0
    while number := await store.retire(limit=1000, keep=AT_ONCE):
        gone += number
    return gone / (time.perf_counter() - begun)


async def _round(lives: Lives, sweeping: Store, cleaner: Cleaner, *, count: int) -> tuple[float, float, int, int]:
    """Tasks finished a second; retired a second of retiring, meanwhile; left over; bytes of the tables at the end."""
    is_over = asyncio.Event()
    gone, busy_s = 0, 0.0

    async def retire() -> None:
        nonlocal gone, busy_s
        while not is_over.is_set():
            begun = time.perf_counter()
            number = await sweeping.retire(limit=1000, keep=AT_ONCE)
            if number:
                gone += number
                busy_s += time.perf_counter() - begun
            await asyncio.sleep(0.05)

    begun = time.perf_counter()
    others = [asyncio.create_task(retire()), asyncio.create_task(cleaner.run(is_over))]
    await lives.run(count, width=100)
    finished = count / (time.perf_counter() - begun)
    left = count - gone
    is_over.set()
    await asyncio.gather(*others)
    await _retire_all(sweeping)
    await cleaner.vacuum()
    return finished, ratio(gone, busy_s), left, sum((await sizes(cleaner.rig.sql)).values())
