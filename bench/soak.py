"""`make soak MINUTES=10`: a worker, a sweeper, a peer and a steady load, and what they hold as time goes by.

It writes to .cache/soak/: samples.csv, plot.svg, and verdict.txt. The verdict says for each measure how it went after
the warm-up: its start, its end, its slope, and whether it grows. Rows are kept for a minute only, so that the tables
reach a steady size. It needs RabbitMQ and Postgres on localhost, or COATCHECK_BROKER and COATCHECK_STORE. It makes its
own database and queues and removes them.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import itertools
import json
import statistics
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

import aio_pika
import asyncpg
from bench.plot import COLOURS, document, label
from bench.run import Bench, database, delete_queues, servers

from coatcheck.store import migrate

HANDLERS = ("fan", "chain", "nap", "again", "late", "plain")
PATIENCE_S = 60.0
WARM_UP = 1 / 3
"""The part of a run that its verdict leaves out: caches fill, retention begins, autovacuum starts."""
GROWTH = 1.05
"""How much higher the last third may be than the thirds before it, beyond its floor, before we say that it grows."""
FLOORS = {"rss_mb": 3.0, "fds": 3.0, "connections": 2.0, "dead_tuples": 2000.0, "live_tuples": 2000.0, "tables_mb": 4.0}
TABLES = """
    SELECT sum(n_live_tup)::bigint AS live_tuples, sum(n_dead_tup)::bigint AS dead_tuples,
           sum(pg_total_relation_size(relid))::bigint AS size FROM pg_stat_user_tables
"""
CONNECTIONS = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'coatcheck'"
)

Sample = dict[str, float]


# --- the load ---


@dataclass
class Load:
    """Sends so many requests a second at a fixed rate, and checks every answer."""

    service: str
    notes: list[str] = field(default_factory=list)
    """What the verdict should say about the machine."""
    done_count: int = 0
    wrong: list[str] = field(default_factory=list)
    taken_s: list[float] = field(default_factory=list)

    async def connect(self, broker: str) -> None:
        connection = await aio_pika.connect(broker)
        self._channel = await connection.channel(publisher_confirms=False)
        queue = await self._channel.declare_queue(exclusive=True)
        self._reply_to = queue.name
        self._waiting: dict[str, asyncio.Future[bytes]] = {}
        self.disconnect = connection.close
        await queue.consume(self._on_reply, no_ack=True)

    async def _on_reply(self, message: aio_pika.abc.AbstractIncomingMessage) -> None:
        future = self._waiting.pop(message.correlation_id or "", None)
        if future is not None:
            future.set_result(message.body)

    async def run(self, *, rate: float, for_s: float) -> None:
        """Ask at a steady rate, then wait for the answers that are missing."""
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        async with asyncio.TaskGroup() as group:
            for number, handler in enumerate(itertools.cycle(HANDLERS)):
                due_s = begun_s + number / rate
                if due_s - begun_s >= for_s:
                    return
                await asyncio.sleep(max(0.0, due_s - loop.time()))
                group.create_task(self._ask(handler, f"text {number}"))

    async def _ask(self, handler: str, text: str) -> None:
        correlation_id, begun_s = uuid.uuid4().hex, time.perf_counter()
        answered = self._waiting[correlation_id] = asyncio.get_running_loop().create_future()
        message = aio_pika.Message(
            json.dumps(text).encode(),
            correlation_id=correlation_id,
            reply_to=self._reply_to,
            type=handler,
            message_id=correlation_id,
            content_type="application/json",
            delivery_mode=2,
        )
        await self._channel.default_exchange.publish(message, self.service)
        try:
            answer = json.loads(await asyncio.wait_for(answered, PATIENCE_S))
        except TimeoutError:
            answer = "nothing"
        if answer == text:
            self.done_count += 1
            self.taken_s.append(time.perf_counter() - begun_s)
        else:
            self.wrong.append(f"{handler}: {answer!r}")


# --- what is measured ---


class Sampler:
    """Looks at the processes, the database and the load."""

    def __init__(self, processes: dict[str, int], sql: asyncpg.Connection, load: Load) -> None:
        self._processes = processes
        self._sql = sql
        self._load = load
        self._begun_s = time.monotonic()
        self._last = (0.0, 0)
        self.samples: list[Sample] = []

    async def run(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            self.samples.append(await self.sample())

    async def sample(self) -> Sample:
        at_s, done = time.monotonic() - self._begun_s, self._load.done_count
        found: Sample = {"at_s": round(at_s, 2), "tasks_per_s": (done - self._last[1]) / (at_s - self._last[0])}
        taken_s, self._load.taken_s = self._load.taken_s, []
        found["median_ms"] = statistics.median(taken_s) * 1000 if taken_s else 0.0
        self._last = (at_s, done)
        for name, pid in self._processes.items():
            found[f"rss_mb {name}"] = resident_mb(pid)
            found[f"fds {name}"] = float(open_file_count(pid))
        found["connections"] = float(await self._sql.fetchval(CONNECTIONS))
        tables = await self._sql.fetchrow(TABLES)
        found |= {name: float(tables[name]) for name in ("live_tuples", "dead_tuples")}
        return found | {"tables_mb": tables["size"] / 2**20}


def resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


def open_file_count(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


# --- what it means ---


def kind_of(name: str) -> str:
    """The kind of a measure: `rss_mb worker` and `rss_mb peer` have the same kind."""
    return name.partition(" ")[0]


def slope_per_hour(samples: Sequence[Sample], name: str) -> float:
    """The least-squares line through a measure, per hour."""
    if len(samples) < 2:
        return 0.0
    line = statistics.linear_regression([each["at_s"] for each in samples], [each[name] for each in samples])
    return line.slope * 3600


def is_growing(samples: Sequence[Sample], name: str) -> bool:
    """Whether the last third is clearly higher than the thirds before it."""
    floor = FLOORS.get(kind_of(name))
    if floor is None or len(samples) < 6:
        return False
    values = [each[name] for each in samples]
    cut = len(values) * 2 // 3
    before, after = statistics.mean(values[:cut]), statistics.mean(values[cut:])
    return after > before * GROWTH and after - before > floor


def judge(samples: Sequence[Sample], load: Load) -> tuple[str, bool]:
    """The verdict in words, and whether it is good."""
    settled = samples[int(len(samples) * WARM_UP) :]
    growing = [name for name in samples[0] if is_growing(settled, name)]
    lines = [
        f"{load.done_count:,} tasks with the right answer, {len(load.wrong)} without, in {samples[-1]['at_s']:.0f} s",
        f"after a warm-up of {settled[0]['at_s']:.0f} s:",
    ]
    for name in samples[0]:
        if name != "at_s":
            values = [each[name] for each in settled]
            word = "GROWS" if name in growing else "steady" if kind_of(name) in FLOORS else ""
            lines.append(
                f"  {name:<18} {values[0]:>10.1f} -> {values[-1]:>10.1f}   "
                f"mean {statistics.mean(values):>10.1f}   {slope_per_hour(settled, name):>+12.2f} per hour   {word}"
            )
    lines += load.notes + [f"wrong: {each}" for each in load.wrong[:10]]
    return "\n".join(lines) + "\n", not growing and not load.wrong


# --- the plot ---

PANELS = (
    ("tasks_per_s",),
    ("median_ms",),
    ("rss_mb",),
    ("fds",),
    ("connections",),
    ("live_tuples", "dead_tuples"),
    ("tables_mb",),
)
WIDTH, HEIGHT, LEFT, GAP = 860, 110, 70, 46


def draw(samples: Sequence[Sample]) -> str:
    """A panel for each measure, one under the other, all on the same time."""
    end_s = max(each["at_s"] for each in samples) or 1.0
    parts = [_panel(samples, panel, top=30 + index * (HEIGHT + GAP), end_s=end_s) for index, panel in enumerate(PANELS)]
    height = 30 + len(PANELS) * (HEIGHT + GAP)
    return document(parts, width=LEFT + WIDTH + 40, height=height)


def _panel(samples: Sequence[Sample], panel: tuple[str, ...], *, top: int, end_s: float) -> str:
    names = [name for name in samples[0] if kind_of(name) in panel]
    highest = max((each[name] for each in samples for name in names), default=0.0) or 1.0
    frame = f'<rect x="{LEFT}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#bbb"/>'
    drawn = [
        frame,
        label(LEFT - 6, top + 10, f"{highest:,.4g}", anchor="end"),
        label(LEFT - 6, top + HEIGHT, "0", anchor="end"),
        label(LEFT + WIDTH, top + HEIGHT + 14, f"{end_s / 60:.1f} min", anchor="end"),
    ]
    for index, name in enumerate(names):
        colour = COLOURS[index % len(COLOURS)]
        points = " ".join(
            f"{LEFT + each['at_s'] / end_s * WIDTH:.1f},{top + HEIGHT * (1 - each[name] / highest):.1f}"
            for each in samples
        )
        drawn.append(f'<polyline data-name="{escape(name)}" points="{points}" fill="none" stroke="{colour}"/>')
        drawn.append(label(LEFT + index * 180, top - 6, f"{name} {samples[-1][name]:,.4g}", colour=colour))
    return "\n".join(drawn)


# --- a run ---


async def soak(bench: Bench, *, for_s: float, every_s: float, rate: float) -> tuple[list[Sample], Load]:
    """Start everything, keep it busy for so long, and return the samples. The caller stops the processes."""
    await migrate(bench.store)
    settings = {
        "COATCHECK_DEDUP_WINDOW": "60s",
        "COATCHECK_KEEP_FAILURES": "60s",
        "COATCHECK_SWEEPER_QUEUE": bench.hints_queue,
    }
    cli = ("-m", "coatcheck.cli")
    started = {
        "worker": await bench.start(*cli, "worker", "bench.soak_app:app", awaits="worker_started", **settings),
        "sweeper": await bench.start(*cli, "sweeper", awaits="sweeper_started", **settings),
        "peer": await bench.start("-m", "bench.echo", f"{bench.prefix}-echo", awaits="ready"),
    }
    load, sql = Load(f"{bench.prefix}-flows"), await asyncpg.connect(bench.store)
    if await sql.fetchval("SHOW autovacuum") == "off":
        load.notes.append("autovacuum is off on this Postgres: dead tuples and tables can only grow")
    sampler = Sampler({name: process.pid for name, process in started.items()}, sql, load)
    await load.connect(bench.broker)
    sampling = asyncio.create_task(sampler.run(every_s))
    try:
        await load.run(rate=rate, for_s=for_s)
        if not sampler.samples:  # the run was over before the first look
            sampler.samples.append(await sampler.sample())
    finally:
        sampling.cancel()
        await asyncio.wait([sampling])
        await load.disconnect()
        await sql.close()
    return sampler.samples, load


def write(samples: Sequence[Sample], verdict: str, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "samples.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.DictWriter(file, fieldnames=list(samples[0]))
        rows.writeheader()
        rows.writerows({name: round(value, 3) for name, value in each.items()} for each in samples)
    (directory / "plot.svg").write_text(draw(samples), encoding="utf-8")
    (directory / "verdict.txt").write_text(verdict, encoding="utf-8")


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=50.0, help="tasks a second")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two looks")
    parser.add_argument("--directory", type=Path, default=Path(".cache/soak"))
    options = parser.parse_args()
    broker, admin = servers()
    async with database(admin) as store:
        bench = Bench(broker, store)
        try:
            samples, load = await soak(bench, for_s=options.minutes * 60, every_s=options.every, rate=options.rate)
        finally:
            await bench.stop()
            await delete_queues(bench, bench.hints_queue)
    verdict, is_good = judge(samples, load)
    write(samples, verdict, options.directory)
    print(verdict + f"plot and samples in {options.directory}/")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
