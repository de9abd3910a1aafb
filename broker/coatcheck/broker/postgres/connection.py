"""One connection to Postgres (`PostgresLink`), its address, and the supervisor that always has the next one ready
(`PostgresUplink`).

    down ──connect, with back-off──► up ──socket closed, or no answer in time──► down …

A link is lost once and for good. What used it finds its `lost` event set, drops what hung on it, and asks the uplink
for another. Statements run in tasks of their own, one after the other: a caller that is cancelled leaves, and nothing
is cancelled in the middle of a query, which asyncpg does not always survive.

An address is a `pg://` URL, which is a store's `postgresql://` URL under another scheme. A Unix socket is named by
`?host=/directory`, TLS by libpq's own options: `sslmode`, `sslrootcert`, `sslcert`, `sslkey`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

import asyncpg

from coatcheck import search_path, tls
from coatcheck.broker.port import BrokerStats
from coatcheck.broker.reconnect import Uplink
from coatcheck.broker.settings import BrokerSettings
from coatcheck.errors import BrokerUnavailable, InvalidSettings
from coatcheck.log import get_logger

T = TypeVar("T")
log = get_logger(__name__)

SCHEME = "pg"
STORES_OWN = "pg://"
"""Stands for the store's database. A caller that knows the store puts a real address in its place."""

TLS_OPTIONS = tls.POSTGRES_OPTIONS
_TLS_FILES = (TLS_OPTIONS.ca, TLS_OPTIONS.cert, TLS_OPTIONS.key)
_PASSED_ON = ("user", "password", "database", "passfile", "target_session_attrs", "krbsrvname", "gsslib")
# What a store's address may say about its pool. It means nothing here, and the two addresses are often the same.
_IGNORED = ("prepared_statement_cache_size", "statement_cache_size", "timeout", "command_timeout")
_KNOWN = ("host", "port", "sslmode", "ssl", *_TLS_FILES, *_PASSED_ON, *_IGNORED)
_WITH_PORT = re.compile(r"([\w.-]+):(\d+)")
_SHAPE = "write pg://user:password@host:5432/database, with %40 for an @ and %2F for a / in the password"

DRIVER_ERRORS = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)
_REMEDIES = {
    "28P01": "the password is wrong",
    "28000": "the server does not let this user in: correct the user, or the server's pg_hba.conf",
    "3D000": "create the database (createdb)",
    "42501": "this user lacks a right on the schema coatcheck_broker",
}
_REFUSALS = ("28P01", "28000", "3D000")
_HARD_CLOSE_AFTER_S = 3.0
_COMMON_SETTINGS = {
    "search_path": search_path.SEARCH_PATH,
    "lock_timeout": "5s",
    "idle_in_transaction_session_timeout": "10s",
    "jit": "off",
    # Above it, a row that changed while we looked is an error and not just another session's.
    "default_transaction_isolation": "read committed",
    # A plan made while a queue is empty is used when it is full. Every statement has an index to go by.
    "enable_seqscan": "off",
}


# --- addresses ---


@dataclass(frozen=True, slots=True)
class PostgresAddress:
    """An address that was checked. `arguments` are asyncpg's and hold the password; `place` is for messages."""

    arguments: dict[str, Any]
    place: str
    risk: str | None
    """What an eavesdropper on the way could do; None: nothing, or there is no way."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read an address. Raises InvalidSettings, which quotes nothing that may be a password."""
        if text == STORES_OWN:
            raise InvalidSettings(f"{STORES_OWN} stands for the store's database, and no store is known here; {_SHAPE}")
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port
            given = parse_qs(parts.query, keep_blank_values=True)
        except ValueError:
            raise InvalidSettings(f"the broker address is not a URL; {_SHAPE}") from None
        if "@" in (host or ""):
            raise InvalidSettings(f"the host in the broker address has an @ in it; {_SHAPE}")
        if unknown := sorted(given.keys() - set(_KNOWN)):
            raise InvalidSettings(
                f"unknown options in the broker address: {', '.join(unknown)}; known are {', '.join(_KNOWN)}"
            )
        files = {name: given[name][-1] for name in _TLS_FILES if name in given}
        mode = given.get("sslmode", given.get("ssl", ["verify-full" if files else ""]))[-1]
        hosts, ports = _places(host, port, given)
        arguments: dict[str, Any] = {
            "host": hosts,
            "port": ports[0] if len(ports) == 1 else ports,
            "user": unquote(parts.username or ""),
            "password": unquote(parts.password or ""),
            "database": unquote(parts.path.removeprefix("/")),
            "ssl": tls.postgres_ssl(mode, files, what="broker address") if mode else None,
        } | {name: given[name][-1] for name in _PASSED_ON if name in given}
        return cls(
            arguments={name: value for name, value in arguments.items() if value},
            place=f"{SCHEME}://{','.join(hosts)}{f':{ports[0]}' if ports else ''}/{arguments['database']}",
            risk=_risk(hosts, mode, has_ca=TLS_OPTIONS.ca in files),
        )


def _places(host: str | None, port: int | None, given: dict[str, list[str]]) -> tuple[list[str], list[int]]:
    """Hosts and ports, several where there is a standby. What the options say wins, as it does for a store."""
    hosts = [each for text in given.get("host", ()) for each in text.split(",")] or ([host] if host else [])
    ports = [each for text in given.get("port", ()) for each in text.split(",")]
    # As SQLAlchemy writes several: host=one:5432&host=other:5432.
    pairs = [_WITH_PORT.fullmatch(each) for each in hosts]
    if hosts and not ports and all(pairs):
        hosts, ports = [pair[1] for pair in pairs if pair], [pair[2] for pair in pairs if pair]
    try:
        numbers = [int(text) for text in ports] or ([port] if port else [])
    except ValueError:
        raise InvalidSettings("port in the broker address must be a number") from None
    if len(numbers) not in {0, 1, len(hosts)}:
        raise InvalidSettings(f"the broker address has {len(numbers)} ports for {len(hosts)} hosts")
    return hosts, numbers


def _risk(hosts: list[str], mode: str, *, has_ca: bool) -> str | None:
    is_local = all(tls.is_local(host) for host in hosts)
    if is_local or mode in ("verify-ca", "verify-full") or (mode == "require" and has_ca):
        return None
    if mode == "require":
        return "encrypted, but the server's certificate is not verified; use sslmode=verify-full"
    return "not encrypted for certain; use sslmode=verify-full"


# --- errors ---


@asynccontextmanager
async def translating(what: str) -> AsyncIterator[None]:
    """Turn every way the driver can fail into `BrokerUnavailable`, said once, with its cause."""
    try:
        yield
    except DRIVER_ERRORS as exc:
        raise BrokerUnavailable(f"{what}: {describe(exc)}") from exc


def describe(exc: BaseException) -> str:
    """Say what went wrong in one line, and what to do about it where we know."""
    if isinstance(exc, TimeoutError):
        return "no answer in time"
    text = tls.explain(exc, TLS_OPTIONS) or str(exc).partition("\n")[0] or repr(exc)
    remedy = _REMEDIES.get(getattr(exc, "sqlstate", None) or "")
    return f"{text}; {remedy}" if remedy else text


# --- one connection ---


class PostgresLink:
    """One live connection, until `lost` is set."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self.lost = asyncio.Event()
        self.reason = ""
        self._connection = connection
        self._turn = asyncio.Lock()
        self._running: set[asyncio.Task[Any]] = set()
        self._on_lost: list[Callable[[], None]] = []
        connection.add_termination_listener(lambda _: self._mark_lost("the server closed the connection"))

    @classmethod
    async def open(
        cls, address: PostgresAddress, settings: BrokerSettings, *, role: str, server_settings: dict[str, str]
    ) -> PostgresLink:
        """Connect. Raises a driver error after `connect_timeout`."""
        keepalive_s = max(1, int(settings.heartbeat.total_seconds()))
        connection = await asyncpg.connect(
            **address.arguments,
            timeout=settings.connect_timeout.total_seconds(),
            server_settings={
                **_COMMON_SETTINGS,
                "application_name": f"{settings.name} {role}"[:63],
                # So that the server does not keep the connections of a machine that is gone.
                "tcp_keepalives_idle": str(keepalive_s),
                "tcp_keepalives_interval": str(keepalive_s),
                "tcp_keepalives_count": "2",
                **server_settings,
            },
        )
        link = cls(connection)
        try:
            await link._look_for_pooler(address, timeout_s=settings.connect_timeout.total_seconds())
        except BaseException:
            link.abort("it was not finished opening")
            raise
        return link

    async def _look_for_pooler(self, address: PostgresAddress, *, timeout_s: float) -> None:
        (path,) = await self.fetch(search_path.SHOW, timeout_s=timeout_s)
        search_path.check(path[0])
        (found,) = await self.fetch("SELECT pg_backend_pid() AS pid", timeout_s=timeout_s)
        if found["pid"] != self._connection.get_server_pid():
            log.warning(
                "broker_behind_pooler",
                place=address.place,
                remedy="name Postgres itself: NOTIFY and session locks do not pass a pooler that shares connections",
            )

    async def fetch(self, statement: str, *values: Any, timeout_s: float) -> list[Any]:
        """Run one statement, which is one transaction, and give its rows.

        Raises a driver error. After a `TimeoutError` the link is lost, and whether the statement took effect is not
        known; the same goes for a connection that was lost meanwhile.
        """
        return await self.run(lambda connection: connection.fetch(statement, *values), timeout_s=timeout_s)

    async def run(self, work: Callable[[asyncpg.Connection], Awaitable[T]], *, timeout_s: float) -> T:
        """Do something on the connection, when those before have done theirs. See `fetch`."""
        running = asyncio.create_task(self._in_turn(work))
        self._running.add(running)
        running.add_done_callback(self._forget)
        await asyncio.wait([running], timeout=timeout_s)
        if not running.done():
            self.abort("no answer in time")
            raise TimeoutError
        return running.result()

    async def _in_turn(self, work: Callable[[asyncpg.Connection], Awaitable[T]]) -> T:
        async with self._turn:
            if self.lost.is_set():
                raise ConnectionError(f"the connection is lost: {self.reason}")
            try:
                return await work(self._connection)
            except asyncio.CancelledError as exc:
                # These tasks are never cancelled; it is how a driver may say that the connection went away.
                raise ConnectionError("the connection was lost while waiting for the server") from exc
            except DRIVER_ERRORS:
                if self._connection.is_closed():
                    self._mark_lost("the connection was closed")
                raise

    def _forget(self, running: asyncio.Task[Any]) -> None:
        self._running.discard(running)
        if not running.cancelled():
            running.exception()  # its caller may have left; asyncio would complain that its error was not read

    def call_when_lost(self, callback: Callable[[], None]) -> None:
        """Call back as soon as the link is lost; at once if it is."""
        if self.lost.is_set():
            callback()
        else:
            self._on_lost.append(callback)

    def abort(self, reason: str) -> None:
        """Give the connection up now, without a word to the other end, which may be unreachable."""
        if not self.lost.is_set():
            log.warning("broker_link_aborted", reason=reason)
        self._mark_lost(reason)
        self._connection.terminate()

    async def close(self) -> None:
        """Part from the server politely, within a few seconds; hard after that. Repeating it is safe."""
        self._mark_lost("closed")
        with suppress(*DRIVER_ERRORS):
            async with asyncio.timeout(_HARD_CLOSE_AFTER_S), self._turn:
                await self._connection.close(timeout=_HARD_CLOSE_AFTER_S)
        self._connection.terminate()
        if self._running:
            await asyncio.wait(self._running, timeout=_HARD_CLOSE_AFTER_S)

    def _mark_lost(self, reason: str) -> None:
        if not self.lost.is_set():
            self.reason = reason
            self.lost.set()
            callbacks, self._on_lost = self._on_lost, []
            for callback in callbacks:
                callback()


# --- and the next one ---


class PostgresUplink(Uplink[PostgresLink]):
    """Keeps one link to a Postgres up."""

    def __init__(
        self,
        address: PostgresAddress,
        settings: BrokerSettings,
        *,
        role: str,
        stats: BrokerStats,
        server_settings: dict[str, str],
    ) -> None:
        super().__init__(settings, role=role, stats=stats)
        self._address = address
        self._server_settings = server_settings

    async def _open(self) -> PostgresLink:
        return await PostgresLink.open(
            self._address, self._settings, role=self.role, server_settings=self._server_settings
        )

    def _is_refusal(self, error: BaseException) -> bool:
        return getattr(error, "sqlstate", None) in _REFUSALS or (
            tls.is_verification_failure(error) or isinstance(error, search_path.UnsafeSearchPath)
        )

    def explain(self, what: str) -> str:
        because = f"; last error: {describe(self._last_error)}" if self._last_error else ""
        return f"broker {self._address.place}: {what}{because}"
