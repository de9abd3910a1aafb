"""`make bench-peers`: the fan-4 lifecycle in other frameworks and in Coatcheck, in one run on one machine.

Each framework has its own environment under .cache/bench-peers, from bench/peers/requirements-NAME.txt. A round visits
all of them: a fresh database, fresh processes, a warm-up, lifecycles one at a time, then a load that is measured while
it is under way. Ratios are taken within a round, so a machine that slows down slows all of them.
It needs RabbitMQ, Postgres and Redis on localhost, or COATCHECK_BROKER, COATCHECK_STORE and PEERS_REDIS; for Restate
also npm, which brings its server. It writes .cache/bench/peers.json. Run it on a machine that does nothing else: the
CPU of the servers is counted for every program that uses them.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import time
import uuid
from pathlib import Path

from bench.peers.catalogue import PEERS, ROOT, SCRATCH, Peer, PeerFailed, ensure_environment, version_of
from bench.peers.report import Row, disturbance, show, summary, write_docs
from bench.peers.stage import LOGS, Stage
from bench.run import database, servers
from rich.console import Console

RESULT = ROOT / ".cache" / "bench" / "peers.json"
WARM_UP_LIMIT_S = 30.0
NAMES = sorted({peer.name for peer in PEERS} | {peer.slug for peer in PEERS})


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.peers", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", action="append", choices=NAMES, help="a framework, or one of its shapes; repeatable")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is visited")
    parser.add_argument("--seconds", type=float, default=10, help="how long a load is measured")
    parser.add_argument("--warm-up", type=float, default=5, help="how long it runs before, in seconds, at least")
    parser.add_argument("--width", type=int, default=200, help="lifecycles under way at once, under load")
    parser.add_argument("--count", type=int, default=100, help="lifecycles one at a time, at most")
    parser.add_argument("--idle-seconds", type=float, default=8, help="and for so long at most")
    parser.add_argument("--docs", type=Path, help="a page for the table, if it is whole and undisturbed")
    parser.add_argument("--output", type=Path, default=RESULT, help="where the JSON goes (default: %(default)s)")
    return parser.parse_args()


async def main(options: argparse.Namespace) -> None:
    task = asyncio.current_task()
    assert task is not None
    # A signal to end works like an interrupt: the database, the queues and the processes are removed first.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    chosen = [peer for peer in PEERS if not options.only or {peer.name, peer.slug} & set(options.only)]
    shutil.rmtree(LOGS, ignore_errors=True)
    pythons = await environments(chosen)
    rounds: dict[Peer, list[Row]] = {peer: [] for peer in chosen}
    for number in range(options.rounds):
        for peer in chosen:
            row = await visit(peer, pythons[peer.name], options)
            rounds[peer].append(row)
            outcome = row.get("failed") or f"{row['per_second']:.0f} lifecycles/s"
            Console().print(f"round {number + 1}, {peer.label}: {outcome}", highlight=False, soft_wrap=True)
    own = rounds.get(PEERS[0], [None] * options.rounds)
    found = {f"{peer.label} {version_of(peer)}".strip(): summary(rows, own) for peer, rows in rounds.items()}
    report(found, rounds, options)


async def environments(chosen: list[Peer]) -> dict[str, Path | PeerFailed]:
    """Build what is missing before the first round, so that no installation runs beside a measurement."""
    found: dict[str, Path | PeerFailed] = {}
    for peer in chosen:
        if peer.name not in found:
            try:
                found[peer.name] = await ensure_environment(peer)
            except PeerFailed as failure:
                found[peer.name] = failure
    return found


async def visit(peer: Peer, python: Path | PeerFailed, options: argparse.Namespace) -> Row:
    """Measure one framework in one round. An error becomes its row, and the other frameworks go on."""
    if isinstance(python, PeerFailed):
        return {"failed": str(python)}
    data = SCRATCH / "data"
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir(parents=True)
    broker, admin = servers()
    try:
        async with database(admin, prefix="ccbench_peers") as url:
            environment = {
                "PEERS_PREFIX": f"ccbench-peers-{uuid.uuid4().hex[:8]}",
                "PEERS_VARIANT": peer.variant,
                "PEERS_BROKER": broker,
                "PEERS_DATABASE": url,
                "PEERS_REDIS": os.environ.get("PEERS_REDIS", "redis://localhost:6379/0"),
                "PEERS_DATA": str(data),
                "PEERS_PORTS": ",".join(str(port) for port in free_ports(4)),
                "PEERS_HOME": str(SCRATCH / peer.name),
            }
            stage = Stage(peer, python=python, environment=environment)
            try:
                return await measure(stage, options)
            finally:
                await stage.stop()
    except PeerFailed as failure:
        return {"failed": str(failure)}
    finally:
        shutil.rmtree(data, ignore_errors=True)


async def measure(stage: Stage, options: argparse.Namespace) -> Row:
    """Warm up, then one lifecycle at a time, then saturated."""
    await stage.start()
    await stage.ask("idle 10 5", client_count=1)
    [idle] = await stage.ask(f"idle {options.count} {options.idle_seconds}", client_count=1)
    width = min(options.width, stage.peer.width_limit)
    await stage.ask(f"load {width // len(stage.clients)} {options.warm_up}")
    await until_steady(stage, width=width, at_least_s=options.warm_up)
    cpu_before, done_before, begun_s = stage.cpu(), await done_count(stage), time.perf_counter()
    await asyncio.sleep(options.seconds)
    cpu_after, done_after, ended_s = stage.cpu(), await done_count(stage), time.perf_counter()
    done = done_after - done_before
    if done <= 0:
        raise PeerFailed(f"no lifecycle ended within {options.seconds:.0f} s of load")
    spent_s = {group: cpu_after[group] - cpu_before[group] for group in cpu_after}
    machine_s = spent_s.pop("machine")
    return {
        "per_second": done / (ended_s - begun_s),
        "idle_ms": idle["taken_ms"],
        "cpu_ms": sum(spent_s.values()) / done * 1000,
        "cpu_ms_by_group": {group: each / done * 1000 for group, each in spent_s.items()},
        "foreign_cores": max(0.0, machine_s - sum(spent_s.values())) / (ended_s - begun_s),
    }


async def until_steady(stage: Stage, *, width: int, at_least_s: float) -> None:
    """Wait until as many have ended as are under way, for a limited time."""
    begun_s = time.monotonic()
    await asyncio.sleep(at_least_s)
    while await done_count(stage) < width and time.monotonic() < begun_s + WARM_UP_LIMIT_S:  # noqa: ASYNC110
        await asyncio.sleep(0.5)


async def done_count(stage: Stage) -> int:
    return sum(answer["done"] for answer in await stage.ask("count"))


def report(found: dict[str, Row], rounds: dict[Peer, list[Row]], options: argparse.Namespace) -> None:
    show(found)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    asked = {"rounds": options.rounds, "seconds": options.seconds, "width": options.width}
    raw = {peer.slug: rows for peer, rows in rounds.items()}
    options.output.write_text(json.dumps({"cores": os.cpu_count(), **asked, "rows": found, "raw": raw}, indent=1))
    if options.docs is not None and not options.only and not disturbance(found):
        conditions = (
            f"{options.rounds} rounds of {options.seconds:.0f} s with {options.width} lifecycles under way, "
            f"{os.cpu_count()} cores: the median, then the lowest and the highest."
        )
        write_docs(options.docs, found, conditions=conditions)


def free_ports(count: int) -> list[int]:
    """Ports that are free at this moment."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


asyncio.run(main(parsed()))
