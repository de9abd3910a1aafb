"""`make scale`: a million parked tasks, and their effect on everything else.

It fills its own database with parked tasks of four open calls each, then measures beside an almost empty one: bytes
per task, memory of worker and sweeper, claims, the sweeper's looks, timeouts that come due together, a wide fan-out,
a long journal, and whether retention keeps up. It needs RabbitMQ and Postgres on localhost, or COATCHECK_BROKER and
COATCHECK_STORE, as a superuser. It removes what it makes.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

from bench.run import database, servers
from bench.scale.fill import TASK_ID, Copies, copy, park_one, row_sizes
from bench.scale.flows import fan_out_lines, memory_lines, timeout_lines
from bench.scale.lifecycles import cost_lines
from bench.scale.replay import replay_lines
from bench.scale.report import Line, show, write
from bench.scale.retention import retention_lines
from bench.scale.rig import Rig
from bench.scale.tables import claim_lines, look_lines, people_lines, size_lines

OUTPUT = Path(".cache/bench/scale.json")


async def measure(options: argparse.Namespace, big: Rig, small: Rig) -> AsyncIterator[list[Line]]:
    """Run one part after the other; each leaves the tables in a state that the next one can use."""
    copies, few = await fill(big, options, options.tasks), await fill(small, options, options.claims)
    yield await size_lines(big, copies)
    yield await memory_lines(big, small)
    yield await claim_lines(big, copies, small, few, count=options.claims)
    yield await look_lines(big, small)
    yield await people_lines(big)
    yield await timeout_lines(
        big, count=options.timeouts, over_s=options.timeouts_within, workers=options.timeouts_workers
    )
    yield await fan_out_lines(big, width=options.fan_out)
    yield await replay_lines(entries=options.journal)
    await small.sql.execute("TRUNCATE coatcheck.journal, coatcheck.call, coatcheck.task")
    yield await retention_lines(small, count=options.finished)
    yield await cost_lines(small, count=options.finished)


async def fill(rig: Rig, options: argparse.Namespace, count: int) -> Copies:
    worker = await rig.start_worker()
    template = await park_one(rig, size=options.request_bytes)
    await worker.stop()
    begun = time.perf_counter()
    copies = await copy(rig.sql, template, count=count)
    wanted = await row_sizes(rig.sql, template)
    found = await row_sizes(rig.sql, await rig.sql.fetchval(f"SELECT {TASK_ID} FROM (SELECT 1 AS number) n"))
    if found != wanted:
        raise SystemExit(f"a copy's rows are of {found} bytes, those of a real task of {wanted}")
    print(f"{count:,} tasks of rows of {wanted} bytes in {time.perf_counter() - begun:.0f} s", flush=True)
    return copies


async def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__)
    parser.add_argument("--tasks", type=int, default=1_000_000, help="parked tasks")
    parser.add_argument("--request-bytes", type=int, default=1024, help="size of each task's request")
    parser.add_argument("--claims", type=int, default=2000, help="claims that are timed, on each table")
    parser.add_argument("--timeouts", type=int, default=100_000, help="calls that come due together")
    parser.add_argument("--timeouts-within", type=float, default=60.0, help="the seconds they are spread over")
    parser.add_argument("--timeouts-workers", type=int, default=1, help="workers that take them")
    parser.add_argument("--fan-out", type=int, default=1000, help="calls of one task")
    parser.add_argument("--journal", type=int, default=1000, help="entries of a journal that is replayed")
    parser.add_argument("--finished", type=int, default=3000, help="tasks that finish and are retired, a round")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="where the JSON goes (default: %(default)s)")
    options = parser.parse_args()
    broker, admin = servers()
    lines: list[Line] = []
    async with AsyncExitStack() as stack:
        rigs = [
            await stack.enter_async_context(
                Rig(broker, await stack.enter_async_context(database(admin, prefix="coatcheck_scale")))
            )
            for _ in range(2)
        ]
        async for found in measure(options, *rigs):
            lines += found
            show(found)
            write(lines, options.output, **(vars(options) | {"output": str(options.output)}))
    show(lines)


if __name__ == "__main__":
    asyncio.run(main())
