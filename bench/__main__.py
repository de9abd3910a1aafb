"""`make bench`: what a lifecycle costs here, beside the same lifecycle written by hand, in one run on one machine.

Machines are noisy, so the ratios within a run are the figures to keep. It needs RabbitMQ and Postgres on localhost, or
COATCHECK_BROKER and COATCHECK_STORE. It makes its own database and queues and removes them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import platform
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import asyncpg
import structlog
from bench import report
from bench.client import Client, NoAnswer
from bench.crew import Crew
from bench.loop import run
from bench.measuring import Found, Plan, measure_all
from bench.rows import ROWS, Row, UnknownRow, choose
from bench.run import ROOT, Bench, database, delete_queues, servers
from bench.verdict import judge

from coatcheck.broker import connect
from coatcheck.errors import CoatcheckError

QUICK = Plan(rounds=1, count=100, idle_count=10, settle_s=0.3)


def main() -> int:
    options = parse(sys.argv[1:])
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    try:
        rows = choose(options.rows.split(",") if options.rows else list(ROWS))
        found, conditions = run(bench(rows, plan_of(options), replicas=options.replicas))
    except (UnknownRow, Unreachable) as error:
        print(error, file=sys.stderr)
        return 2
    except NoAnswer as error:
        print(error, file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("stopped; queues, database and processes are gone", file=sys.stderr)
        return 130
    publish(found, conditions, options)
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="rows:\n" + "\n".join(f"  {row.name:<13} {row.about}" for row in ROWS.values()),
    )
    parser.add_argument("--rows", help="which rows, separated by commas (default: all)")
    parser.add_argument("--rounds", type=_positive, help="how often each row is measured (default: 3)")
    parser.add_argument("--count", type=_positive, help="lifecycles per row and round (default: 1000)")
    parser.add_argument("--replicas", type=_positive, default=1, help="processes of the worker, and of each loop")
    parser.add_argument("--quick", action="store_true", help="half a minute, to see that it works")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--plot", action="store_true", help="write the figures to docs/performance.md and .svg")
    parser.add_argument("--directory", type=Path, default=ROOT / ".cache/bench", help="where the JSON goes")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def plan_of(options: argparse.Namespace) -> Plan:
    plan = QUICK if options.quick else Plan()
    return replace(plan, rounds=options.rounds or plan.rounds, count=options.count or plan.count)


class Unreachable(Exception):
    """A server does not answer; the text says which, and how to name another."""


async def bench(rows: Sequence[Row], plan: Plan, *, replicas: int) -> tuple[Found, dict[str, object]]:
    """Measure, and remove everything at the end, also after an error. Raises Unreachable and NoAnswer."""
    _stop_on_sigterm()
    broker, admin = servers()
    await _check_servers(broker, admin)
    async with contextlib.AsyncExitStack() as stack:
        store = await stack.enter_async_context(database(admin))
        bench = Bench(broker, store)
        stack.push_async_callback(delete_queues, bench, bench.hints_queue)
        stack.push_async_callback(bench.stop)
        sql = await asyncpg.connect(store)
        stack.push_async_callback(sql.close)
        client = await stack.enter_async_context(Client(broker))
        crew = Crew(bench, client, sql)
        await crew.start(rows, replicas=replicas)
        conditions = {
            "measured": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "cores": os.cpu_count(),
            "Python": platform.python_version(),
            "Postgres": (await sql.fetchval("SHOW server_version")).split()[0],
            "synchronous_commit": await sql.fetchval("SHOW synchronous_commit"),
            "rounds": plan.rounds,
            "count": plan.count,
            "replicas": replicas,
        }
        return await measure_all(crew, rows, plan, say=lambda text: print(text, file=sys.stderr)), conditions


def _stop_on_sigterm() -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


async def _check_servers(broker: str, admin: str) -> None:
    try:
        await (await asyncpg.connect(admin, timeout=5)).close()
    except (OSError, TimeoutError, asyncpg.PostgresError) as error:
        raise Unreachable(f"no Postgres: {error}; start one on localhost, or set COATCHECK_STORE") from error
    try:
        async with connect(broker, connect_budget=3):
            pass
    except CoatcheckError as error:
        raise Unreachable(f"no RabbitMQ: {error}; start one on localhost, or set COATCHECK_BROKER") from error


def publish(found: Found, conditions: dict[str, object], options: argparse.Namespace) -> None:
    verdicts = judge(found)
    document, sheets = report.to_json(found, verdicts, conditions), report.sheets(found, verdicts)
    said = report.notes(found, conditions)
    options.directory.mkdir(parents=True, exist_ok=True)
    path = options.directory / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
    path.write_text(document, encoding="utf-8")
    if options.plot:
        report.write_page(sheets, said, ROOT / "docs/performance.md")
        (ROOT / "docs/performance.svg").write_text(report.draw(found), encoding="utf-8")
    if options.json:
        print(document)
    else:
        report.show(sheets, said)
        print(f"JSON in {os.path.relpath(path)}")


if __name__ == "__main__":
    sys.exit(main())
