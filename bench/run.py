"""`make bench`: what a lifecycle costs here, beside the same lifecycle written by hand, in one run on one machine.

Machines are noisy, so the ratios are the figures to keep. Needs RabbitMQ and Postgres on localhost, or
COATCHECK_BROKER and COATCHECK_STORE; makes a database and queues of its own and removes them.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import sys
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import aio_pika
import asyncpg
from rich.console import Console
from rich.table import Table
from sqlalchemy.engine import make_url

from coatcheck.store import migrate
from coatcheck.worker import Settings

ROOT = Path(__file__).parent.parent
BODY = json.dumps("x" * 1000).encode()


class Bench:
    """The servers, the processes under test, and a client in plain aio-pika that is the same for all of them."""

    def __init__(self, broker: str, store: str) -> None:
        self.broker, self.store = broker, store
        self.prefix = f"ccbench-{uuid.uuid4().hex[:8]}"
        self.processes: list[asyncio.subprocess.Process] = []

    async def start(self, *command: str, awaits: str, **environment: str) -> asyncio.subprocess.Process:
        known = {"COATCHECK_BROKER": self.broker, "COATCHECK_STORE": self.store, "COATCHECK_LOG_FORMAT": "json"}
        names = {"BENCH_SERVICE": f"{self.prefix}-flows", "BENCH_PEER": f"{self.prefix}-echo"}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            cwd=ROOT,
            env={**os.environ, **known, **names, **environment},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        self.processes.append(process)
        assert process.stdout is not None
        async for line in process.stdout:
            if awaits.encode() in line:
                break
        else:
            raise SystemExit(f"{' '.join(command)} ended before it was ready")
        self._draining = [*getattr(self, "_draining", []), asyncio.create_task(process.stdout.read())]
        return process

    async def stop(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            await process.wait()


class Client:
    """Sends requests and waits for their replies."""

    async def connect(self, broker: str) -> None:
        self._connection = await aio_pika.connect(broker)
        self._channel = await self._connection.channel(publisher_confirms=False)
        queue = await self._channel.declare_queue(exclusive=True)
        self._reply_to = queue.name
        self._waiting: dict[str, asyncio.Future[None]] = {}
        await queue.consume(self._on_reply, no_ack=True)

    async def _on_reply(self, message: aio_pika.abc.AbstractIncomingMessage) -> None:
        future = self._waiting.pop(message.correlation_id or "", None)
        if future is not None:
            future.set_result(None)

    async def call(self, service: str, handler: str | None) -> None:
        correlation_id = uuid.uuid4().hex
        done = self._waiting[correlation_id] = asyncio.get_running_loop().create_future()
        message = aio_pika.Message(
            BODY,
            correlation_id=correlation_id,
            reply_to=self._reply_to,
            type=handler,
            message_id=correlation_id,
            content_type="application/json",
            delivery_mode=2,
        )
        await self._channel.default_exchange.publish(message, service)
        await asyncio.wait_for(done, 120)

    async def throughput(self, service: str, handler: str | None, *, count: int, width: int) -> float:
        """Lifecycles per second with `width` of them under way at any time."""
        left = iter(range(count))

        async def lane() -> None:
            for _ in left:
                await self.call(service, handler)

        begun = time.perf_counter()
        await asyncio.gather(*(lane() for _ in range(width)))
        return count / (time.perf_counter() - begun)

    async def latency_ms(self, service: str, handler: str | None, *, count: int) -> float:
        """The median of one at a time."""
        taken = []
        for _ in range(count):
            begun = time.perf_counter()
            await self.call(service, handler)
            taken.append((time.perf_counter() - begun) * 1000)
        return statistics.median(taken)


@contextlib.asynccontextmanager
async def database(admin_url: str) -> AsyncIterator[str]:
    name = f"coatcheck_bench_{uuid.uuid4().hex[:8]}"
    admin = await asyncpg.connect(admin_url)
    await admin.execute(f"CREATE DATABASE {name}")
    try:
        yield make_url(admin_url).set(database=name).render_as_string(hide_password=False)
    finally:
        await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
        await admin.close()


async def commits(store: str) -> int:
    connection = await asyncpg.connect(store)
    await asyncio.sleep(1.1)  # the statistics are written once a second
    try:
        return int(
            await connection.fetchval("SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()")
        )
    finally:
        await connection.close()


async def measure(bench: Bench, *, count: int, replicas: int) -> dict[str, dict[str, float]]:
    service, echo, naive = (f"{bench.prefix}-{role}" for role in ("flows", "echo", "naive"))
    await migrate(bench.store)
    await bench.start("bench/echo.py", echo, awaits="ready")
    for _ in range(replicas):
        await bench.start(
            "-m", "coatcheck.cli", "worker", "bench.flows:app", awaits="worker_started", COATCHECK_LOG_LEVEL="info"
        )
    await bench.start("bench/naive.py", naive, echo, awaits="ready")
    client = Client()
    await client.connect(bench.broker)
    found: dict[str, dict[str, float]] = {}
    for name, queue, handler in (
        ("naive loop, fan-4", naive, None),
        ("coatcheck, fan-4", service, "fan4"),
        ("coatcheck, fan-1", service, "fan1"),
        ("coatcheck, no wait", service, "no_wait"),
    ):
        await client.throughput(queue, handler, count=50, width=10)  # warm up
        idle_ms = await client.latency_ms(queue, handler, count=30)
        before = await commits(bench.store)
        rate = await client.throughput(queue, handler, count=count, width=100)
        spent = await commits(bench.store) - before
        found[name] = {"per_second": rate, "idle_ms": idle_ms, "commits": spent / count}
    return found


def show(found: dict[str, dict[str, float]]) -> None:
    base = found["naive loop, fan-4"]
    table = Table("", "lifecycles/s", "ratio to naive", "idle, ms", "commits each")
    for name, each in found.items():
        ratio = each["per_second"] / base["per_second"]
        table.add_row(
            name, f"{each['per_second']:.0f}", f"{ratio:.2f}", f"{each['idle_ms']:.1f}", f"{each['commits']:.2f}"
        )
    Console().print(table)


async def delete_queues(bench: Bench, *others: str) -> None:
    connection = await aio_pika.connect(bench.broker)
    async with connection:
        channel = await connection.channel()
        for role in ("flows", "echo", "naive"):
            for suffix in ("", ".replies", ".control", ".dead"):
                await channel.queue_delete(f"{bench.prefix}-{role}{suffix}")
        for queue in others:
            await channel.queue_delete(queue)
        await channel.exchange_delete(f"{bench.prefix}-flows.broadcast")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="lifecycles per measurement")
    parser.add_argument("--replicas", type=int, default=1, help="worker processes")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    settings = Settings.load()
    admin = make_url(settings.store).set(database="postgres").render_as_string(hide_password=False)
    async with database(admin) as store:
        bench = Bench(settings.broker, store)
        try:
            found = await measure(bench, count=options.count, replicas=options.replicas)
        finally:
            await bench.stop()
            await delete_queues(bench)
    if options.json:
        print(json.dumps(found))
    else:
        show(found)


if __name__ == "__main__":
    asyncio.run(main())
