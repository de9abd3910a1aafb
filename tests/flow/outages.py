"""What tests of outages need beside the rig: a bad network in front of each server, an ear for logs, probes, meters."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import MutableMapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import asyncpg
import structlog
from tests import services
from tests.broker.proxy import Proxy
from tests.flow.harness import Rig, until

from coatcheck import points
from coatcheck.store import Store, Task, TaskState
from coatcheck.worker import Worker

_CHUNK = 65536


def free_port() -> int:
    return services.free_port()


class CommitCutter(Proxy):
    """A proxy before Postgres that can lose the answer to a commit: it was done, and nobody was told.

    Most commits are single statements without a COMMIT. Which one commits is told by the replica, in this very process.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._is_armed = False
        self._is_committing = False
        self._ours: set[bytes] = set()
        self.cut_count = 0

    async def __aenter__(self) -> Self:
        points.arm(self._on_reach)
        return await super().__aenter__()

    async def __aexit__(self, *_: Any) -> None:
        points.arm(None)
        await super().__aexit__(*_)

    def _on_reach(self, point: str) -> None:
        if self._is_armed and point == "before_commit":
            self._is_armed, self._is_committing = False, True

    def cut_next_commit(self) -> None:
        self._is_armed = True

    async def _pipe(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, is_open: asyncio.Event) -> None:
        if is_open is not self._open["up"]:
            await super()._pipe(source, sink, is_open)
            return
        try:
            with suppress(OSError):
                while chunk := await source.read(_CHUNK):
                    await is_open.wait()
                    is_last = self._commits(chunk) and self._is_committing
                    if is_last:
                        self._is_committing = False
                        self._open["down"].clear()
                    sink.write(chunk)
                    await sink.drain()
                    if is_last:
                        await self._lose_the_answer()
        finally:
            self._writers.discard(sink)
            sink.transport.abort()

    def _commits(self, chunk: bytes) -> bool:
        """Whether a statement on our tables is executed, or a transaction ended. Between its preparation (Parse, with a
        name) and its execution (Bind, of that name) the driver may ask questions of its own about types.
        """
        kind, name = chunk[:1], chunk[5:].lstrip(b"\0").partition(b"\0")[0]
        if kind == b"P" and b"coatcheck." in chunk:
            self._ours.add(name)
        return b"COMMIT" in chunk or (kind == b"B" and name in self._ours)

    async def _lose_the_answer(self) -> None:
        """Long enough for Postgres to have committed: the answer is held back, then the line goes dead."""
        await asyncio.sleep(0.2)
        self.cut_count += 1
        self.cut()
        self._open["down"].set()


async def store_proxy(rig: Rig) -> CommitCutter:
    """A bad network between replicas and Postgres; the rig's own look into the store goes past it."""
    return await rig._stack.enter_async_context(CommitCutter(rig.settings.store))


async def amqp_proxy(rig: Rig) -> Proxy:
    """A bad network between replicas and RabbitMQ; peers and requesters go past it."""
    return await rig._stack.enter_async_context(Proxy(rig.settings.broker))


class LogBook:
    """Every event logged in this process since `listen`."""

    def __init__(self, entries: list[MutableMapping[str, Any]]) -> None:
        self._entries = entries

    def all(self, event: str, **fields: Any) -> list[MutableMapping[str, Any]]:
        return [it for it in self._entries if it["event"] == event and fields.items() <= it.items()]

    async def hears(self, event: str, *, count: int = 1, within_s: float = 20.0, **fields: Any) -> Any:
        await until(lambda: len(self.all(event, **fields)) >= count, what=f"{event} is logged", within_s=within_s)
        return self.all(event, **fields)


def listen(rig: Rig) -> LogBook:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(20))
    merge = structlog.contextvars.merge_contextvars
    return LogBook(rig._stack.enter_context(structlog.testing.capture_logs(processors=[merge])))


def metric(part: Any, name: str, **labels: str) -> float:
    """What a worker or sweeper has counted so far."""
    return part.metrics.registry.get_sample_value(f"coatcheck_{name}", labels) or 0.0


def delivered(worker: Worker) -> int:
    assert worker._broker is not None
    return worker._broker.stats.delivered_count


async def readiness(port: int) -> int:
    """The status that /readyz answers with."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET /readyz HTTP/1.1\r\nHost: test\r\n\r\n")
        return int((await reader.readline()).split()[1])
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def becomes_ready(port: int, *, is_ready: bool) -> None:
    async def is_so() -> bool:
        return (await readiness(port) == 200) is is_ready

    await until(is_so, what=f"/readyz says {200 if is_ready else 503}")


async def only_task(store: Store, state: TaskState | None = None) -> Task:
    """The one task there is, once it is in the given state."""

    async def look() -> Task | None:
        found = await store.list_tasks(limit=10)
        assert len(found) <= 1
        return found[0] if found and state in {None, found[0].state} else None

    return await until(look, what=f"the task is {state}")


class OwnPostgres:
    """A Postgres of one test's own, which may be crashed: the servers others use are left alone.."""

    def __init__(self, running: ExitStack) -> None:
        self._running = running
        try:
            self._install = services._embedded_install(running)
        except services.NotHere:
            self._install = services._installed_postgres()
        self.url = services._start_postgres(running, self._install)

    async def crash(self) -> None:
        """Stop it as a power cut would: no checkpoint, no goodbye."""
        connection = await asyncpg.connect(self.url)
        self._data = Path(await connection.fetchval("SHOW data_directory"))
        postmaster = int((self._data / "postmaster.pid").read_text().split()[0])
        os.kill(postmaster, signal.SIGQUIT)
        connection.terminate()
        await until(lambda: not (self._data / "postmaster.pid").exists(), what="Postgres is down")

    async def restart(self) -> None:
        """Start it again where it was; it recovers from its log."""
        port = str(urlsplit(self.url).port)
        command = [self._install / "bin/postgres", "-D", self._data, "-p", port]
        options = ["--listen_addresses=127.0.0.1", "--unix_socket_directories=", "--max_connections=200"]
        log = self._data / "server.log"
        user = services._unprivileged_user()
        services._start_server(self._running, [*command, *options], log=log, user=user, stop_signal=signal.SIGINT)
