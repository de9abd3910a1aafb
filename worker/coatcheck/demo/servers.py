"""The servers the demo plays on: one of its own that is gone afterwards, or those that the environment names.

On named servers it uses a database and queue names of its own, and has them removed.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from coatcheck.demo.caretaker import Caretaker
from coatcheck.demo.crew import DemoFailed
from coatcheck.errors import CoatcheckError
from coatcheck.worker.servers import settle
from coatcheck.worker.settings import QUEUES_IN_STORE, Settings, is_embedded, redacted

if TYPE_CHECKING:
    from coatcheck.embedded import Server

CONNECT_TIMEOUT_S = 5.0

NO_STORE = """\
No database to be had from Postgres at {place} ({reason}).
Its user must be allowed to create a database: the demo makes one of its own and drops it. Name another server with
  export COATCHECK_STORE=postgresql://user:password@host:5432/postgres
or name none, and the demo starts one of its own:
  unset COATCHECK_STORE"""

NO_BROKER = """\
No broker answers at {place} ({reason}).
Start it, name another one with
  export COATCHECK_BROKER=amqp://user:password@host:5672/
or name none, and the demo keeps its queues in Postgres:
  unset COATCHECK_BROKER"""


@dataclass(frozen=True, slots=True)
class Servers:
    """Where messages travel and where tasks are kept, and how to call that in the head of the view."""

    broker: str
    store: str
    words: str


def announce(settings: Settings, prefix: str) -> str:
    """What is about to happen, in words."""
    if is_embedded(settings.store) and not urlsplit(settings.store).path:
        return "starting a Postgres of its own, which is gone afterwards"
    return f"using the servers that are named; what is made there is called {prefix}"


@asynccontextmanager
async def servers_of(settings: Settings, caretaker: Caretaker, *, database: str) -> AsyncIterator[Servers]:
    """Servers for one performance. Raises DemoFailed with the fix if there are none, EmbeddedUnavailable likewise."""
    directory = urlsplit(settings.store).path if is_embedded(settings.store) else None
    if directory is None:
        store = await _make_database(settings.store, caretaker, name=database)
        yield await _servers(settings, store, words=f"Postgres at {place_of(store)}")
    elif directory:
        async with _joined(Path(directory)) as server:
            store = await _make_database(server.url, caretaker, name=database, directory=server.directory)
            yield await _servers(settings, store, words=f"embedded Postgres in {directory}")
    else:
        own = make_directory()
        caretaker.will_remove_directory(own, has_server=True)
        async with _joined(own) as server:
            yield await _servers(settings, server.url, words="embedded Postgres")


def no_broker(url: str, error: Exception) -> DemoFailed:
    return DemoFailed(NO_BROKER.format(place=place_of(url), reason=_reason(error)))


def make_directory() -> Path:
    """A temporary directory. As root the server in it is another user, who has to get to its data."""
    directory = Path(tempfile.mkdtemp(prefix="coatcheck-demo-"))
    directory.chmod(0o711 if os.geteuid() == 0 else 0o700)
    return directory


def place_of(url: str) -> str:
    """Where a URL points, without the password in it."""
    parts = urlsplit(url)
    return parts.netloc.rpartition("@")[2] or parts.scheme


async def _servers(settings: Settings, store: str, *, words: str) -> Servers:
    settled = await settle(replace(settings, store=store))
    queues = "queues in it" if settings.broker == QUEUES_IN_STORE else f"queues at {place_of(settled.broker)}"
    return Servers(settled.broker, store, f"{words}, {queues}")


@asynccontextmanager
async def _joined(directory: Path) -> AsyncIterator[Server]:
    from coatcheck.embedded import join

    joining = asyncio.ensure_future(asyncio.to_thread(join, directory))
    try:
        server = await asyncio.shield(joining)
    except asyncio.CancelledError:
        with suppress(CoatcheckError):
            (await joining).leave()  # it is on its way and cannot be called back
        raise
    try:
        yield server
    finally:
        await asyncio.to_thread(server.leave)


async def _make_database(admin_url: str, caretaker: Caretaker, *, name: str, directory: Path | None = None) -> str:
    admin_url = admin_url.replace("postgresql+asyncpg://", "postgresql://", 1)
    try:
        connection = await asyncpg.connect(admin_url, timeout=CONNECT_TIMEOUT_S)
        try:
            caretaker.will_drop_database(admin_url, name, directory=directory)
            await connection.execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING 'UTF8'")
        finally:
            await connection.close()
    except (OSError, ValueError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise DemoFailed(NO_STORE.format(place=place_of(admin_url), reason=_reason(error))) from None
    return urlunsplit(urlsplit(admin_url)._replace(path=f"/{name}"))


def _reason(error: BaseException) -> str:
    return redacted(str(error)) or type(error).__name__
