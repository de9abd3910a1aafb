"""A transaction on the driver's own connection.

SQLAlchemy keeps the pool, the statements and the migrations. Executing goes past it: to send one statement of one row
takes it 150 µs of CPU and asyncpg 20, and a checkpoint is eight of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

import asyncpg
from sqlalchemy import Connection as CoreConnection
from sqlalchemy import TextClause
from sqlalchemy.dialects.postgresql import asyncpg as dialects
from sqlalchemy.ext.asyncio import AsyncConnection

T = TypeVar("T")

_NOTHING: Mapping[str, Any] = {}
_MOST_DEAD = 8
"""Connections of the pool that are tried in vain; the next error is the caller's to know."""
DRIVER_ERRORS = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
"""All that asyncpg raises of its own; a socket that fails is an OSError."""


class Row(asyncpg.Record):  # type: ignore[misc]  # asyncpg has no types
    """A row whose columns are attributes."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Connection:
    """A transaction, from `begin` to `commit` or `abandon`."""

    def __init__(self, pooled: AsyncConnection, driver: Any) -> None:
        self._pooled = pooled
        self._driver = driver
        self._transaction: Any = None

    async def begin(self) -> None:
        self._transaction = self._driver.transaction()
        await self._transaction.start()

    async def execute(self, statement: TextClause, values: Mapping[str, Any] = _NOTHING) -> list[Any]:
        """Execute a statement and give its rows."""
        sql, names = _compiled(statement)
        found: list[Any] = await self._driver.fetch(sql, *[values[name] for name in names], record_class=Row)
        return found

    async def scalar(self, statement: TextClause, values: Mapping[str, Any] = _NOTHING) -> Any:
        """The first column of the first row, or None."""
        found = await self.execute(statement, values)
        return found[0][0] if found else None

    async def run_sync(self, work: Callable[[CoreConnection], T]) -> T:
        """Let something do its work on SQLAlchemy's connection, in a savepoint of this transaction."""
        result = await self._pooled.run_sync(work)
        await self._pooled.commit()
        return result

    async def commit(self) -> None:
        await self._transaction.commit()

    async def abandon(self, error: BaseException) -> None:
        """Undo it. A connection that may be broken, or not listening, is dropped: Postgres undoes it by itself."""
        is_broken = isinstance(error, OSError | asyncpg.InterfaceError | asyncpg.InternalClientError)
        is_sound = not is_broken and not self._driver.is_closed()
        try:
            if is_sound:
                await self._transaction.rollback()
        except (*DRIVER_ERRORS, OSError):
            is_sound = False
        if not is_sound:
            await self._pooled.invalidate()


async def begin(pooled: AsyncConnection) -> Connection:
    """Begin a transaction on the first connection that works: after a restart, all that lie in the pool are dead."""
    dead_count = 0
    while True:
        connection = Connection(pooled, (await pooled.get_raw_connection()).driver_connection)
        try:
            await connection.begin()
        except (*DRIVER_ERRORS, OSError) as error:
            await pooled.invalidate()
            dead_count += 1
            if isinstance(error, TimeoutError) or dead_count > _MOST_DEAD:
                raise
        else:
            return connection


@cache
def _compiled(statement: TextClause) -> tuple[str, tuple[str, ...]]:
    """The text with $1, $2, … for its values, and their names in that order."""
    compiled: Any = statement.compile(dialect=dialects.dialect())  # type: ignore[no-untyped-call]
    return str(compiled), tuple(compiled.positiontup or ())
