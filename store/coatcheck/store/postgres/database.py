"""The connection to Postgres: one pool, short transactions, driver errors translated once.

A transaction is shielded from cancellation: asyncpg may leak a connection that is cancelled in the middle of a query,
and a cancelled COMMIT may have happened. A caller that is cancelled leaves; the transaction ends by itself.

What Postgres says becomes one of these; none of them carries a value that was written::

    StoreUnavailable     it is away, or gave up: wait, then try again
    ├── Collision        two transactions were in each other's way (tried again here first)
    ├── LockTimeout      a row stayed locked for longer than `lock_timeout`
    └── StoreNotReady    it answers, and an operator must set it up: the text says what to do
    Rejected             it refused the values of one write, and will again
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from ssl import SSLContext
from typing import Any, TypeVar

import asyncpg
from sqlalchemy import TextClause
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from coatcheck import tls
from coatcheck.errors import InvalidSettings, Rejected, StoreUnavailable
from coatcheck.search_path import SEARCH_PATH, UnsafeSearchPath
from coatcheck.store.batcher import LockTimeout
from coatcheck.store.in_flight import InFlight
from coatcheck.store.postgres.connection import DRIVER_ERRORS, Connection, Pool, PoolTimeout

T = TypeVar("T")

# Set on the server too, so that a frozen replica cannot hold a row lock for ever.
SERVER_SETTINGS = {
    "application_name": "coatcheck",
    "search_path": SEARCH_PATH,
    "lock_timeout": "5s",
    "statement_timeout": "30s",
    "idle_in_transaction_session_timeout": "10s",
    "jit": "off",
    # A plan is made once for a connection, for any number of rows, and perhaps while the tables are still empty. There
    # is an index for all that is asked often; what reads a whole table says so (`begin_survey`).
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
}
_URL_OPTIONS = inspect.signature(asyncpg.connect).parameters.keys() | {"prepared_statement_cache_size"}
# libpq's names, which every user of Postgres knows.
TLS_OPTIONS = tls.POSTGRES_OPTIONS
_SHAPE = "write postgresql://user:password@host:5432/database, with %40 for an @ and %2F for a / in the password"
CONNECT_TIMEOUT_S = 5.0
COMMAND_TIMEOUT_S = 35.0
# A loop and not tenacity, whose objects for one call cost a tenth of a small transaction.
COLLISION_PAUSES_S = (0.01, 0.02, 0.04, 0.08)

# Another transaction was in the way: the same one may pass at once.
_COLLISIONS = frozenset({"40001", "40P01"})
# The server is away, full, shutting down, read-only after a failover, or gave up waiting.
_OUTAGES = frozenset({"25006", "57014", "57P01", "57P02", "57P03", "25P03"})
_OUTAGE_CLASSES = ("08", "53", "58")
_LOCK_TIMEOUT = "55P03"
# What is missing, and who can help.
_REMEDIES = {
    "28P01": "the password is wrong; correct COATCHECK_STORE",
    "28000": "the server does not let this user in; correct COATCHECK_STORE (its user; a client certificate, with "
    "sslcert= and sslkey=), or the server's pg_hba.conf",
    "3D000": "create the database (createdb), then run `coatcheck migrate`",
    "3F000": "run `coatcheck migrate`",
    "42P01": "run `coatcheck migrate`",
    "42703": "the schema is of another release; run `coatcheck migrate` with the newest one",
    "42501": "this user may not do that; docs/security.md has the grants each role needs",
}
# The values of a write: class 22 (data exceptions) and 23 (constraints).
_REJECTION_CLASSES = ("22", "23")


class Collision(StoreUnavailable):
    """Two transactions were in each other's way, and this one was sent back."""


class StoreNotReady(StoreUnavailable):
    """Postgres answers but is not set up for us; the text says what to do."""


class Database:
    """A pool of connections and the one way to run a transaction on it.

    With `begins` each operation begins a transaction, also one of a single statement. That is two round trips more, and
    less doubt: of a server that falls silent before the COMMIT it is known that nothing was written.
    """

    def __init__(
        self, url: str, *, pool_size: int = 8, command_timeout_s: float = COMMAND_TIMEOUT_S, begins: bool = False
    ) -> None:
        address = parse_address(url)
        self.url = address.url
        self._begins = begins
        self._in_flight = InFlight()
        engine = create_async_engine(
            self.url,
            poolclass=NullPool,
            hide_parameters=True,  # payloads stay out of logs and tracebacks
            connect_args={
                "timeout": CONNECT_TIMEOUT_S,
                "command_timeout": command_timeout_s,
                "server_settings": SERVER_SETTINGS,
                **({} if address.ssl is None else {"ssl": address.ssl}),
            },
        )
        self._pool = Pool(engine, pool_size)

    async def close(self) -> None:
        """Wait for transactions whose callers have left, then close the connections."""
        await self._in_flight.drain()
        await self._pool.close()

    async def transact(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Do `work` on a connection, and commit if it began a transaction. Repeats it after a collision. Raises
        StoreUnavailable when Postgres is away, and then a commit may or may not have happened: ask again, with a lock.
        Raises Rejected if the values of a write cannot be stored.
        """
        return await self._in_flight.shield(self._try(work))

    async def _try(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        for longest_s in COLLISION_PAUSES_S:
            try:
                return await self._once(work)
            except Collision as error:
                if error.is_in_doubt:
                    raise
                await asyncio.sleep(random.uniform(0.0, longest_s))
        return await self._once(work)

    async def _once(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        connection: Connection | None = None
        try:
            async with self._pool.lend(timeout_s=CONNECT_TIMEOUT_S) as connection:
                try:
                    if self._begins:
                        await connection.begin()
                    result = await work(connection)
                    await connection.finish()
                except BaseException as error:
                    await connection.abandon(error)
                    raise
                return result
        except (DBAPIError, *DRIVER_ERRORS) as error:
            translated = _in_doubt(self._translated(error), connection, cause=_driver_error(error))
            if translated is error:
                raise
            # What caused a rejection quotes the row; so it stays behind.
            raise translated from (None if isinstance(translated, Rejected) else error)
        except PoolTimeout:
            raise StoreUnavailable(
                f"all connections to {self.place} are in use, and none came back within {CONNECT_TIMEOUT_S:g} s"
            ) from None
        except UnsafeSearchPath as error:
            raise StoreNotReady(f"Postgres at {self.place} is not ready: {error}") from None
        except (OSError, TimeoutError) as error:
            if (remedy := tls.explain(error, TLS_OPTIONS)) is not None:
                not_ready = StoreNotReady(f"Postgres at {self.place} is not ready: {remedy}")
                raise _in_doubt(not_ready, connection) from error
            reason = str(error) or type(error).__name__
            outage = StoreUnavailable(f"Postgres at {self.place} cannot be reached: {reason}")
            raise _in_doubt(outage, connection) from error

    def _translated(self, error: Exception) -> Exception:
        cause = _driver_error(error)
        state = getattr(cause, "sqlstate", None) or ""
        reason = str(cause).partition("\n")[0] or type(cause).__name__
        if state in _COLLISIONS or isinstance(cause, asyncpg.InvalidCachedStatementError):
            return Collision(f"Postgres sent a transaction back ({state}): {reason}")
        if state == _LOCK_TIMEOUT:
            return LockTimeout(f"a row stayed locked for {SERVER_SETTINGS['lock_timeout']} ({state})")
        if state in _REMEDIES:
            return StoreNotReady(f"Postgres at {self.place} is not ready ({state}): {reason}; {_REMEDIES[state]}")
        if state.startswith(_REJECTION_CLASSES) or isinstance(cause, asyncpg.DataError):
            return Rejected(f"Postgres refused the values of a write ({state or 'driver'}): {_rejection(cause)}")
        if not state or state in _OUTAGES or state.startswith(_OUTAGE_CLASSES):
            return StoreUnavailable(f"Postgres did not finish a transaction ({state or 'connection lost'}): {reason}")
        return error

    @property
    def place(self) -> str:
        """The address for messages, without its password."""
        return self.url.set(query={}).render_as_string(hide_password=True).replace("+asyncpg", "")


def _driver_error(error: BaseException) -> BaseException:
    """What asyncpg said: SQLAlchemy, which opens the connections, wraps it twice."""
    inner = error.orig if isinstance(error, DBAPIError) else error
    return (inner.__cause__ or inner) if inner is not None and inner is not error else error


def _rejection(error: BaseException) -> str:
    """Say which rule was broken without quoting the row: names of constraints are ours, details and data are not."""
    constraint = getattr(error, "constraint_name", None)
    return f"constraint {constraint}" if constraint else type(error).__name__


def _in_doubt(error: Exception, connection: Connection | None, *, cause: BaseException | None = None) -> Exception:
    """Only what was sent to be committed leaves a doubt, and only where Postgres does not say that it was sent back: by
    an error in answer to it. One that ends the connection too, which it calls FATAL, may come after the commit.
    """
    if isinstance(error, StoreUnavailable):
        was_sent_back = getattr(cause, "severity_en", None) == "ERROR"
        error.is_in_doubt = connection is not None and (
            connection.has_committed or (connection.may_have_committed and not was_sent_back)
        )
    return error


@dataclass(frozen=True, slots=True)
class Address:
    """An address that was checked, and the TLS its options ask for; `ssl` None leaves it to the driver."""

    url: URL
    ssl: SSLContext | str | None
    risk: str | None
    """What an attacker on the way could do; None: nothing, or there is no way."""


def parse_address(text: str) -> Address:
    """Read a `postgresql://` address. Raises InvalidSettings, which quotes nothing that may be a password."""
    try:
        parsed = make_url(text)
    except (ArgumentError, ValueError):
        raise InvalidSettings(f"the store address is not a URL; {_SHAPE}") from None
    if parsed.drivername not in ("postgres", "postgresql", "postgresql+asyncpg"):
        raise InvalidSettings(f"the store address starts with {parsed.drivername}://; only postgresql:// is known")
    if "@" in (parsed.host or ""):
        raise InvalidSettings(f"the host in the store address has an @ in it; {_SHAPE}")
    query = dict(parsed.query)
    password = query.pop("password", None)
    names = (TLS_OPTIONS.ca, TLS_OPTIONS.cert, TLS_OPTIONS.key)
    files = {name: _text(query.pop(name)) for name in names if name in query}
    mode = query.pop("sslmode", None) or query.pop("ssl", None) or ("verify-full" if files else None)
    if unknown := query.keys() - _URL_OPTIONS:
        raise InvalidSettings(f"the store address has options that asyncpg does not know: {', '.join(sorted(unknown))}")
    url = parsed.set(drivername="postgresql+asyncpg", query=query)
    return Address(
        url=url if password is None else url.set(password=_text(password)),
        ssl=None if mode is None else tls.postgres_ssl(_text(mode), files, what="store address"),
        risk=_risk(_text(query.get("host")) or url.host, mode, has_ca=TLS_OPTIONS.ca in files),
    )


def find_risk(text: str) -> str | None:
    """Say what an attacker on the way to this store could do, and the remedy. None: nothing. Raises InvalidSettings."""
    return parse_address(text).risk


def _risk(host: str | None, mode: object, *, has_ca: bool) -> str | None:
    if tls.is_local(host) or mode in ("verify-ca", "verify-full") or (mode == "require" and has_ca):
        return None
    if mode == "require":
        return "encrypted, but the server's certificate is not verified; use sslmode=verify-full"
    return "not encrypted for certain; use sslmode=verify-full"


def _text(value: str | tuple[str, ...] | None) -> str:
    """An option that is given several times counts once, the last time."""
    return value[-1] if isinstance(value, tuple) else value or ""


async def rows(connection: Connection, statement: TextClause, **values: Any) -> Sequence[Any]:
    """Fetch everything a statement reads."""
    return await connection.read(statement, values)


def columns(names: Sequence[str], items: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    """Turn rows into one array per column, the shape `unnest` takes."""
    arrays = zip(*items, strict=True) if items else ((),) * len(names)
    return dict(zip(names, arrays, strict=True))
