"""The servers of a trial, its own: crashed, filled up, alarmed and cut off at will. Nobody else uses them."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
import uuid
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg
from tests import services
from tests.chaos.brokers import Broker, QueuesInPostgres, RabbitMQ

DATABASE = "coatcheck_test_chaos"


class Postgres:
    """A server with temporary data. Its tables lie on a small disk where the machine lets us mount one."""

    def __init__(self, running: ExitStack, *, disk_mb: int) -> None:
        self._running = running
        self.disk, self.why_no_disk = _mount(running, disk_mb)
        try:
            self._install = services._embedded_install(running)
        except services.NotHere:
            self._install = services._installed_postgres()
        admin = services._start_postgres(running, self._install)
        self._data, self.version = services.run_sync(self._prepare(admin))
        self.url = urlunsplit(urlsplit(admin)._replace(path=f"/{DATABASE}"))

    async def _prepare(self, admin: str) -> tuple[Path, str]:
        connection = await asyncpg.connect(admin)
        try:
            where = ""
            if self.disk is not None:
                await connection.execute(f"CREATE TABLESPACE small LOCATION '{self.disk}'")
                where = "TABLESPACE small"
            await connection.execute(f"CREATE DATABASE {DATABASE} TEMPLATE template0 ENCODING 'UTF8' {where}")
            return Path(await connection.fetchval("SHOW data_directory")), await connection.fetchval(
                "SHOW server_version"
            )
        finally:
            await connection.close()

    async def restart(self) -> None:
        """`pg_ctl restart -m immediate`: no checkpoint, no goodbye; it recovers from its log."""
        lock = self._data / "postmaster.pid"
        os.kill(int(lock.read_text().split()[0]), signal.SIGQUIT)
        async with asyncio.timeout(60):
            while lock.exists():
                await asyncio.sleep(0.05)
        port = str(urlsplit(self.url).port)
        command = [self._install / "bin/postgres", "-D", self._data, "-p", port]
        options = ["--listen_addresses=127.0.0.1", "--unix_socket_directories=", "--max_connections=200"]
        user = services._unprivileged_user()
        log = self._data / "server.log"
        services._start_server(self._running, [*command, *options], log=log, user=user, stop_signal=signal.SIGINT)
        await self.is_up(60)

    async def is_up(self, within_s: float) -> None:
        async with asyncio.timeout(within_s):
            while True:
                try:
                    connection = await asyncpg.connect(self.url, timeout=5)
                except (OSError, asyncpg.PostgresError, TimeoutError):
                    await asyncio.sleep(0.1)
                else:
                    await connection.close()
                    return

    async def close_backends(self, share: float) -> int:
        """Have the server end some of its connections."""
        connection = await asyncpg.connect(self.url, timeout=5)
        try:
            ended = await connection.fetch(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = $1 AND pid <> pg_backend_pid() AND random() < $2",
                DATABASE,
                share,
            )
            return len(ended)
        finally:
            await connection.close()

    async def fill_disk(self, for_s: float) -> None:
        """Leave no byte free on the disk with the tables, for a while."""
        assert self.disk is not None
        ballast = self.disk / "ballast"
        try:
            with ballast.open("wb", buffering=0) as file:
                block = bytes(1 << 20)
                with suppress(OSError):  # full is what it is to become
                    while True:
                        file.write(block)
                        await asyncio.sleep(0)
            await asyncio.sleep(for_s)
        finally:
            ballast.unlink(missing_ok=True)


def _mount(running: ExitStack, size_mb: int) -> tuple[Path | None, str]:
    """A disk of so many megabytes, or why there is none."""
    mount = shutil.which("mount")
    if os.geteuid() != 0 or mount is None:
        return None, "mounting a small disk needs root"
    place = Path(tempfile.mkdtemp(prefix="coatcheck-disk-"))
    options = f"size={size_mb}m,mode=0700,uid={services._unprivileged_user()}"
    made = subprocess.run(
        [mount, "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        place.rmdir()
        return None, f"mounting a small disk failed: {made.stderr.strip()}"

    def unmount() -> None:
        subprocess.run(["umount", "-l", place], check=False)
        with suppress(OSError):
            place.rmdir()

    running.callback(unmount)
    return place, ""


class Servers:
    """Both, started; with `pg` they are one. What was started goes with `running`."""

    broker: Broker

    def __init__(
        self, running: ExitStack, *, disk_mb: int, broker_kind: str = "amqp", borrowed_broker: str | None = None
    ) -> None:
        self.postgres = Postgres(running, disk_mb=disk_mb)
        if broker_kind == QueuesInPostgres.kind:
            self.broker = QueuesInPostgres(self.postgres.url)
        else:
            self.broker = RabbitMQ(running, borrowed_broker)
        self.service = f"cctest-chaos-{uuid.uuid4().hex[:8]}"
