"""Connections to Postgres, and what one operation does on one: a single statement, or a transaction of several.

SQLAlchemy opens and closes connections and runs the migrations on them. All else goes past it: to send one statement of
one row takes it 150 µs of CPU and asyncpg 20, and to lend a connection and take it back another 130.

A round trip is most of what a small operation costs. So a statement that does all of its work at once is sent without
BEGIN and COMMIT; an operation that must look between two of its statements says `begin` first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import asyncpg
from sqlalchemy import Connection as CoreConnection
from sqlalchemy import TextClause, text
from sqlalchemy.dialects.postgresql import asyncpg as dialects
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from coatcheck import search_path
from coatcheck.points import reach

T = TypeVar("T")

_NOTHING: Mapping[str, Any] = {}
_SURVEY = text("SET LOCAL enable_seqscan = on")
_MOST_DEAD = 8
"""Connections of the pool that are tried in vain; the next error is the caller's to know."""
DRIVER_ERRORS = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
"""All that asyncpg raises of its own; a socket that fails is an OSError."""


_DEAD = (
    OSError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
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


class Link(NamedTuple):
    """An open connection as SQLAlchemy and as the driver have it."""

    core: AsyncConnection
    driver: Any

    async def drop(self) -> None:
        await self.core.invalidate()
        await self.core.close()


class Pool:
    """Open connections that are not in use, and a bound on all there are. The one used last is lent first."""

    def __init__(self, engine: AsyncEngine, size: int) -> None:
        self._engine = engine
        self._idle: list[Link] = []
        self._free = asyncio.Semaphore(size)

    @asynccontextmanager
    async def lend(self, *, timeout_s: float) -> AsyncIterator[Connection]:
        """A connection for one operation. Raises PoolTimeout if none becomes free in time."""
        try:
            async with asyncio.timeout(timeout_s if self._free.locked() else None):
                await self._free.acquire()
        except TimeoutError:
            raise PoolTimeout from None
        try:
            connection = Connection(self, await self.open())
            try:
                yield connection
            finally:
                if connection.link is not None:
                    self._idle.append(connection.link)
        finally:
            self._free.release()

    async def open(self) -> Link:
        """A connection that is not known to be dead: after a restart, all that lie here are."""
        while self._idle:
            link = self._idle.pop()
            if not link.driver.is_closed():
                return link
            await link.drop()
        core = await self._engine.connect()
        try:
            driver: Any = (await core.get_raw_connection()).driver_connection
            search_path.check(await driver.fetchval(search_path.SHOW))
            await driver.reset_type_codec(
                "jsonb", schema="pg_catalog"
            )  # text will do; SQLAlchemy would have it decoded
        except BaseException:
            await Link(core, None).drop()
            raise
        return Link(core, driver)

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop().core.close()
        await self._engine.dispose()


class PoolTimeout(Exception):
    """All connections are in use, and none came back in time."""


class Connection:
    """What an operation sends its statements through.

    `may_have_committed` tells whether a failure leaves a doubt: true from the moment something was sent that commits;
    `has_committed`, once it is in.
    """

    def __init__(self, pool: Pool, link: Link) -> None:
        self._pool = pool
        self.link: Link | None = link  # None: it was dropped
        self._driver: Any = link.driver
        self._transaction: Any = None
        self._is_used = False
        self.may_have_committed = False
        self.has_committed = False

    async def begin(self) -> None:
        """Begin a transaction, unless one is begun. Comes before any statement."""
        if self._transaction is None:
            self._transaction = await self._on_a_live_one(self._begin)

    async def begin_survey(self) -> None:
        """Begin a transaction in which a whole table may be read, which the settings of a connection rule out."""
        await self.begin()
        await self.read(_SURVEY)

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
                await self._drop()
                self.link = await self._pool.open()
                self._driver = self.link.driver
        return await work()

    async def _drop(self) -> None:
        link, self.link = self.link, None
        if link is not None:
            await link.drop()

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
        self.has_committed = True
        reach("after_commit")
        return found

    async def scalar(self, statement: TextClause, values: Mapping[str, Any] = _NOTHING) -> Any:
        """The first column of the first row that is read, or None."""
        found = await self.read(statement, values)
        return found[0][0] if found else None

    async def run_sync(self, work: Callable[[CoreConnection], T]) -> T:
        """Let something do its work on SQLAlchemy's connection, in a savepoint of this transaction."""
        assert self.link is not None
        result = await self.link.core.run_sync(work)
        await self.link.core.commit()
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
            await self._drop()


@lru_cache(maxsize=512)
def _compiled(statement: TextClause) -> tuple[str, tuple[str, ...]]:
    """The text with $1, $2, … for its values, and their names in that order."""
    compiled: Any = statement.compile(dialect=dialects.dialect())  # type: ignore[no-untyped-call]
    return str(compiled), tuple(compiled.positiontup or ())
