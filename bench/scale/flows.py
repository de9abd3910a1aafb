"""Measurements that need real processes: their memory, timeouts that come due together, one task with many calls."""

from __future__ import annotations

import asyncio
import time

import aio_pika
from bench.scale.fill import CALLS_EACH, copy_due
from bench.scale.report import Line, percentile
from bench.scale.rig import Rig, until

SETTLE_S = 10.0
_DUE = "FROM coatcheck.call c JOIN coatcheck.task t ON t.id = c.task_id WHERE t.handler = 'give_up' AND c.is_sent"
_LATE = f"SELECT extract(epoch FROM c.closed_at - c.due_at)::float8 * 1000 AS late_ms {_DUE} AND c.state = 'timed_out'"


async def memory_lines(big: Rig, small: Rig) -> list[Line]:
    """Memory of worker and sweeper after an idle while, with many parked tasks and with few."""
    rss: dict[str, dict[str, float]] = {}
    for name, rig in (("many", big), ("few", small)):
        processes = {"worker": await rig.start_worker(), "sweeper": await rig.start_sweeper()}
        await asyncio.sleep(SETTLE_S)
        rss[name] = {role: process.rss_mb for role, process in processes.items()}
        for process in processes.values():
            await process.stop()
    return [
        Line(
            f"RSS of the {role}, many parked / few",
            rss["many"][role] / rss["few"][role],
            "x",
            target=1.05,
            note=f"{rss['many'][role]:.1f} / {rss['few'][role]:.1f} MB",
        )
        for role in ("worker", "sweeper")
    ]


async def timeout_lines(rig: Rig, *, count: int, over_s: float, workers: int) -> list[Line]:
    """So many calls due within so long, four of each task at once. Late is the claim's time less the due time."""
    sql = rig.sql
    processes = {f"worker {number}": await rig.start_worker() for number in range(workers)}
    await rig.request("give_up", b"86400.0")
    await until(lambda: sql.fetchval(f"SELECT count(*) = {CALLS_EACH} {_DUE}"))
    template = await sql.fetchval(f"SELECT t.id {_DUE} LIMIT 1")
    processes["sweeper"] = await rig.start_sweeper()
    task_count = count // CALLS_EACH
    await copy_due(sql, template, count=task_count, over_s=over_s, lead_s=5.0 + count / 10_000)
    # The hint that a worker would send once its calls are recorded.
    await rig.channel.default_exchange.publish(aio_pika.Message(b"0"), rig.hints)
    before_s = {role: process.cpu_s for role, process in processes.items()}
    done = f"SELECT count(*) = {task_count * CALLS_EACH} {_DUE} AND c.state = 'timed_out'"
    await until(lambda: sql.fetchval(done), within_s=over_s * 10 + 120, every_s=1.0)
    busy_s = {role: process.cpu_s - before_s[role] for role, process in processes.items()}
    for process in processes.values():
        await process.stop()
    late = [row["late_ms"] for row in await sql.fetch(_LATE)]
    used = ", ".join(f"{role} {busy / count * 1e6:.0f}" for role, busy in busy_s.items())
    note = f"{count:,} calls within {over_s:.0f} s; µs of CPU each: {used}"
    return [
        Line("timeouts late, p50", percentile(late, 0.5), "ms"),
        Line("timeouts late, p99", percentile(late, 0.99), "ms", target=250, note=note),
        Line("timeouts late, worst", max(late), "ms"),
    ]


async def fan_out_lines(rig: Rig, *, width: int) -> list[Line]:
    """One task that makes so many calls at once, from its request to its reply."""
    queue = await rig.channel.declare_queue(exclusive=True)
    worker, echo = await rig.start_worker(), await rig.start_echo()
    taken = [await _fan(rig, queue, size) for size in (10, width, width)]
    for process in (worker, echo):
        await process.stop()
    return [
        Line(
            f"fan-out of {width:,} calls by one task", min(taken[1:]) * 1000, "ms", note="end to end, with an echo peer"
        )
    ]


async def _fan(rig: Rig, queue: aio_pika.abc.AbstractQueue, width: int) -> float:
    begun = time.perf_counter()
    await rig.request("fan", str(width).encode(), reply_to=queue.name)
    reply = await until(lambda: queue.get(no_ack=True, fail=False), every_s=0.01)
    assert reply.body == str(width).encode(), reply.body
    return time.perf_counter() - begun
