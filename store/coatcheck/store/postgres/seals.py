"""Making seals: what the next one is to cover, its insertion, and what sinks have of it.

Reading and inserting are two transactions, and the tree is built between them, so that none is open meanwhile. What is
read does not change: only history of transactions that have all ended is covered. The number decides between two
sweepers: it is the primary key, and the second insertion does nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from coatcheck.store.postgres.connection import Connection, Row
from coatcheck.store.postgres.database import columns, rows
from coatcheck.store.postgres.sql import STATEMENTS
from coatcheck.store.seals import Leaf, Seal, SinkMark, Unsealed

_LAST_XID = 2**64 - 1


async def read_unsealed(connection: Connection, *, limit: int, keep: timedelta | None = None) -> Unsealed:
    """What the next seal is to cover: up to about `limit` entries, for the rest comes with the one after.

    `keep` moves `trimmed_to` on: to the newest seal that is older.
    """
    await connection.begin()
    newest = await rows(connection, STATEMENTS["newest_seal"])
    last = seal_of_row(newest[0]) if newest else None
    (at,) = await rows(connection, STATEMENTS["seal_horizon"])
    floor, ceiling = last.horizon if last else 0, at["horizon"]
    horizon = ceiling
    if floor > ceiling:
        # The rows came here from another server, whose transactions had higher numbers. Cover all there is.
        floor, ceiling = 0, _LAST_XID
    else:
        ceiling = horizon = await _cut(connection, floor, ceiling, limit)
    found = await rows(connection, STATEMENTS["unsealed_leaves"], floor=floor, ceiling=ceiling)
    oldest = await connection.scalar(STATEMENTS["oldest_unsealed"], {"floor": floor})
    trimmed_to = last.trimmed_to if last else 0
    if keep is not None:
        values = {"after": trimmed_to, "keep_s": keep.total_seconds()}
        trimmed_to = await connection.scalar(STATEMENTS["seal_before"], values) or trimmed_to
    leaves = tuple([Leaf(row["task_id"], row["number"], row["hash"]) for row in found])
    return Unsealed(last, at["now"], horizon, found[0]["entry_count"] if found else 0, leaves, trimmed_to, oldest)


async def _cut(connection: Connection, floor: int, ceiling: int, limit: int) -> int:
    """Where to end, so that about `limit` entries are covered; always behind at least one whole transaction."""
    values = {"floor": floor, "ceiling": ceiling}
    cut = await connection.scalar(STATEMENTS["unsealed_cut"], values | {"limit": limit})
    if cut is None:
        return ceiling
    first: int = await connection.scalar(STATEMENTS["unsealed_cut"], values | {"limit": 0})
    return int(cut) if cut > first else first + 1


async def add_seal(connection: Connection, seal: Seal, leaves: Sequence[Leaf]) -> bool:
    """Insert a seal with its leaves. False: another sweeper has made the seal of this number."""
    leaf_columns = columns(
        ("l_task_id", "l_entry_count", "l_head"), [(it.task_id, it.entry_count, it.head) for it in leaves]
    )
    values = {name: getattr(seal, name) for name in seal.__struct_fields__}
    return bool(await connection.execute(STATEMENTS["add_seal"], values | leaf_columns))


async def read_seals(connection: Connection, *, after: int, limit: int) -> list[Seal]:
    """The seals behind this number, in order."""
    return [seal_of_row(row) for row in await rows(connection, STATEMENTS["seals_after"], after=after, limit=limit)]


async def read_leaves(connection: Connection, *, after: int, last: int, limit: int) -> list[tuple[int, Leaf]]:
    """The leaves of the seals behind `after` up to `last`, each with the seal's number, in the order of the trees."""
    found = await rows(connection, STATEMENTS["leaves_between"], after=after, last=last, limit=limit)
    return [(row["seal"], Leaf(row["task_id"], row["entry_count"], row["head"])) for row in found]


async def read_sinks(connection: Connection) -> list[SinkMark]:
    return [
        SinkMark(row["sink"], row["number"], row["written_at"]) for row in await rows(connection, STATEMENTS["sinks"])
    ]


async def mark_sink(connection: Connection, sink: str, number: int) -> None:
    """Note that a sink has all seals up to this one."""
    await connection.execute(STATEMENTS["mark_sink"], {"sink": sink, "number": number})


def seal_of_row(row: Row) -> Seal:
    return Seal(
        number=row["number"],
        sealed_at=row["sealed_at"],
        horizon=row["horizon"],
        task_count=row["task_count"],
        entry_count=row["entry_count"],
        root=row["root"],
        previous=row["previous"],
        trimmed_to=row["trimmed_to"],
        key_id=row["key_id"],
        signature=row["signature"],
        token=row["token"],
    )
