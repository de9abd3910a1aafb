"""What a lifecycle, by default fan-4, costs one worker without its AMQP client.

`python -m bench.profile_worker [--handler no_wait] [--profile]`: a worker on the in-memory broker and the real
Postgres, with an echo peer and an asker in the same process, which cost little. It needs Postgres as `make bench` does.
It makes its own database and removes it.
"""

import argparse
import asyncio
import cProfile
import os
import pstats
import statistics
import time
import uuid
from datetime import timedelta
from pathlib import Path

import asyncpg
import uvloop
from bench.client import BODY
from bench.flows import PEER, app
from bench.run import database, servers

from coatcheck.broker import connect
from coatcheck.broker.port import Broker, Delivery, Message, Outgoing
from coatcheck.cli.run import settle_in
from coatcheck.store import migrate
from coatcheck.worker import logs
from coatcheck.worker.settings import LogFormat, Settings
from coatcheck.worker.worker import Worker

BROKER = "memory://profile"
NOWHERE = Path(os.devnull).open("w")  # noqa: SIM115 - lines are rendered and written as in a worker, and never read


class Peers:
    """The echo peer and the asker, on their own connection. Messages that arrive in one turn leave in one batch."""

    def __init__(self, broker: Broker, handler: str) -> None:
        self._broker = broker
        self._handler = handler
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._leaving: list[Outgoing] = []
        self._publishing: set[asyncio.Task[object]] = set()

    async def start(self) -> None:
        for service in (PEER, app.service):
            await self._broker.declare_service(service)
        self._replies = await self._broker.declare_private()
        await self._broker.consume(PEER, self._echo, prefetch=10_000)
        await self._broker.consume(self._replies, self._on_reply, prefetch=10_000)

    def _echo(self, delivery: Delivery) -> None:
        message = delivery.message
        self._send(Outgoing(message.reply_to or "", Message(message.body, message.correlation_id)))
        delivery.ack()

    def _on_reply(self, delivery: Delivery) -> None:
        self._waiting.pop(delivery.message.correlation_id or "").set_result(None)
        delivery.ack()

    def _send(self, outgoing: Outgoing) -> None:
        self._leaving.append(outgoing)
        if len(self._leaving) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        batch, self._leaving = self._leaving, []
        task = asyncio.get_running_loop().create_task(self._broker.publish(batch))
        self._publishing.add(task)
        task.add_done_callback(self._publishing.discard)

    async def call(self) -> None:
        name = uuid.uuid4().hex
        done = self._waiting[name] = asyncio.get_running_loop().create_future()
        self._send(Outgoing(app.service, Message(BODY, name, self._replies, "application/json", self._handler, name)))
        await done

    async def saturate(self, count: int, width: int) -> None:
        left = iter(range(count))

        async def lane() -> None:
            for _ in left:
                await self.call()

        await asyncio.gather(*(lane() for _ in range(width)))

    async def idle_ms(self, count: int) -> float:
        """The median over lifecycles that run one at a time."""
        taken = []
        for _ in range(count):
            begun = time.perf_counter()
            await self.call()
            taken.append((time.perf_counter() - begun) * 1000)
        return statistics.median(taken)


async def measure(store: str, options: argparse.Namespace) -> None:
    logs.configure(LogFormat.JSON, stream=NOWHERE)
    settle_in()
    sql = await asyncpg.connect(store)

    async def writes() -> int:
        return int(await sql.fetchval("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint"))

    settings = Settings(broker=BROKER, store=store, health_port=None, grace=timedelta(seconds=5))
    async with connect(BROKER) as broker:
        peers, worker = Peers(broker, options.handler), Worker(app, settings)
        await peers.start()
        running = asyncio.create_task(worker.run())
        await peers.call()
        await peers.saturate(options.width * 2, options.width)
        rounds = []
        for _ in range(options.rounds):
            before, cpu_s, wall_s = await writes(), time.process_time(), time.perf_counter()
            await peers.saturate(options.count, options.width)
            wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
            each = options.count
            rounds.append((cpu_s / each * 1000, each / wall_s, (await writes() - before) / each))
        cpu_ms, rates, busy = (sorted(column) for column in zip(*rounds, strict=True))
        before, idle_ms = await writes(), await peers.idle_ms(options.idle)
        idle = (await writes() - before) / options.idle
        print(
            f"CPU {cpu_ms[0]:.2f} ms at best, {statistics.median(cpu_ms):.2f} mostly;  {rates[-1]:.0f} lifecycles/s at "
            f"best;  write transactions {busy[0]:.2f};  one at a time {idle_ms:.1f} ms, {idle:.2f}"
        )
        if options.profile:
            with cProfile.Profile() as profile:
                await peers.saturate(options.count * 5, options.width)
            stats = pstats.Stats(profile)
            print(f"{stats.total_calls / options.count / 5:.0f} function calls of one lifecycle")  # type: ignore[attr-defined]
            stats.sort_stats(options.profile).print_stats(options.lines)
            stats.dump_stats(options.dump) if options.dump else None
        worker.stop()
        await running
    await sql.close()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--handler", default="fan4", help="one of bench/flows.py that takes a text")
    parser.add_argument("--count", type=int, default=300, help="lifecycles per round")
    parser.add_argument("--width", type=int, default=150, help="lifecycles under way at a time")
    parser.add_argument("--rounds", type=int, default=20, help="many and short, so that some are undisturbed")
    parser.add_argument("--idle", type=int, default=50, help="lifecycles one at a time")
    parser.add_argument("--profile", nargs="?", const="tottime", help="profile one more round, sorted by this")
    parser.add_argument("--lines", type=int, default=40)
    parser.add_argument("--dump", help="write the profile to this file too")
    options = parser.parse_args()
    async with database(servers()[1], prefix="coatcheck_cpu") as store:
        await migrate(store)
        await measure(store, options)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
