"""The servers the demo plays on, and the process that clears up after it.

The servers are one of its own that is gone afterwards, or those that the environment names; on those it uses a database
and queue names of its own.

The caretaker outlives the demo by a moment. The demo tells it, line by line on its stdin, what it is about to make.
When that pipe ends, because the demo closed it or was killed with -9, everything is removed, the newest first. So there
is one way of clearing up, and it runs every time.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from coatcheck.broker import connect
from coatcheck.embedded import Server, join, wait_stopped
from coatcheck.embedded.places import Places
from coatcheck.errors import CoatcheckError
from coatcheck.worker.servers import settle
from coatcheck.worker.settings import QUEUES_IN_STORE, Settings, is_embedded, redacted

CONNECT_TIMEOUT_S = 5.0
CLEARING_S = 30.0
"""How long the demo waits for the caretaker."""
SERVER_STOP_S = 15.0

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

Chore = dict[str, Any]


class DemoFailed(Exception):
    """The demo cannot go on; the text says why and what to do."""


# --- the servers ---


@dataclass(frozen=True, slots=True)
class DemoServers:
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
async def servers_of(settings: Settings, caretaker: Caretaker, *, database: str) -> AsyncIterator[DemoServers]:
    """Servers for one run. Raises DemoFailed with the fix if there are none, EmbeddedUnavailable likewise."""
    directory = urlsplit(settings.store).path if is_embedded(settings.store) else None
    if directory is None:
        store = await _make_database(settings.store, caretaker, name=database)
        yield await _servers(settings, store, words=f"Postgres at {_place_of(store)}")
    elif directory:
        async with _joined(Path(directory)) as server:
            store = await _make_database(server.url, caretaker, name=database, directory=server.directory)
            yield await _servers(settings, store, words=f"embedded Postgres in {directory}")
    else:
        own = _make_directory()
        caretaker.will("directory", path=str(own), has_server=True)
        async with _joined(own) as server:
            yield await _servers(settings, server.url, words="embedded Postgres")


def no_broker(url: str, error: Exception) -> DemoFailed:
    return DemoFailed(NO_BROKER.format(place=_place_of(url), reason=_reason(error)))


def _make_directory() -> Path:
    """A temporary directory. As root the server in it is another user, who has to get to its data."""
    directory = Path(tempfile.mkdtemp(prefix="coatcheck-demo-"))
    directory.chmod(0o711 if os.geteuid() == 0 else 0o700)
    return directory


async def _servers(settings: Settings, store: str, *, words: str) -> DemoServers:
    settled = await settle(replace(settings, store=store))
    queues = "queues in it" if settings.broker == QUEUES_IN_STORE else f"queues at {_place_of(settled.broker)}"
    return DemoServers(settled.broker, store, f"{words}, {queues}")


@asynccontextmanager
async def _joined(directory: Path) -> AsyncIterator[Server]:
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
    """`directory`: of the embedded server that has it, which may be about to stop when the database is dropped."""
    admin_url = admin_url.replace("postgresql+asyncpg://", "postgresql://", 1)
    try:
        connection = await asyncpg.connect(admin_url, timeout=CONNECT_TIMEOUT_S)
        try:
            caretaker.will("database", url=admin_url, name=name, directory=str(directory or ""))
            await connection.execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING 'UTF8'")
        finally:
            await connection.close()
    except (OSError, ValueError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise DemoFailed(NO_STORE.format(place=_place_of(admin_url), reason=_reason(error))) from None
    return urlunsplit(urlsplit(admin_url)._replace(path=f"/{name}"))


def _place_of(url: str) -> str:
    """Where a URL points, without the password in it."""
    parts = urlsplit(url)
    return parts.netloc.rpartition("@")[2] or parts.scheme


def _reason(error: BaseException) -> str:
    return redacted(str(error)) or type(error).__name__


# --- the caretaker ---


class Caretaker:
    """The demo's end of the pipe. Tell it of a thing before making it; removing what is not there does no harm."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "coatcheck.demo.stage"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C and a closed terminal must not end it
            text=True,
        )

    def will(self, chore: str, **facts: str | bool | Sequence[str]) -> None:
        """Have a `directory`, a `database` or `queues` removed at the end; `keep` leaves a directory there."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it was killed: `finish` says so
            self._process.stdin.write(json.dumps({"chore": chore, **facts}) + "\n")
            self._process.stdin.flush()

    def finish(self) -> str:
        """Let it do its work, and return what went wrong with it."""
        try:
            said = self._process.communicate(timeout=CLEARING_S)[1].strip()
        except subprocess.TimeoutExpired:
            return f"clearing up takes longer than {CLEARING_S:.0f} s; it goes on by itself"
        return said or ("the process that clears up was killed" if self._process.returncode else "")


async def clear_up(chores: Sequence[Chore]) -> list[str]:
    """Remove everything, the newest first; return what could not be removed."""
    kept = {chore["path"] for chore in chores if chore["chore"] == "keep"}
    failures = []
    for chore in reversed(chores):
        if chore["chore"] != "keep" and chore.get("path") not in kept:
            try:
                await _CHORES[chore["chore"]](chore)
            except Exception as error:  # noqa: BLE001 - one thing that cannot be removed must not keep the others
                failures.append(f"{chore['chore']} not removed: {type(error).__name__}: {error}")
    return failures


async def _remove_directory(chore: Chore) -> None:
    path = Path(chore["path"])
    rooms = [path]
    if chore.get("has_server"):
        wait_stopped(path, within_s=SERVER_STOP_S)
        rooms.append(Places.of(path).room)  # as root it has its data elsewhere
    for room in rooms:
        with suppress(FileNotFoundError):
            shutil.rmtree(room)


async def _drop_database(chore: Chore) -> None:
    with join(Path(chore["directory"])) if chore["directory"] else nullcontext():
        connection = await asyncpg.connect(chore["url"], timeout=CONNECT_TIMEOUT_S)
        try:
            await connection.execute(f"DROP DATABASE IF EXISTS {chore['name']} WITH (FORCE)")
        finally:
            await connection.close()


async def _delete_queues(chore: Chore) -> None:
    async with connect(chore["url"], connect_budget=CONNECT_TIMEOUT_S, name="demo caretaker") as broker:
        for service in chore["services"]:
            await broker.delete_service(service)
        for queue in chore["queues"]:
            await broker.delete_queue(queue)


_CHORES: dict[str, Callable[[Chore], Awaitable[None]]] = {
    "directory": _remove_directory,
    "database": _drop_database,
    "queues": _delete_queues,
}


if __name__ == "__main__":
    failed = asyncio.run(clear_up([json.loads(line) for line in sys.stdin]))
    with suppress(OSError):  # the demo may be gone
        sys.stderr.write("\n".join(failed))
        sys.stderr.flush()
