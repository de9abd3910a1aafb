"""A connection for one operation, which is a single statement or a transaction of several.

SQLAlchemy keeps the pool, the statements and the migrations. Executing goes past it: to send one statement of one row
takes it 150 µs of CPU and asyncpg 20.

A round trip is most of what a small operation costs. So a statement that does all of its work at once is sent without
BEGIN and COMMIT; an operation that must look between two of its statements says `begin` first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import cache, partial
from typing import Any, TypeVar

import asyncpg
from sqlalchemy import Connection as CoreConnection
from sqlalchemy import TextClause
from sqlalchemy.dialects.postgresql import asyncpg as dialects
from sqlalchemy.ext.asyncio import AsyncConnection

from coatcheck.points import reach

T = TypeVar("T")

_NOTHING: Mapping[str, Any] = {}
_MOST_DEAD = 8
"""Connections of the pool that are tried in vain; the next error is the caller's to know."""
DRIVER_ERRORS = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
"""All that asyncpg raises of its own; a socket that fails is an OSError."""


_DEAD = (
    OSError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
)
"""What a connection says whose other end is gone, or is going."""


class Row(asyncpg.Record):  # type: ignore[misc]  # asyncpg has no types
    """A row whose columns are attributes too. What reads many of them unpacks them in their order."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Connection:
    """What an operation sends its statements through.

    `may_have_committed` tells whether a failure leaves a doubt: true from the moment something was sent that commits.
    """

    def __init__(self, pooled: AsyncConnection) -> None:
        self._pooled = pooled
        self._driver: Any = None
        self._transaction: Any = None
        self._is_used = False
        self.may_have_committed = False

    async def open(self) -> None:
        """Take a connection out of the pool that is not known to be dead: after a restart, all that lie there are."""
        for _ in range(_MOST_DEAD):
            self._driver = (await self._pooled.get_raw_connection()).driver_connection
            if not self._driver.is_closed():
                return
            await self._pooled.invalidate()
        self._driver = (await self._pooled.get_raw_connection()).driver_connection

    async def begin(self) -> None:
        """Begin a transaction. Comes before any statement."""
        self._transaction = await self._on_a_live_one(self._begin)

    async def _begin(self) -> Any:
        transaction = self._driver.transaction()
        await transaction.start()
        return transaction

    async def read(self, statement: TextClause, values: Mapping[str, Any] = _NOTHING) -> list[Any]:
        """Execute a statement that commits nothing: one that only reads, or is part of a transaction."""
        if self._is_used:
            return await self._fetch(statement, values)
        return await self._on_a_live_one(partial(self._fetch, statement, values))

    async def _on_a_live_one(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do what an operation begins with. It has changed nothing yet; so where the connection proves dead, the next
        one will do.
        """
        self._is_used = True
        for _ in range(_MOST_DEAD):
            try:
                return await work()
            except (*DRIVER_ERRORS, OSError) as error:
                if isinstance(error, TimeoutError) or not isinstance(error, _DEAD):
                    raise
                await self._pooled.invalidate()
                await self.open()
        return await work()

    async def _fetch(self, statement: TextClause, values: Mapping[str, Any]) -> list[Any]:
        sql, names = _compiled(statement)
        found: list[Any] = await self._driver.fetch(sql, *[values[name] for name in names], record_class=Row)
        return found

    async def execute(self, statement: TextClause, values: Mapping[str, Any] = _NOTHING) -> list[Any]:
        """Execute a statement and give its rows. Outside a transaction it commits by itself."""
        if self._transaction is not None:
            return await self.read(statement, values)
        reach("before_commit")
        self._is_used = self.may_have_committed = True
        found = await self._fetch(statement, values)
        reach("after_commit")
        return found

    async def scalar(self, statement: TextClause, values: Mapping[str, Any] = _NOTHING) -> Any:
        """The first column of the first row that is read, or None."""
        found = await self.read(statement, values)
        return found[0][0] if found else None

    async def run_sync(self, work: Callable[[CoreConnection], T]) -> T:
        """Let something do its work on SQLAlchemy's connection, in a savepoint of this transaction."""
        result = await self._pooled.run_sync(work)
        await self._pooled.commit()
        return result

    async def finish(self) -> None:
        """Commit, if a transaction was begun."""
        if self._transaction is not None:
            reach("before_commit")
            self.may_have_committed = True
            await self._transaction.commit()
            reach("after_commit")

    async def abandon(self, error: BaseException) -> None:
        """Undo it. A connection that may be broken, or not listening, is dropped: Postgres undoes it by itself."""
        is_broken = isinstance(error, OSError | asyncpg.InterfaceError | asyncpg.InternalClientError)
        is_sound = not is_broken and not self._driver.is_closed()
        try:
            if is_sound and self._transaction is not None:
                await self._transaction.rollback()
        except (*DRIVER_ERRORS, OSError):
            is_sound = False
        if not is_sound:
            await self._pooled.invalidate()


@cache
def _compiled(statement: TextClause) -> tuple[str, tuple[str, ...]]:
    """The text with $1, $2, … for its values, and their names in that order."""
    compiled: Any = statement.compile(dialect=dialects.dialect())  # type: ignore[no-untyped-call]
    return str(compiled), tuple(compiled.positiontup or ())
